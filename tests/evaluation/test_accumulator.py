"""However the scores are cut into blocks, the evidence is the same."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError, UsageError
from duplex.evaluation import accumulator as module
from duplex.evaluation.accumulator import Evidence, Rivals
from tests.evaluation.twins import problem
from tests.pretended import Pretended


def same(a: Rivals, b: Rivals) -> None:
    for name, value in vars(a).items():
        np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.sampled_from([0, 3]), k=st.integers(1, 4), split=st.booleans())
def test_rows_columns_and_one_block_agree(seed: int, levels: int, k: int, split: bool) -> None:
    rng = np.random.default_rng(seed)
    p = problem(rng, 11, 23, levels, live=0.8)
    bucket = rng.integers(0, 4, 23) if split else None

    def fresh() -> Evidence:
        return Evidence(p.target, p.seen, live=p.live, bucket=bucket, k=k)

    whole = fresh().add(p.scores).rivals()
    by_rows, by_columns, by_both = fresh(), fresh(), fresh()
    for start in range(0, 11, 3):
        by_rows.add(p.scores[start : start + 3], slice(start, start + 3))
    for start in (16, 8, 0):
        by_columns.add(p.scores[:, start : start + 8], first_column=start)
        for rows in np.array_split(rng.permutation(11), 3):
            by_both.add(p.scores[rows, start : start + 8], rows, start)
    for other in (by_rows, by_columns, by_both):
        same(whole, other.rivals())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.sampled_from([0, 3]), k=st.integers(1, 3))
def test_rivals_against_sorting(seed: int, levels: int, k: int) -> None:
    p = problem(np.random.default_rng(seed), 7, 12, levels, live=0.8)
    found = Evidence(p.target, p.seen, live=p.live, k=k).add(p.scores).rivals()
    for i, label in enumerate(p.target):
        assert found.label[i] == (p.scores[i, label] if p.live[label] else -np.inf)
        for mask, best, column in (
            (p.seen, found.seen, found.seen_column),
            (~p.seen, found.unseen, found.unseen_column),
        ):
            others = [c for c in range(12) if mask[c] and p.live[c] and c != label]
            ordered = sorted((float(p.scores[i, c]) for c in others), reverse=True)[:k]
            assert best[i].tolist() == ordered + [-np.inf] * (k - len(ordered))
            assert column[i] == (min(others, key=lambda c: (-p.scores[i, c], c)) if others else -1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 2))
def test_cutting_buckets_equals_masking_columns(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    p = problem(rng, 9, 15, levels=4)
    bucket = rng.integers(0, 5, 15)
    cut = Evidence(p.target, p.seen, bucket=bucket, k=k).add(p.scores)
    for upto in range(6):
        masked = Evidence(p.target, p.seen, live=p.seen | (bucket < upto), k=k).add(p.scores)
        same(cut.rivals(upto), masked.rivals())


def test_listing_columns_by_group_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 16)
    rng = np.random.default_rng(0)
    p = problem(rng, 9, 40)
    bucket = rng.integers(0, 3, 40)
    order = Evidence.order(p.seen, bucket)
    assert p.seen[order][: p.seen.sum()].all() and (np.diff(bucket[order][p.seen.sum() :]) >= 0).all()
    plain = Evidence(p.target, p.seen, bucket=bucket, k=2).add(p.scores).rivals()
    place = np.argsort(order)
    listed = Evidence(place[p.target], p.seen[order], bucket=bucket[order], k=2).add(p.scores[:, order]).rivals()
    np.testing.assert_array_equal(listed.seen, plain.seen)
    np.testing.assert_array_equal(listed.unseen, plain.unseen)
    np.testing.assert_array_equal(order[listed.prediction()], plain.prediction())


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int32", "bool", "torch", "bfloat16", "read-only"])
def test_kinds_of_arrays(kind: str) -> None:
    p = problem(np.random.default_rng(0), levels=2)
    expected = Evidence(p.target, p.seen, k=2).add(p.scores).rivals()
    block: Any = p.scores.copy()
    if kind == "read-only":
        block.setflags(write=False)
    elif kind in ("torch", "bfloat16"):
        block = torch.from_numpy(block).to(torch.bfloat16 if kind == "bfloat16" else torch.float32).requires_grad_()
    else:
        block = block.astype(kind)
    same(expected, Evidence(p.target, p.seen, k=2).add(block).rivals())
    assert kind in ("torch", "bfloat16") or np.array_equal(block, p.scores)


def test_half_precision_loses_nothing_at_its_limits() -> None:
    scores = np.array([[60000, 60000, 1]], dtype=np.float16)
    found = Evidence([0], [True, True, False], k=1).add(scores).rivals()
    assert found.label[0] == found.seen[0, 0] == 60000 - 60000 % 32


@pytest.mark.parametrize("extra", [{"live": [True]}, {"bucket": [0]}, {"bucket": [-1] * 9}])
def test_masks_that_do_not_fit_are_refused(extra: dict[str, Any]) -> None:
    p = problem(np.random.default_rng(0))
    with pytest.raises(UsageError, match="go with the 9 columns"):
        Evidence(p.target, p.seen, **extra)


def test_missing_and_repeated_blocks_are_noticed() -> None:
    p = problem(np.random.default_rng(0))
    evidence = Evidence(p.target, p.seen).add(p.scores[:, :4])
    with pytest.raises(DuplexError, match="image 0 was given 4 scores for 9 columns"):
        evidence.rivals()
    evidence.add(p.scores[:, 4:], first_column=4).rivals()
    with pytest.raises(DuplexError, match="image 0 was given 18"):
        evidence.add(p.scores).rivals()


@pytest.mark.parametrize("shape, first", [((12, 10), 0), ((11, 9), 0), ((12,), 0), ((12, 4), 6), ((12, 4), -1)])
def test_blocks_that_do_not_fit_are_refused(shape: tuple[int, ...], first: int) -> None:
    p = problem(np.random.default_rng(0))
    with pytest.raises(DuplexError, match="does not fit"):
        Evidence(p.target, p.seen).add(np.zeros(shape), first_column=first)


@pytest.mark.parametrize(
    "target, seen, k",
    [([], [True], 1), ([0], [], 1), ([2], [True, False], 1), ([-1], [True], 1), ([0], [True], 0), ([[0]], [True], 1)],
)
def test_impossible_requests_are_refused(target: list[int], seen: list[bool], k: int) -> None:
    with pytest.raises(UsageError):
        Evidence(target, seen, k=k)


@pytest.mark.parametrize("most", [1, 125, 126, 127, 128, 129, 300])
def test_any_number_of_buckets_is_kept_apart(most: int) -> None:
    """Also where one more than their number just fills, or just crosses, a byte."""
    bucket = np.arange(most + 1)
    seen, target = np.zeros(most + 1, bool), np.array([most, 0, most])
    scores = np.random.default_rng(0).standard_normal((3, most + 1))
    evidence = Evidence(target, seen, bucket=bucket).add(scores)
    assert evidence.groups.tolist() == (bucket + 1).tolist()
    assert evidence.groups.dtype.itemsize == (1 if most + 1 <= 127 else 2)
    for upto in (0, most, most + 1):
        masked = Evidence(target, seen, live=bucket < upto).add(scores) if upto else None
        if masked is not None:
            same(evidence.rivals(upto), masked.rivals())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), k=st.integers(1, 3), split=st.booleans(), moved=st.integers(1, 60),
    chunk=st.integers(1, 30), planned=st.integers(1, 30),
)  # fmt: skip
def test_how_much_is_worked_on_at_a_time_changes_nothing(seed: int, k: int, split: bool, moved, chunk, planned) -> None:
    rng = np.random.default_rng(seed)
    p = problem(rng, 11, 23, levels=4, live=0.8)
    bucket = rng.integers(0, 4, 23) if split else None
    whole = Evidence(p.target, p.seen, live=p.live, bucket=bucket, k=k).add(p.scores).rivals()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ORDERED", moved), ("CHUNK", chunk), ("PLANNED", planned)):
            patch.setattr(module, name, value)
        found = Evidence(p.target, p.seen, live=p.live, bucket=bucket, k=k)
        for rows in (np.arange(4), np.arange(4, 11)):
            for start in (0, 9):
                found.add(p.scores[rows, start : 9 if start == 0 else 23], rows, start)
        same(whole, found.rivals())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.sampled_from([0, 3]), k=st.integers(1, 3), split=st.booleans())
def test_what_lies_on_a_device_is_read_as_what_lies_here(seed: int, levels: int, k: int, split: bool) -> None:
    """Whole and by columns, of which a block may have none that takes part; on a device that is pretended."""
    rng = np.random.default_rng(seed)
    p = problem(rng, 11, 23, levels, live=0.8)
    p.live[16:] = False
    bucket = rng.integers(0, 4, 23) if split else None

    def fresh() -> Evidence:
        return Evidence(p.target, p.seen, live=p.live, bucket=bucket, k=k)

    with Pretended() as device:
        there = torch.from_numpy(p.scores).to(device.name)
        whole, by_columns = fresh().add(there), fresh()
        for rows in (slice(0, 5), slice(5, 11)):
            for start in (16, 8, 0):
                by_columns.add(there[rows, start : start + 8], rows, start)
    here = fresh().add(p.scores).rivals()
    same(here, whole.rivals())
    same(here, by_columns.rivals())


def test_a_number_that_is_none_is_refused_on_a_device_as_here() -> None:
    scores = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    for image, column in ((1, 0), (0, 1), (1, 2)):  # a label's, another of its group, one of the other group
        changed = scores.copy()
        changed[image, column] = np.nan
        with Pretended() as device:
            for block in (changed, torch.from_numpy(changed).to(device.name)):
                with pytest.raises(DuplexError, match=f"image {image} contain NaN"):
                    Evidence([0, 0], [True, True, False]).add(block)


def test_blocks_of_nothing_change_nothing_and_other_kinds_are_refused() -> None:
    p = problem(np.random.default_rng(0))
    evidence = Evidence(p.target, p.seen)
    evidence.add(np.zeros((0, 9)), slice(0, 0)).add(np.zeros((12, 0)), first_column=9)
    same(evidence.add(p.scores).rivals(), Evidence(p.target, p.seen).add(p.scores).rivals())
    for odd in (p.scores * 1j, p.scores.astype("S8"), p.scores.astype(object)):
        with pytest.raises(DuplexError, match="does not fit 12 images and the columns 0 to 9"):
            Evidence(p.target, p.seen).add(odd)


def test_columns_of_one_range_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And forgotten together where they are too many."""
    made = []
    of = module.Plan.of
    monkeypatch.setattr(module.Plan, "of", lambda groups: (made.append(len(groups)), of(groups))[1])
    p = problem(np.random.default_rng(0))
    monkeypatch.setattr(module, "PLANNED", 9)
    evidence = Evidence(p.target, p.seen)
    for row in range(12):
        evidence.add(p.scores[row : row + 1, :5], slice(row, row + 1)).add(
            p.scores[row : row + 1, 5:], slice(row, row + 1), 5
        )
    assert made == [5, 4]
    monkeypatch.setattr(module, "PLANNED", 8)
    evidence = Evidence(p.target, p.seen)
    for row in range(2):
        evidence.add(p.scores[row : row + 1, :5], slice(row, row + 1)).add(
            p.scores[row : row + 1, 5:], slice(row, row + 1), 5
        )
    assert made == [5, 4, 5, 4, 5, 4]
