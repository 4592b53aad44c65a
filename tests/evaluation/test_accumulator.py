"""Score statistics do not depend on how the scores are cut into blocks, and agree with sorting."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError, UsageError
from duplex.evaluation import accumulate
from duplex.evaluation.accumulate import ScoreAccumulator, TopCompetitors
from tests.evaluation.twins import problem
from tests.pretended import Pretended


def same(a: TopCompetitors, b: TopCompetitors) -> None:
    for name, value in vars(a).items():
        np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.sampled_from([0, 3]), k=st.integers(1, 4), split=st.booleans())
def test_blocks_of_rows_of_columns_and_of_both_agree(seed: int, levels: int, k: int, split: bool) -> None:
    rng = np.random.default_rng(seed)
    p = problem(rng, 11, 23, levels, feasible=0.8)
    bucket = rng.integers(0, 4, 23) if split else None

    def fresh() -> ScoreAccumulator:
        return ScoreAccumulator(p.target, p.seen, feasible_mask=p.feasible, bucket=bucket, k=k)

    whole = fresh().add(p.scores).competitors()
    by_rows, by_columns, by_both = fresh(), fresh(), fresh()
    for start in range(0, 11, 3):
        by_rows.add(p.scores[start : start + 3], slice(start, start + 3))
    for start in (16, 8, 0):
        by_columns.add(p.scores[:, start : start + 8], first_column=start)
        for rows in np.array_split(rng.permutation(11), 3):
            by_both.add(p.scores[rows, start : start + 8], rows, start)
    for other in (by_rows, by_columns, by_both):
        same(whole, other.competitors())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.sampled_from([0, 3]), k=st.integers(1, 3))
def test_statistics_equal_those_of_sorting(seed: int, levels: int, k: int) -> None:
    p = problem(np.random.default_rng(seed), 7, 12, levels, feasible=0.8)
    found = ScoreAccumulator(p.target, p.seen, feasible_mask=p.feasible, k=k).add(p.scores).competitors()
    for i, label in enumerate(p.target):
        assert found.label[i] == (p.scores[i, label] if p.feasible[label] else -np.inf)
        for mask, best, column in (
            (p.seen, found.seen, found.seen_column),
            (~p.seen, found.unseen, found.unseen_column),
        ):
            others = [c for c in range(12) if mask[c] and p.feasible[c] and c != label]
            ordered = sorted((float(p.scores[i, c]) for c in others), reverse=True)[:k]
            assert best[i].tolist() == ordered + [-np.inf] * (k - len(ordered))
            assert column[i] == (min(others, key=lambda c: (-p.scores[i, c], c)) if others else -1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 2))
def test_cutting_buckets_equals_masking_columns(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    p = problem(rng, 9, 15, levels=4)
    bucket = rng.integers(0, 5, 15)
    cut = ScoreAccumulator(p.target, p.seen, bucket=bucket, k=k).add(p.scores)
    for upto, found in enumerate(cut.cumulative()):
        masked = ScoreAccumulator(p.target, p.seen, feasible_mask=p.seen | (bucket < upto), k=k).add(p.scores)
        same(found, masked.competitors())


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int32", "bool", "torch", "bfloat16", "read-only"])
def test_every_numeric_type_gives_the_same_statistics(kind: str) -> None:
    p = problem(np.random.default_rng(0), levels=2)
    expected = ScoreAccumulator(p.target, p.seen, k=2).add(p.scores).competitors()
    block: Any = p.scores.copy()
    if kind == "read-only":
        block.setflags(write=False)
    elif kind in ("torch", "bfloat16"):
        block = torch.from_numpy(block).to(torch.bfloat16 if kind == "bfloat16" else torch.float32).requires_grad_()
    else:
        block = block.astype(kind)
    same(expected, ScoreAccumulator(p.target, p.seen, k=2).add(block).competitors())
    assert kind in ("torch", "bfloat16") or np.array_equal(block, p.scores)


def test_half_precision_loses_nothing_at_its_limits() -> None:
    scores = np.array([[60000, 60000, 1]], dtype=np.float16)
    found = ScoreAccumulator([0], [True, True, False], k=1).add(scores).competitors()
    assert found.label[0] == found.seen[0, 0] == 60000 - 60000 % 32


def test_missing_and_repeated_blocks_are_refused() -> None:
    p = problem(np.random.default_rng(0))
    statistics = ScoreAccumulator(p.target, p.seen).add(p.scores[:, :4])
    with pytest.raises(DuplexError, match="image 0 has 4 scores for 9 columns"):
        statistics.competitors()
    statistics.add(p.scores[:, 4:], first_column=4).competitors()
    with pytest.raises(DuplexError, match="image 0 has 18"):
        statistics.add(p.scores).competitors()
    twice = ScoreAccumulator(p.target, p.seen).add(p.scores, np.array([0, 0, *range(2, 12)]))
    with pytest.raises(DuplexError, match="image 0 has 18"):
        twice.add(p.scores[:1], np.array([1])).competitors()


@pytest.mark.parametrize("most", [1, 125, 126, 127, 128, 129, 300])
def test_buckets_stay_separate_at_the_limits_of_a_byte(most: int) -> None:
    bucket = np.arange(most + 1)
    seen, target = np.zeros(most + 1, bool), np.array([most, 0, most])
    scores = np.random.default_rng(0).standard_normal((3, most + 1))
    found = list(ScoreAccumulator(target, seen, bucket=bucket).add(scores).cumulative())
    for upto in (most, most + 1):
        same(found[upto], ScoreAccumulator(target, seen, feasible_mask=bucket < upto).add(scores).competitors())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), k=st.integers(1, 3), split=st.booleans(), reordered=st.integers(1, 60),
    searched=st.integers(1, 30),
)  # fmt: skip
def test_sizes_of_internal_blocks_change_nothing(seed: int, k: int, split: bool, reordered, searched) -> None:
    rng = np.random.default_rng(seed)
    p = problem(rng, 11, 23, levels=4, feasible=0.8)
    bucket = rng.integers(0, 4, 23) if split else None
    whole = ScoreAccumulator(p.target, p.seen, feasible_mask=p.feasible, bucket=bucket, k=k).add(p.scores).competitors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulate, "BLOCK_REORDERED", reordered)
        patch.setattr(accumulate, "BLOCK_SEARCHED", searched)
        found = ScoreAccumulator(p.target, p.seen, feasible_mask=p.feasible, bucket=bucket, k=k)
        for rows in (np.arange(4), np.arange(4, 11)):
            for start in (0, 9):
                found.add(p.scores[rows, start : 9 if start == 0 else 23], rows, start)
        same(whole, found.competitors())


@pytest.mark.parametrize("k", [1, 2])
def test_nan_is_refused_in_arrays_and_on_a_device(k: int) -> None:
    scores = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    for image, column in ((1, 0), (0, 1), (1, 2)):  # a label's, another of its group, one of the other group
        changed = scores.copy()
        changed[image, column] = np.nan
        with Pretended() as device:
            for block in (changed, torch.from_numpy(changed).to(device.name)):
                with pytest.raises(DuplexError, match=rf"image {image} .* contain NaN"):
                    ScoreAccumulator([0, 0], [True, True, False], k=k).add(block)


def test_empty_blocks_change_nothing() -> None:
    p = problem(np.random.default_rng(0))
    statistics = ScoreAccumulator(p.target, p.seen)
    statistics.add(np.zeros((0, 9)), slice(0, 0)).add(np.zeros((12, 0)), first_column=9)
    same(statistics.add(p.scores).competitors(), ScoreAccumulator(p.target, p.seen).add(p.scores).competitors())


@pytest.mark.parametrize(
    ("name", "value"),
    [("target", [0.5, 1, 2]), ("target", [0, 1, 3]), ("target", [0, -1, 2]),
     ("seen", [0, 1, 2]),  # numbers of the seen columns
     ("feasible_mask", [True]), ("bucket", [-1, -1, -1]), ("bucket", [0.5, 1.5, 0.0]), ("k", 0), ("k", 1.5)],
)  # fmt: skip
def test_values_that_would_be_rounded_wrapped_or_taken_for_a_mask_are_refused(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"target": [0, 1, 2], "seen": [True, False, False]}
    with pytest.raises(UsageError, match=name):
        ScoreAccumulator(**{**arguments, name: value})


def test_torch_scores_are_ranked_as_exactly_as_those_of_numpy() -> None:
    """float32 would make all of these scores equal."""
    steps = np.array([[0, 1, 2], [2, 0, 1], [1, 2, 0]])
    target, seen = np.array([2, 0, 0]), np.array([True, True, False])
    for scores in (steps + 2**40, 1 + steps * 1e-9):
        by_numpy, by_torch = (ScoreAccumulator(target, seen).add(x) for x in (scores, torch.from_numpy(scores)))
        same(by_numpy.competitors(), by_torch.competitors())
        assert by_torch.competitors().best_columns().tolist() == [2, 0, 1]
        plan = accumulate.ColumnOrder.of(accumulate.column_groups(seen, None, None))
        label, _, _ = accumulate.best_scores_per_group_on_device(torch.from_numpy(scores), plan, target, 1)
        assert label.tolist() == scores[np.arange(3), target].tolist()


@pytest.mark.parametrize(
    ("block", "rows", "first"),
    [(np.ones((3, 4)), None, 0), (np.ones((2, 3)), None, 0), (np.ones((3, 2)), None, 2), (np.ones((3, 2)), None, -1),
     (np.ones((3, 3)) * 1j, None, 0), (np.ones((3, 3)).astype("S8"), None, 0)],
)  # fmt: skip
def test_blocks_that_do_not_hold_a_score_per_image_and_column_are_refused(block: Any, rows: Any, first: Any) -> None:
    with pytest.raises(DuplexError):
        ScoreAccumulator(np.arange(3), np.array([True, True, False])).add(block, rows, first)


def test_arrays_of_the_caller_are_copied():
    target, seen = np.array([0, 1]), np.array([True, False])
    accumulator = ScoreAccumulator(target, seen)
    target[:], seen[:] = 1, True
    assert accumulator.target.tolist() == [0, 1] and accumulator.seen.tolist() == [True, False]
