"""Comparisons over seeds and over splits: exact areas, pairing, wider intervals if seeds or splits disagree."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import UsageError
from duplex.evaluation.curve import AucComponents, Curve, Margins
from duplex.evaluation.intervals import compare, compare_seeds, compare_splits, headline_metrics


def drawn(seed: int, shift: float = 0.0, images: tuple[int, int] = (60, 40)) -> Margins:
    """Random margins; AUC grows with `shift`."""
    rng = np.random.default_rng(seed)
    seen, unseen = (sign * (0.5 + shift) + rng.normal(size=some) for sign, some in zip((1, -1), images, strict=True))
    return Margins(seen, unseen, np.arange(sum(images)) < images[0])


FINITE = [*np.arange(-3, 4).astype(float)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([np.nan, np.inf, *FINITE]), min_size=1, max_size=6),
    st.lists(st.sampled_from([np.nan, -np.inf, *FINITE]), min_size=1, max_size=6),
)
def test_the_area_of_the_curve_is_the_mann_whitney_statistic(seen, unseen):
    one = Margins(np.array(seen), np.array(unseen), np.arange(len(seen) + len(unseen)) < len(seen))
    found = headline_metrics(Curve.of(one), np.arange(one.seen.size), np.arange(one.unseen.size))
    assert found[3] == pytest.approx(AucComponents.of(one).auc, abs=1e-12)


def test_one_seed_equals_the_comparison_of_two_runs():
    first, second = drawn(0), drawn(1, 0.2)
    assert compare_seeds([first], [second], 100) == compare(first, second, 100)


def test_runs_are_paired_by_seed_and_image():
    """A gain that is equal on every seed and image has a narrow interval, although the seeds differ."""
    apart = [drawn(s, shift) for s, shift in enumerate((-0.5, 0.0, 0.5, 1.0))]
    better = [Margins(one.seen + 0.2, one.unseen - 0.2, one.is_seen) for one in apart]
    paired = compare_seeds(apart, better, 300)["auc"]
    crossed = compare_seeds(apart, better[::-1], 300)["auc"]
    width: list[Any] = [np.ptp(one.interval or ()) for one in (paired, crossed)]
    assert width[0] < 0.5 * width[1]
    assert paired.interval[0] > 0


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
        np.mean([AucComponents.of(b).auc - AucComponents.of(a).auc for a, b in zip(*runs, strict=True)])
        for runs in zip(first, second, strict=True)
    ]
    assert [one["auc"] for one in found.by_split] == pytest.approx(apart)
    assert found.difference["auc"].value == pytest.approx(np.mean(apart))
    assert found.deviation["auc"] == pytest.approx(np.std(apart, ddof=1))


def test_splits_and_seeds_that_disagree_widen_the_interval() -> None:
    base = [[drawn(p)] * 3 for p in range(4)]
    agreeing = compare_splits(base, [[drawn(p, 0.3)] * 3 for p in range(4)], 200)
    shifts = (-0.6, 0.0, 0.6, 1.2)
    disagreeing = compare_splits(base, [[drawn(p, shift)] * 3 for p, shift in enumerate(shifts)], 200)
    widths = [np.ptp(one.difference["auc"].interval) for one in (agreeing, disagreeing)]  # type: ignore[arg-type, var-annotated]
    assert widths[1] > 1.5 * widths[0]
    assert disagreeing.deviation["auc"] > 2 * agreeing.deviation["auc"]
    seeds = compare_seeds([drawn(0)] * 4, [drawn(1, 0.3)] * 4, 200)["auc"]
    apart = compare_seeds([drawn(0)] * 4, [drawn(1, shift) for shift in shifts], 200)["auc"]
    assert np.ptp(apart.interval) > 1.5 * np.ptp(seeds.interval)  # type: ignore[arg-type]
    one = compare_seeds(base[3], [drawn(3, 1.2)] * 3, 200)["auc"]
    assert widths[1] > 1.5 * np.ptp(one.interval), "one split underestimates the spread"  # type: ignore[arg-type]


def test_equal_runs_have_no_difference() -> None:
    seeds = [drawn(s) for s in range(4)]
    for count in (1, 4):
        for gain in compare_seeds(seeds[:count], seeds[:count], 60).values():
            assert (gain.value, gain.interval, gain.p) == (0.0, (0.0, 0.0), 1.0)
    runs = [[drawn(s + 10 * p) for s in range(2)] for p in range(3)]
    found = compare_splits(runs, runs, 60)
    assert all((gain.value, gain.interval, gain.p) == (0.0, (0.0, 0.0), 1.0) for gain in found.difference.values())
    assert set(found.deviation.values()) == {0.0}


def test_undefined_metrics_are_left_out() -> None:
    whole, seen_only = drawn(0), drawn(1, images=(50, 0))
    found = compare_splits([[whole], [seen_only]], [[whole], [seen_only]], 20)
    assert set(found.difference) == set(found.deviation) == {"seen"}
    for count in (1, 2):
        assert set(compare_seeds([seen_only] * count, [seen_only] * count, 20)) == {"seen"}


ONE = [drawn(0)]


@pytest.mark.parametrize(
    ("compared", "first", "second"),
    [(compare_splits, [ONE], [ONE]), (compare_splits, [ONE], [ONE, ONE]), (compare_splits, [ONE, ONE], [ONE, ONE * 2]),
     (compare_splits, [ONE, []], [ONE, []]), (compare_seeds, ONE, ONE * 2), (compare_seeds, [], [])],
)  # fmt: skip
def test_runs_that_cannot_be_paired_are_refused(compared, first, second) -> None:
    with pytest.raises(UsageError, match="the same"):
        compared(first, second)


def test_the_bootstrap_is_repeatable() -> None:
    first, second = ([[drawn(10 * p + shift, shift / 9)] for p in range(3)] for shift in (0, 1))
    assert compare_splits(first, second, 30) == compare_splits(first, second, 30, 0)
    assert compare_splits(first, second, 30) != compare_splits(first, second, 30, 1)
