import math
from typing import Any

import numpy as np
import pytest
import torch

from duplex.methods.cge import Cge, CoCge, CompositionGraph, GraphNetwork
from duplex.methods.layers import CompositionIndex
from duplex.methods.word_feasibility import feasibility
from tests.methods.field import LABELS, SEEN, M, N, batch, build, check_losses, context, scores
from tests.methods.loops import close, convolved, cross_entropy, dot, mlp, products, unit

ROW: dict[str, Any] = {"width": 6, "out": 5, "image_layers": 1}


def dense(method, target, weights=None):
    """Return embeddings of all compositions by number, states and objects; those not in `target` are leaves."""
    outside = [c for c in range(M * N) if c not in target]
    words = method.words
    s, o, pairs = convolved(method.network.weights, words.states, words.objects, target, outside, weights)
    return dict(zip([*target, *outside], map(unit, pairs), strict=True)), s, o


@pytest.mark.parametrize("world", ["closed", "open"])
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_losses_and_scores_by_a_dense_matrix(world, layers):
    method, images = build(Cge, world, layers=layers, **ROW), batch(4)
    learned = SEEN if world == "closed" else list(range(M * N))
    h, _, _ = dense(method, LABELS.candidates(world, "train").tolist())
    f = [mlp(method.head, unit(z)) for z in images.cls]
    own = [learned.index(c) for c in images.compositions.tolist()]
    check_losses(method, images, composition=cross_entropy(products(f, [h[c] for c in learned]), own))
    candidates = list(range(M * N))[::-1]
    close(scores(method, candidates, images), products(f, [h[c] for c in candidates]))


@pytest.mark.parametrize(("world", "epoch"), [("closed", 0), ("open", 0), ("open", 2)])
def test_co_cge_weighs_messages_by_feasibility(world, epoch):
    method, images = build(CoCge, world, scale=9.0, margin=0.5, margin_epochs=4, **ROW), batch(4)
    target, everything = LABELS.candidates(world, "train").tolist(), range(M * N)
    weights = None if world == "closed" else [float(c in SEEN) for c in everything]
    margins = [0.0 if c in SEEN else 10.0 for c in everything]
    if epoch:
        method.after_epoch(epoch)
        _, states, objects = dense(method, target, weights)
        rho = torch.as_tensor(feasibility(states.numpy(), objects.numpy(), LABELS), dtype=torch.float32).tolist()
        weights = [1.0 if math.isinf(r) else max(0.0, r) for r in rho]
        margins = [0.0 if math.isinf(r) else 0.5 * epoch / 4 * r for r in rho]
        torch.testing.assert_close(method.margins.tolist(), [9.0 * v for v in margins], rtol=1e-5, atol=1e-6)
        margins = (method.margins / 9.0).tolist()  # as they are kept
        weights = method.network.graph.weights.tolist()
    learned = SEEN if world == "closed" else list(everything)
    h, _, _ = dense(method, target, weights)
    f = [unit(mlp(method.head, unit(z))) for z in images.cls]
    rows = [[9.0 * (dot(x, h[c]) - margins[c]) for c in learned] for x in f]
    check_losses(method, images, composition=cross_entropy(rows, [learned.index(c) for c in images.compositions]))
    candidates = [5, 0, 11]
    close(scores(method, candidates, images), products(f, [h[c] for c in candidates], 9.0))


def test_a_composition_outside_the_graph_is_embedded():
    words = context().words
    network = GraphNetwork(CompositionGraph(np.array([0, 4, 5]), M, N), 6, 5, 4, 2, 0.0).double().eval()
    found = network(words.states, words.objects)
    both, alone = (
        network.embed(found, CompositionIndex(np.array(candidates), N)).detach() for candidates in ([4, 11], [11])
    )
    close(both[1:], alone)
    close(both[0], found[-1].compositions[1].detach())
