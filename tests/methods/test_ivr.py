"""IVR against automatic differentiation of each image's own loss, one image at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from duplex.methods.ivr import Ivr
from tests.methods.field import SEEN, N, batch, build, close, cross_entropy, dot, linear, mlp, scores, softmax, unit

ROW: dict[str, Any] = {"width": 6, "scale": 5.0, "discard": 0.34, "penalty": 0.5}


def gradients(classify, h, own):
    """dCE/dh and dCE/dW of one image, by automatic differentiation."""
    h, weight = h.clone().requires_grad_(), classify.weight.detach().clone().requires_grad_()
    loss = torch_cross_entropy((weight @ h + classify.bias)[None], torch.tensor([own]))
    return torch.autograd.grad(loss, (h, weight))


def invariant(classify, h, own, domain, discard):
    logits, penalties = [], []
    for i in range(len(h)):
        after = [(i + k) % len(h) for k in range(1, len(h))]
        partners = [j for j in after if own[j] == own[i] and domain[j] != domain[i]]
        mask = torch.ones(len(h[i]), dtype=torch.float64)
        if partners:
            j = partners[0]
            apart = (gradients(classify, h[i], own[i])[0] - gradients(classify, h[j], own[j])[0]).abs()
            for channel in sorted(range(len(mask)), key=lambda k: -float(apart[k]))[: int(discard * len(mask))]:
                mask[channel] = 0.0
            mine, theirs = (gradients(classify, h[k] * mask, own[k])[1] for k in (i, j))
            penalties.append(float(((mine - theirs) ** 2).sum()))
        logits.append(linear(classify, h[i] * mask))
    return cross_entropy(logits, own), sum(penalties) / max(len(penalties), 1)


def test_losses_and_scores_by_loops():
    method, images = build(Ivr, **ROW), batch(7)
    own = images.compositions.tolist()
    h_s = [unit(mlp(method.see_s, unit(z))) for z in images.z]
    h_o = [unit(mlp(method.see_o, unit(z))) for z in images.z]
    v_s = [unit(linear(method.embed_s, row)) for row in method.words.states]
    v_o = [unit(linear(method.embed_o, row)) for row in method.words.objects]

    def cosine(i, c):
        return 5.0 * (dot(h_s[i], v_s[c // N]) + dot(h_o[i], v_o[c % N])) / 2

    states, objects = [c // N for c in own], [c % N for c in own]
    losses = method.losses(images, ())
    loss_s, grad_s = invariant(method.classify_s, h_s, states, objects, 0.34)
    loss_o, grad_o = invariant(method.classify_o, h_o, objects, states, 0.34)
    close(losses["c"].item(), cross_entropy([[cosine(i, c) for c in SEEN] for i in range(7)], map(SEEN.index, own)))
    close(losses["s"].item(), loss_s)
    close(losses["o"].item(), loss_o)
    assert grad_s + grad_o > 0
    close(losses["grad"].item(), 0.5 * (grad_s + grad_o))
    p_s = [softmax(linear(method.classify_s, h)) for h in h_s]
    p_o = [softmax(linear(method.classify_o, h)) for h in h_o]
    asked = [2, 9]
    expected = [[cosine(i, c) + math.log(p_s[i][c // N] * p_o[i][c % N]) for c in asked] for i in range(7)]
    close(scores(method, asked, images), expected)


def test_domains_that_agree_are_not_punished():
    """Partners with equal features have equal gradients: no penalty, and what is discarded changes nothing else."""
    method = build(Ivr, **ROW)
    h = unit(torch.arange(6, dtype=torch.float64) - 2.2).repeat(2, 1)
    _, penalty = method.invariant(h, method.classify_s, torch.tensor([1, 1]), torch.tensor([0, 2]))
    assert abs(penalty.item()) < 1e-12
