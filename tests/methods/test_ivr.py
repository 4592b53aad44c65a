"""IVR against automatic differentiation and loops over images, partners and channels."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from duplex.methods.ivr import Ivr
from tests.methods.field import SEEN, N, batch, build, check_losses, scores, targets
from tests.methods.loops import close, composed, cross_entropy, linear, mlp, products, softmax, unit

ROW: dict[str, Any] = {"width": 6, "scale": 5.0, "discard": 0.34, "again": 0.7, "penalty": 0.5}


def gradients(classify, rows, own):
    """Of the mean cross-entropy with respect to weights and biases, by automatic differentiation."""
    weight, bias = (part.detach().clone().requires_grad_() for part in (classify.weight, classify.bias))
    loss = torch_cross_entropy(torch.stack(rows) @ weight.T + bias, torch.tensor(own))
    return torch.autograd.grad(loss, (weight, bias))


def mask_by_hand(side, own):
    first, second = side.classify.weight[own], side.classify_partner.weight[own]
    apart = (first - second).abs().tolist()
    mask = torch.ones(len(apart), dtype=torch.float64)
    for channel in sorted(range(len(apart)), key=lambda k: -apart[k])[: int(0.34 * len(apart))]:
        mask[channel] = 0.0
    return mask


def side_by_hand(side, f, own, domain):
    """`CE + CE'`, `L + L'` and `L_grad`."""
    h = [mlp(side.head, row) for row in f]
    pairs = []
    for i in range(len(h)):
        after = [(i + k) % len(h) for k in range(1, len(h))]
        pairs += [(i, j) for j in after if own[j] == own[i] and domain[j] != domain[i]][:1]
    labels = [own[i] for i, _ in pairs]
    ways = [(side.classify, [h[i] for i, _ in pairs]), (side.classify_partner, [h[j] for _, j in pairs])]
    plain = cross_entropy([linear(side.classify, row) for row in h], own)
    plain += cross_entropy([linear(side.classify_partner, row) for row in ways[1][1]], labels)
    masked = [(c, [row * mask_by_hand(side, y) for row, y in zip(rows, labels, strict=True)]) for c, rows in ways]
    again = sum(cross_entropy([linear(c, row) for row in rows], labels) for c, rows in masked)
    mine, theirs = (gradients(c, rows, labels) for c, rows in masked)
    apart = sum(float(((a - b) ** 2).sum()) for a, b in zip(mine, theirs, strict=True)) / 2
    return plain, again, apart


def test_losses_and_scores_by_loops():
    method, images = build(Ivr, **ROW), batch(7)
    f = [mlp(method.embed, unit(z)) for z in images.cls]
    place, m, n = targets(images)

    def cosines(columns, scale=1.0):
        return products(map(unit, f), [composed(method, c) for c in columns], scale)

    plain_s, again_s, apart_s = side_by_hand(method.of_states, f, m, n)
    plain_o, again_o, apart_o = side_by_hand(method.of_objects, f, n, m)
    assert apart_s + apart_o > 0
    check_losses(
        method,
        images,
        composition=cross_entropy(cosines(SEEN, 5.0), place),
        state=plain_s,
        object=plain_o,
        again=0.7 * (again_s + again_o),
        penalty=0.5 * (apart_s + apart_o),
    )
    candidates, expected = [2, 9], []
    for row, d_c in zip(f, cosines([2, 9]), strict=True):
        p_s, p_o = (softmax(linear(s.classify, mlp(s.head, row))) for s in (method.of_states, method.of_objects))
        expected.append([p_s[c // N] * p_o[c % N] + d for c, d in zip(candidates, d_c, strict=True)])
    close(scores(method, candidates, images), expected)


def test_images_without_partners_only_have_the_plain_losses():
    method, images = build(Ivr, **ROW), batch(1)
    losses = method.losses(images, method.shared())
    f = mlp(method.embed, unit(images.cls[0]))
    own = images.compositions.tolist()[0]
    of_state = linear(method.of_states.classify, mlp(method.of_states.head, f))
    close(losses["state"].item(), cross_entropy([of_state], [own // N]))
    assert losses["again"] == losses["penalty"] == 0
