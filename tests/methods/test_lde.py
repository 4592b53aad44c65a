import math

import numpy as np
import pytest

from duplex.methods.lde import Lde
from duplex.methods.prompts import Prompts
from tests.methods.field import LABELS, M, N, batch, build, scores
from tests.methods.loops import close, dot, softmax, unit
from tests.methods.world import small_tower


def log_by_hand(mu, u):
    theta = math.acos(max(-1.0, min(1.0, dot(mu, u))))
    return theta / math.sin(theta) * (u - math.cos(theta) * mu) if theta > 1e-7 else u - mu


def exp_by_hand(mu, v):
    length = math.sqrt(dot(v, v))
    return math.cos(length) * mu + (math.sin(length) / length * v if length else 0)


def composed_by_hand(u, space):
    """`u` [M*N, d], unit vectors of all compositions -> what stands for each."""

    def mean(chosen):
        return sum(chosen) / len(chosen)

    if space == "linear":
        centre = mean(u)
        v = [row - centre for row in u]
    else:
        centre = unit(mean(u))
        for _ in range(20):
            centre = unit(exp_by_hand(centre, mean([log_by_hand(centre, row) for row in u])))
        v = [log_by_hand(centre, row) for row in u]
    states = [mean([v[c] for c in range(M * N) if c // N == m]) for m in range(M)]
    objects = [mean([v[c] for c in range(M * N) if c % N == n]) for n in range(N)]
    parts = [states[c // N] + objects[c % N] for c in range(M * N)]
    return [centre + p if space == "linear" else exp_by_hand(centre, p) for p in parts]


@pytest.mark.parametrize("space", ["linear", "sphere"])
def test_scores_by_loops(space):
    method, images = build(Lde, space=space), batch(3)
    prompts = Prompts(LABELS, small_tower(), paths="composition")
    rows = composed_by_hand(list(prompts.encode(np.arange(M * N)).compositions), space)
    candidates = [4, 0, 11]
    expected = [softmax([method.scale * dot(unit(z), rows[c]) for c in candidates]) for z in images.cls]
    close(scores(method, candidates, images), expected)
