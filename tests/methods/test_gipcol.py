"""GIPCOL against loops over a dense graph; without edges it is CSP."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from duplex.encoders.prompt_tree import PromptTree
from duplex.layers.factors import unit as unit_rows
from duplex.methods.gipcol import Gipcol
from duplex.methods.prompts import PromptMethod
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
    scores,
    softmax,
    unit,
)


def lexicon_by_hand(method):
    """The primitives' vectors after two convolutions over one dense matrix."""
    prompts, target = method.prompts, LABELS.candidates("closed", "train").tolist()
    names = prompts.learned_rows[-(M + N) :].detach()
    A = torch.eye(M + N + len(target), dtype=torch.float64)
    for k, c in enumerate(target):
        for a, b in ((c // N, M + c % N), (c // N, M + N + k), (M + c % N, M + N + k)):
            A[a, b] = A[b, a] = 1.0
    A = A / A.sum(1, keepdim=True)
    H = torch.stack([*names, *((names[c // N] + names[M + c % N]) / 2 for c in target)])
    for depth, layer in enumerate(prompts.network.weights):
        H = torch.stack([linear(layer, row) for row in A @ H])
        H = H.relu() if depth == 0 else H
    return torch.cat([prompts.frozen_rows, prompts.learned_rows[: -(M + N)].detach(), names + H[: M + N]])


@pytest.mark.parametrize("context", ["learned", "fixed"])
def test_losses_and_scores_by_loops(context):
    method, images = build(Gipcol, width=6, context=context), batch(3)
    lexicon, tower = lexicon_by_hand(method), method.task.tower
    close(method.prompts.lexicon(), lexicon)

    def encoded(columns):
        tree = PromptTree.of(method.prompts.all_sequences(np.asarray(columns)))
        return [unit(row) for row in tower.encode(tree, lexicon)]

    rows = [[method.scale * dot(unit(z), t) for t in encoded(SEEN)] for z in images.cls]
    own = [SEEN.index(c) for c in images.compositions.tolist()]
    close(method.losses(images, method.shared())["semantic"].item(), cross_entropy(rows, own))
    candidates = [2, 6, 0]
    logits = [[method.scale * dot(unit(z), t) for t in encoded(candidates)] for z in images.cls]
    close(scores(method, candidates, images), [softmax(row) for row in logits])


CSP: dict[str, Any] = {
    "context": "fixed",
    "paths": "composition",
    "adapter": "none",
    "losses": ("semantic",),
    "inference": ("semantic",),
}


def test_without_edges_it_is_csp():
    method, csp, images = build(Gipcol, edges=False, context="fixed"), build(PromptMethod, **CSP), batch(5)
    with torch.no_grad():
        csp.paths.prompts.learned_rows.copy_(method.prompts.learned_rows)
    ours, theirs = (m.losses(images, m.shared())["semantic"] for m in (method, csp))
    close(ours.item(), theirs.item())
    ours.backward(), theirs.backward()
    close(method.prompts.learned_rows.grad, csp.paths.prompts.learned_rows.grad)
    torch.testing.assert_close(scores(method, range(12), images).float(), scores(csp, range(12), images))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_before_training_its_prompts_are_those_of_csp(layers):
    """Only the graph's last layer starts at zero."""
    row = {"context": "fixed", "layers": layers, "width": 6}
    method, csp = build(Gipcol, shaken=False, **row), build(PromptMethod, shaken=False, **CSP)
    assert [bool(layer.weight.any()) for layer in method.prompts.network.weights] == [True] * (layers - 1) + [False]
    close(method.shared().compositions, csp.shared().compositions)
    assert unit_rows(method.shared().compositions).requires_grad
