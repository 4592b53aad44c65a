import math

import numpy as np
import pytest
import torch

from duplex.methods.layers import CompositionIndex
from duplex.methods.lde import Lde
from duplex.methods.prompts import Prompts
from tests.methods.field import LABELS, M, N, batch, build, scores
from tests.methods.loops import close, dot, softmax, unit
from tests.methods.world import features, small_tower


def log_by_hand(mu, u):
    theta = math.acos(max(-1.0, min(1.0, dot(mu, u))))
    return theta / math.sin(theta) * (u - math.cos(theta) * mu) if theta > 1e-7 else u - mu


def exp_by_hand(mu, v):
    length = math.sqrt(dot(v, v))
    return math.cos(length) * mu + (math.sin(length) / length * v if length else 0)


def composed_by_hand(u, space):
    """`u` {composition: unit vectors} -> {composition: what stands for it}; compositions weigh alike."""

    def mean(chosen):
        return sum(chosen) / len(chosen)

    def over(function):
        return mean([mean([function(row) for row in rows]) for rows in u.values()])

    if space == "linear":
        centre = over(lambda row: row)
        v = {c: mean(rows) - centre for c, rows in u.items()}
    else:
        centre = unit(over(lambda row: row))
        for _ in range(20):
            centre = unit(exp_by_hand(centre, over(lambda row, at=centre: log_by_hand(at, row))))
        v = {c: mean([log_by_hand(centre, row) for row in rows]) for c, rows in u.items()}
    states = [mean([v[c] for c in v if c // N == m]) for m in range(M)]
    objects = [mean([v[c] for c in v if c % N == n]) for n in range(N)]
    parts = {c: states[c // N] + objects[c % N] for c in range(M * N)}
    return {c: centre + p if space == "linear" else exp_by_hand(centre, p) for c, p in parts.items()}


@pytest.mark.parametrize("space", ["linear", "sphere"])
@pytest.mark.parametrize("source", ["text", "images"])
def test_scores_by_loops(space, source):
    method = build(Lde, space=space, source=source)
    images, train = batch(3), batch(30, 7, [LABELS.pairs["train"][k % 7] for k in range(30)])
    if source == "text":
        t = Prompts(LABELS, small_tower(), paths="composition").encode(torch.arange(M * N).numpy()).compositions
        u = {c: [t[c]] for c in range(M * N)}
    else:
        own = train.compositions.tolist()
        u = {c: [unit(z) for z, k in zip(train.cls, own, strict=True) if k == c] for c in sorted(set(own))}
    rows = composed_by_hand(u, space)
    candidates = [4, 0, 11]
    expected = [softmax([method.scale * dot(unit(z), rows[c]) for c in candidates]) for z in images.cls]
    close(scores(method, candidates, images), expected)


@pytest.mark.parametrize("space", ["linear", "sphere"])
def test_a_primitive_without_compositions_is_zero(space):
    method, u = build(Lde, space=space), torch.stack([*map(unit, features(5, 2))])
    method.decompose(u, torch.tensor([0, 1, 3, 4, 10]), torch.ones(5))  # nothing of state 2, nor of object 2
    assert not method.states[2].any() and not method.objects[2].any()
    found, same = method.prepare(CompositionIndex(np.array([8, 0]), N))
    close(found, method.centre)
    assert not torch.allclose(same, found)
