"""What is reduced where the scores lie, against sorting; on the CPU, which is a device as any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.evaluation.accumulator import DEAD, Plan
from duplex.evaluation.topk import reduced


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6), k=st.integers(1, 4), levels=st.sampled_from([2, 1000]), listed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
)  # fmt: skip
def test_labels_and_the_best_of_each_run_are_those_of_sorting(seed, k: int, levels: int, listed: bool, dtype) -> None:
    rng = np.random.default_rng(seed)
    images, width = int(rng.integers(1, 8)), int(rng.integers(1, 12))
    groups = rng.integers(DEAD, 3, width)
    plan = Plan.of(np.sort(groups) if listed else groups)
    scores = torch.from_numpy(rng.integers(-levels, levels, (images, width)) / 8).to(dtype)
    kept = scores.clone()
    own = rng.integers(-1, width, images)  # -1: the label is not among these columns
    own[:2] = [0, width - 1][: own[:2].size]
    label, best, place = reduced(scores, plan, own, k)
    assert torch.equal(scores, kept), "scores are somebody else's"
    ordered = scores.float().numpy() if plan.order is None else scores.float().numpy()[:, plan.order]
    assert best.shape == (len(plan.runs), images, k) and place.shape == (len(plan.runs), images)
    assert place.dtype == np.int64
    for i in range(images):
        assert label[i] == (ordered[i, own[i]] if own[i] >= 0 else -np.inf)
        for number, run in enumerate(plan.runs):
            others = [-np.inf if c == own[i] else float(ordered[i, c]) for c in range(run.span.start, run.span.stop)]
            falling = sorted(others, reverse=True)[:k]
            assert best[number, i].tolist() == falling + [-np.inf] * (k - len(falling))
            assert place[number, i] == others.index(falling[0])


@pytest.mark.parametrize("column", [0, 2])
def test_what_is_no_number_is_the_largest_so_that_it_cannot_hide(column: int) -> None:
    scores = torch.tensor([[1.0, 5.0, 2.0, 3.0]])
    scores[0, column] = torch.nan
    _, best, place = reduced(scores, Plan.of(np.zeros(4, np.int64)), np.array([3]), 2)
    assert np.isnan(best[0, 0, 0]) and best[0, 0, 1] == 5.0 and place[0, 0] == column


def test_columns_of_which_none_takes_part_leave_the_label_alone() -> None:
    plan = Plan.of(np.full(3, DEAD))
    label, best, place = reduced(torch.ones(2, 3), plan, np.array([-1, 1]), 2)
    assert label.tolist() == [-np.inf, 1.0] and best.shape == (0, 2, 2) and place.shape == (0, 2)
