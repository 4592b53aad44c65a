"""Co-CGE against a dense weighted adjacency matrix."""

from __future__ import annotations

import math

import pytest
import torch

from duplex.layers.word_feasibility import feasibility
from duplex.methods.co_cge import CoCge
from tests.methods.field import LABELS, SEEN, M, N, batch, build, close, cross_entropy, dot, mlp, scores, unit
from tests.methods.test_cge import ROW, dense


@pytest.mark.parametrize(("world", "epoch"), [("closed", 0), ("open", 0), ("open", 2)])
def test_losses_and_scores_by_a_dense_matrix(world, epoch):
    method, images = build(CoCge, world, scale=9.0, margin=0.5, margin_epochs=4, **ROW), batch(4)
    target, everything = LABELS.candidates(world, "train").tolist(), range(M * N)
    weights = None if world == "closed" else [float(c in SEEN) for c in everything]
    margins = [0.0 if c in SEEN else 10.0 for c in everything]
    if epoch:
        method.after_epoch(epoch)
        _, states, objects = dense(method, 2, target, everything, weights)
        rho = torch.as_tensor(feasibility(states.numpy(), objects.numpy(), LABELS), dtype=torch.float32).tolist()
        weights = [1.0 if math.isinf(r) else max(0.0, r) for r in rho]
        margins = [0.0 if math.isinf(r) else 0.5 * epoch / 4 * r for r in rho]
        torch.testing.assert_close(method.margins.tolist(), [9.0 * v for v in margins], rtol=1e-5, atol=1e-6)
        margins = (method.margins / 9.0).tolist()  # as they are kept
        weights = method.network.graph.weights.tolist()
    learned = SEEN if world == "closed" else list(everything)
    h, _, _ = dense(method, 2, target, everything, weights)
    f = [unit(mlp(method.head, unit(z))) for z in images.cls]
    rows = [[9.0 * (dot(x, h[c]) - margins[c]) for c in learned] for x in f]
    own = [learned.index(c) for c in images.compositions.tolist()]
    close(method.losses(images, method.shared())["composition"].item(), cross_entropy(rows, own))
    candidates = [5, 0, 11]
    close(scores(method, candidates, images), [[9.0 * dot(x, h[c]) for c in candidates] for x in f])
