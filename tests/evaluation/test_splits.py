"""Comparisons over splits: the bootstrap equals plain loops; intervals widen if splits disagree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import UsageError
from duplex.evaluation.curve import Margins
from duplex.evaluation.seeds import compare_seeds, compare_splits
from duplex.evaluation.uncertainty import Components


def drawn(seed: int, shift: float = 0.0, images: tuple[int, int] = (60, 40)) -> Margins:
    """Random margins; AUC grows with `shift`."""
    rng = np.random.default_rng(seed)
    seen, unseen = (sign * (0.5 + shift) + rng.normal(size=some) for sign, some in zip((1, -1), images, strict=True))
    return Margins(seen, unseen, np.arange(sum(images)) < images[0])


def auc_by_pairs(seen: list[float], unseen: list[float]) -> float:
    ordered = [0.5 * (float(s > u) + float(s >= u)) for s in seen for u in unseen]
    return sum(ordered) / len(ordered)


def by_loops(first: list[list[Margins]], second: list[list[Margins]], rounds: int, seed: int) -> list[float]:
    """The difference of AUC in each round, by loops over the drawn splits, runs and pairs of images."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rounds):
        changes = []
        for split in rng.integers(0, len(first), len(first)):
            before, after = first[split], second[split]
            runs = rng.integers(0, len(before), len(before))
            seen = rng.integers(0, before[0].seen.size, before[0].seen.size)
            unseen = rng.integers(0, before[0].unseen.size, before[0].unseen.size)
            gains = []
            for run in runs:
                each = [
                    auc_by_pairs([side[run].seen[i] for i in seen], [side[run].unseen[j] for j in unseen])
                    for side in (before, after)
                ]
                gains.append(each[1] - each[0])
            changes.append(sum(gains) / len(gains))
        found.append(sum(changes) / len(changes))
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 2**31), st.booleans())
def test_the_bootstrap_equals_plain_loops(splits: int, seeds: int, start: int, ties: bool) -> None:
    """Splits differ in size; rounded margins tie."""
    rng = np.random.default_rng(start)
    sizes = [(int(rng.integers(2, 7)), int(rng.integers(2, 6))) for _ in range(splits)]
    first, second = (
        [[drawn(start + 100 * p + 10 * s + side, 0.3 * side, sizes[p]) for s in range(seeds)] for p in range(splits)]
        for side in (0, 1)
    )
    if ties:
        first, second = (
            [[Margins(one.seen.round(), one.unseen.round(), one.is_seen) for one in runs] for runs in side]
            for side in (first, second)
        )
    found = compare_splits(first, second, 25, 7).difference["auc"]
    low, high = np.percentile(by_loops(first, second, 25, 7), [2.5, 97.5])
    assert found.interval == pytest.approx((low, high), abs=1e-12)


def test_the_value_is_the_mean_over_splits_of_the_means_over_seeds() -> None:
    first = [[drawn(10 * p + s) for s in range(2 + p)] for p in range(3)]  # a split may have more seeds than another
    second = [[drawn(10 * p + s + 500, 0.2 * p) for s in range(2 + p)] for p in range(3)]
    found = compare_splits(first, second, 40)
    apart = [
        np.mean([Components.of(b).auc - Components.of(a).auc for a, b in zip(*runs, strict=True)])
        for runs in zip(first, second, strict=True)
    ]
    assert [one["auc"] for one in found.by_split] == pytest.approx(apart)
    assert found.difference["auc"].value == pytest.approx(np.mean(apart))
    assert found.deviation["auc"] == pytest.approx(np.std(apart, ddof=1))


def test_splits_that_disagree_widen_the_interval() -> None:
    base = [[drawn(p)] * 3 for p in range(4)]
    agreeing = compare_splits(base, [[drawn(p, 0.3)] * 3 for p in range(4)], 200)
    shifts = (-0.6, 0.0, 0.6, 1.2)
    disagreeing = compare_splits(base, [[drawn(p, shift)] * 3 for p, shift in enumerate(shifts)], 200)
    widths = [np.ptp(one.difference["auc"].interval) for one in (agreeing, disagreeing)]  # type: ignore[arg-type, var-annotated]
    assert widths[1] > 1.5 * widths[0]
    assert disagreeing.deviation["auc"] > 2 * agreeing.deviation["auc"]
    one = compare_seeds(base[3], [drawn(3, 1.2)] * 3, 200)["auc"]
    assert widths[1] > 1.5 * np.ptp(one.interval), "one split underestimates the spread"  # type: ignore[arg-type]


def test_equal_runs_have_no_difference() -> None:
    runs = [[drawn(s + 10 * p) for s in range(2)] for p in range(3)]
    found = compare_splits(runs, runs, 60)
    for name, gain in found.difference.items():
        assert (gain.value, gain.interval, gain.p) == (0.0, (0.0, 0.0), 1.0)
        assert found.deviation[name] == 0.0


def test_metrics_undefined_on_a_split_are_left_out() -> None:
    whole, seen_only = drawn(0), drawn(1, images=(50, 0))
    found = compare_splits([[whole], [seen_only]], [[whole], [seen_only]], 20)
    assert set(found.difference) == set(found.deviation) == {"seen"}


def test_runs_that_cannot_be_paired_are_refused() -> None:
    one, two = [[drawn(0)]], [[drawn(0)], [drawn(1)]]
    for first, second in ((one, one), (one, two), ([], [])):
        with pytest.raises(UsageError, match="the same two or more"):
            compare_splits(first, second)
    with pytest.raises(UsageError, match="same seeds"):
        compare_splits(two, [[drawn(0)], [drawn(1), drawn(2)]])
    with pytest.raises(UsageError, match="same seeds"):
        compare_splits([[drawn(0)], []], [[drawn(0)], []])


def test_the_bootstrap_is_repeatable() -> None:
    first, second = ([[drawn(10 * p + shift, shift / 9)] for p in range(3)] for shift in (0, 1))
    assert compare_splits(first, second, 30) == compare_splits(first, second, 30, 0)
    assert compare_splits(first, second, 30) != compare_splits(first, second, 30, 1)
