import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.evaluation.accumulate import INFEASIBLE, ColumnOrder, best_scores_per_group, best_scores_per_group_on_device


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6), k=st.integers(1, 4), levels=st.sampled_from([2, 1000]), listed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]), as_tensor=st.booleans(),
)  # fmt: skip
def test_labels_and_best_scores_equal_those_of_sorting(seed, k: int, levels: int, listed, dtype, as_tensor) -> None:
    rng = np.random.default_rng(seed)
    images, width = int(rng.integers(1, 8)), int(rng.integers(1, 12))
    groups = rng.integers(INFEASIBLE, 3, width)
    plan = ColumnOrder.of(np.sort(groups) if listed else groups)
    scores = torch.from_numpy(rng.integers(-levels, levels, (images, width)) / 8).to(dtype)
    before = scores.clone()
    position = rng.integers(-1, width, images)  # -1: the label is not among these columns
    position[:2] = [0, width - 1][: position[:2].size]
    if as_tensor:
        label, best, place = best_scores_per_group_on_device(scores, plan, position, k)
    else:
        runs = [c for run in plan.runs for c in range(run.span.start, run.span.stop)]
        position = np.where(np.isin(position, runs), position, -1)  # a label in no run has no feasible column
        label, best, place = best_scores_per_group(scores.numpy(), plan, position, k)
    assert torch.equal(scores, before), "the caller's scores were changed"
    ordered = scores.float().numpy() if plan.order is None else scores.float().numpy()[:, plan.order]
    assert best.shape == (len(plan.runs), images, k) and place.shape == (len(plan.runs), images)
    assert place.dtype == np.int64
    for i in range(images):
        assert label[i] == (ordered[i, position[i]] if position[i] >= 0 else -np.inf)
        for number, run in enumerate(plan.runs):
            others = [
                -np.inf if c == position[i] else float(ordered[i, c]) for c in range(run.span.start, run.span.stop)
            ]
            falling = sorted(others, reverse=True)[:k]
            assert best[number, i].tolist() == falling + [-np.inf] * (k - len(falling))
            assert place[number, i] == others.index(falling[0])


@pytest.mark.parametrize("column", [0, 2])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_nan_counts_as_the_largest_score(column: int, as_tensor: bool) -> None:
    scores = torch.tensor([[1.0, 5.0, 2.0, 3.0]])
    scores[0, column] = torch.nan
    plan, position = ColumnOrder.of(np.zeros(4, np.int64)), np.array([3])
    if as_tensor:
        _, best, place = best_scores_per_group_on_device(scores, plan, position, 2)
    else:
        _, best, place = best_scores_per_group(scores.numpy(), plan, position, 2)
    assert np.isnan(best[0, 0, 0]) and best[0, 0, 1] == 5.0 and place[0, 0] == column
