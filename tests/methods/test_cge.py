"""CGE against a dense adjacency matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from duplex.layers.composition_graph import CompositionGraph, GraphNetwork
from duplex.layers.composition_index import CompositionIndex
from duplex.methods.cge import Cge
from tests.methods.field import (
    LABELS,
    SEEN,
    M,
    N,
    batch,
    build,
    close,
    cross_entropy,
    dot,
    linear,
    mlp,
    scores,
    task,
    unit,
)

ROW: dict[str, Any] = {"width": 6, "out": 5, "image_layers": 1, "image_width": 4}


def dense(method, layers, target, candidates, weights=None):
    """Embeddings of candidates, states and objects from `D^-1 (A + I) H W`; candidates outside the graph are leaves."""
    outside = [c for c in candidates if c not in target]
    pairs = [*target, *outside]
    count = M + N + len(pairs)
    A = torch.eye(count, dtype=torch.float64)
    for k, c in enumerate(pairs):
        m, n, node = c // N, M + c % N, M + N + k
        weight = 1.0 if weights is None or c in outside else float(weights[c])
        A[node, m] = A[node, n] = 1.0
        if c in target:
            A[m, n] = A[n, m] = A[m, node] = A[n, node] = weight
    A = A / A.sum(1, keepdim=True)
    words = [*method.words.states, *method.words.objects]
    H = torch.stack([*words, *((words[c // N] + words[M + c % N]) / 2 for c in pairs)])
    for depth in range(layers):
        H = torch.stack([linear(method.network.weights[depth], row) for row in (A @ H).detach()])
        H = H if depth == layers - 1 else H.relu()
    return {c: unit(H[M + N + pairs.index(c)]) for c in candidates}, H[:M], H[M : M + N]


@pytest.mark.parametrize("world", ["closed", "open"])
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_losses_and_scores_by_a_dense_matrix(world, layers):
    method, images = build(Cge, world, layers=layers, **ROW), batch(4)
    target = LABELS.candidates(world, "train").tolist()
    learned = SEEN if world == "closed" else list(range(M * N))
    everything = list(range(M * N))
    h, _, _ = dense(method, layers, target, everything)
    images_of = [mlp(method.head, unit(z)) for z in images.cls]
    rows = [[dot(x, h[c]) for c in learned] for x in images_of]
    own = [learned.index(c) for c in images.compositions.tolist()]
    close(method.losses(images, method.shared())["composition"].item(), cross_entropy(rows, own))
    candidates = everything[::-1]
    close(scores(method, candidates, images), [[dot(x, h[c]) for c in candidates] for x in images_of])


def test_a_score_does_not_depend_on_the_other_candidates():
    method, images = build(Cge, **ROW), batch(3)
    alone = torch.cat([scores(method, [c], images) for c in range(M * N)], dim=1)
    close(scores(method, list(range(M * N)), images), alone)


def test_a_composition_outside_the_graph_is_embedded():
    words = task().words
    network = GraphNetwork(CompositionGraph(np.array([0, 4, 5]), M, N), 6, 5, 4, 2, 0.0).double().eval()
    found = network(words.states, words.objects)
    both, alone = (
        network.pairs(found, CompositionIndex(np.array(candidates), N)).detach() for candidates in ([4, 11], [11])
    )
    close(both[1:], alone)
    close(both[0], found[-1].pairs[1].detach())
