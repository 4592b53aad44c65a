"""Comparisons over seeds: exact areas, pairing by seed and image, wider intervals if seeds disagree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import UsageError
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.seeds import NAMES, compare_seeds, mean_change, summary_of
from duplex.evaluation.uncertainty import Components, compare

IMAGES = 200
SEEN = np.arange(IMAGES) % 2 == 0


def margins(values: np.ndarray) -> Margins:
    return Margins(values[SEEN[: values.size]], values[~SEEN[: values.size]], SEEN[: values.size])


def drawn(seed: int, shift: float = 0.0) -> Margins:
    """Random margins; AUC grows with `shift`."""
    rng = np.random.default_rng(seed)
    return margins(np.where(SEEN, 0.5 + shift, -0.5 - shift) + rng.normal(size=IMAGES))


value = st.sampled_from([np.nan, np.inf, -np.inf, *np.arange(-3, 4).astype(float)])


@settings(max_examples=200, deadline=None)
@given(st.lists(value, min_size=2, max_size=12))
def test_the_area_of_the_curve_is_the_mann_whitney_statistic(values):
    one = margins(np.array(values))
    one = Margins(np.where(one.seen == -np.inf, np.nan, one.seen), np.where(one.unseen == np.inf, np.nan, one.unseen),
                  one.is_seen)  # fmt: skip
    found = summary_of(Curve.of(one), np.arange(one.seen.size), np.arange(one.unseen.size))
    assert found[3] == pytest.approx(Components.of(one).auc, abs=1e-12)


def test_one_seed_equals_the_comparison_of_two_runs():
    first, second = drawn(0), drawn(1, 0.2)
    assert compare_seeds([first], [second], 100) == compare(first, second, 100)


def test_the_value_is_the_difference_of_the_means_over_seeds():
    first, second = [drawn(s) for s in range(3)], [drawn(s + 10, 0.3) for s in range(3)]
    found = compare_seeds(first, second, 50)
    assert tuple(found) == NAMES
    aucs = [np.mean([Components.of(one).auc for one in runs]) for runs in (first, second)]
    assert found["auc"].value == pytest.approx(aucs[1] - aucs[0])
    low, high = found["auc"].interval
    assert low < found["auc"].value < high
    assert found["auc"].p < 0.05


def test_equal_runs_have_no_difference():
    runs = [drawn(s) for s in range(4)]
    for gain in compare_seeds(runs, runs, 60).values():
        assert (gain.value, gain.interval, gain.p) == (0.0, (0.0, 0.0), 1.0)


def test_runs_are_paired_by_seed_and_image():
    """A gain that is equal on every seed and image has a narrow interval, although the seeds differ."""
    apart = [drawn(s, shift) for s, shift in enumerate((-0.5, 0.0, 0.5, 1.0))]
    better = [Margins(one.seen + 0.2, one.unseen - 0.2, one.is_seen) for one in apart]
    paired = compare_seeds(apart, better, 300)["auc"]
    crossed = compare_seeds(apart, better[::-1], 300)["auc"]
    width: list[Any] = [np.ptp(one.interval or ()) for one in (paired, crossed)]
    assert width[0] < 0.5 * width[1]
    assert paired.interval[0] > 0


def test_seeds_that_disagree_widen_the_interval():
    base = [drawn(0)] * 4
    agreeing = compare_seeds(base, [drawn(1, 0.3)] * 4, 300)["auc"].interval
    disagreeing = compare_seeds(base, [drawn(1, s) for s in (-0.6, 0.0, 0.6, 1.2)], 300)["auc"].interval
    assert agreeing and disagreeing and np.ptp(disagreeing) > 1.5 * np.ptp(agreeing)


def test_undefined_metrics_are_left_out():
    seen_only = [Margins(one.seen, np.empty(0), np.ones(one.seen.size, dtype=bool)) for one in (drawn(0), drawn(1))]
    assert set(compare_seeds(seen_only, seen_only, 20)) == {"seen"}


def test_different_numbers_of_seeds_are_refused():
    with pytest.raises(UsageError, match="same seeds"):
        compare_seeds([drawn(0)], [drawn(0), drawn(1)])
    with pytest.raises(UsageError):
        compare_seeds([], [])


def test_a_run_drawn_twice_counts_twice():
    runs = [[Curve.of(drawn(s + 10 * side)) for s in range(3)] for side in range(2)]
    images = np.arange(100), np.arange(100)
    each = [summary_of(runs[1][s], *images) - summary_of(runs[0][s], *images) for s in range(3)]
    found = mean_change(runs, np.array([2, 0, 2, 2]), *images)
    np.testing.assert_allclose(found, (each[0] + 3 * each[2]) / 4)


def test_the_area_includes_images_right_at_every_bias():
    """Three of four unseen images are right at every bias; the seen ones up to 1, up to 2, and never."""
    one = Margins(np.array([1.0, 2.0, np.nan]), np.array([-np.inf] * 3 + [1.5]), np.arange(7) < 3)
    found = summary_of(Curve.of(one), np.arange(3), np.arange(4))
    assert found[[0, 1]].tolist() == pytest.approx([2 / 3, 1.0])
    assert found[3] == pytest.approx(0.75 * 2 / 3 + 0.25 * 1 / 3)
    assert found[2] == pytest.approx(2 * (2 / 3) * 0.75 / (2 / 3 + 0.75))
