import math
from typing import Any

import numpy as np
import pytest
import torch

from duplex.methods.cge import Cge
from duplex.methods.cge_visual import MESSAGES, CgeVisual
from duplex.methods.layers import CompositionIndex
from tests.methods import twin
from tests.methods.field import LABELS, SEEN, N, batch, build, check_losses, scores
from tests.methods.loops import close, cross_entropy, dot, linear, products, softmax, unit
from tests.methods.world import every_row

GRAPH: dict[str, Any] = {"width": 6, "out": 5, "image_layers": 1}
ROW: dict[str, Any] = {**GRAPH, "factor_width": 5, "scale": 6.0, "momentum": 0.7}


def factors_by_hand(method, z):
    """(z^s, log p(s|x)) and (z^o, log p(o|x)) of one image."""
    found = []
    for part, embed, words in (
        (method.factors.state, method.embed_s, method.words.states),
        (method.factors.object, method.embed_o, method.words.objects),
    ):
        f = unit(linear(part.second, linear(part.first, z).clamp(min=0)))
        found.append((f, softmax([6.0 * dot(f, unit(linear(embed, w))) for w in words])))
    return found


@pytest.mark.parametrize("graph", [True, False])
def test_losses_rows_and_scores_by_loops(graph):
    method, images = build(CgeVisual, graph=graph, **ROW), batch(5)
    own, z = images.compositions.tolist(), [unit(row) for row in images.cls]
    (z_s, p_s), (z_o, p_o) = (
        zip(*side, strict=True) for side in zip(*(factors_by_hand(method, x) for x in z), strict=True)
    )
    target, H = LABELS.candidates("closed", "train").tolist(), every_row(method)
    rows = {c: H[c] for c in target}
    if graph:
        stacked = [torch.stack(list(part)) for part in (z_s, z_o)]
        fuse = twin.learned_fusion(*stacked, method.fusion.state.weight.detach(), method.fusion.object.weight.detach())
        rows |= twin.refine(
            H, *stacked, *(torch.tensor(p, dtype=torch.float64) for p in (p_s, p_o)),
            [c // N for c in own], [c % N for c in own], set(target), N, fuse, 0.7, MESSAGES,
        )  # fmt: skip
    losses = {
        "state": -sum(math.log(p[c // N]) for p, c in zip(p_s, own, strict=True)) / 5,
        "object": -sum(math.log(p[c % N]) for p, c in zip(p_o, own, strict=True)) / 5,
    }
    if graph:
        visual = products(z, [rows[c] for c in target], 6.0)
        losses["visual"] = cross_entropy(visual, map(target.index, own))
    check_losses(method, images, **losses)
    method.after_batch()
    for c in range(len(H)):
        close(every_row(method)[c], rows.get(c, H[c]))
    candidates = [3, 0, 11]
    embeddings, _ = method.prepare(CompositionIndex(np.array(candidates), N))
    semantic = method.embed_images(images.cls).detach() @ embeddings.detach().T
    expected = []
    for i, x in enumerate(z):
        parts = [softmax(semantic[i]), softmax([6.0 * dot(x, every_row(method)[c]) for c in candidates])]
        pairs = [p_s[i][c // N] * p_o[i][c % N] for c in candidates]
        expected.append([a + b + c for a, b, c in zip(*parts, pairs, strict=True)])
    close(scores(method, candidates, images), expected)


def test_visual_prototypes_start_at_means_of_features():
    H, train = every_row(build(CgeVisual, **ROW)), batch(30, 7, np.resize(SEEN, 30))
    for c in SEEN:
        own = [unit(z) for z, number in zip(train.cls, train.compositions, strict=True) if number == c]
        close(H[c], unit(torch.stack(own).sum(0)))


def test_its_composition_loss_is_that_of_cge():
    method, plain, images = build(CgeVisual, **ROW), build(Cge, **GRAPH), batch(4)
    plain.load_state_dict({name: value for name, value in method.state_dict().items() if name in plain.state_dict()})
    close(
        method.losses(images, method.shared())["composition"].item(),
        plain.losses(images, plain.shared())["composition"].item(),
    )
