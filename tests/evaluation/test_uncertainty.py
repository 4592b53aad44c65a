"""Intervals and paired tests agree with literal formulas and known distributions."""

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.evaluation.curve import AucComponents, Curve, Margins
from duplex.evaluation.intervals import _normal_p, bootstrap_metrics, bootstrap_p, compare, percentiles
from tests.evaluation.twins import literal_components


def margins_of(seen: np.ndarray, unseen: np.ndarray) -> Margins:
    return Margins(seen, unseen, np.arange(seen.size + unseen.size) < seen.size)


def drawn(
    rng: np.random.Generator, images: int, never: float, shift: float = 0.0, always: float = np.inf
) -> np.ndarray:
    d = np.round(rng.standard_normal(images) + shift, 1)
    d[rng.random(images) < 0.1] = always
    d[rng.random(images) < never] = np.nan
    return d


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_delong_equals_comparing_every_pair(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seen, unseen = drawn(rng, 17, 0.4), drawn(rng, 11, 0.3, always=-np.inf)
    found = AucComponents.of(margins_of(seen, unseen))
    v10, v01 = literal_components(seen, unseen)
    np.testing.assert_allclose(found.seen, v10)
    np.testing.assert_allclose(found.unseen, v01)
    assert found.auc == pytest.approx(v10.mean()) == pytest.approx(v01.mean())
    error = np.sqrt(v10.var(ddof=1) / 17 + v01.var(ddof=1) / 11)
    assert found.standard_error == pytest.approx(error)
    low, high = v10.mean() - 1.959963984540054 * error, v10.mean() + 1.959963984540054 * error
    assert found.interval == pytest.approx((max(0, low), min(1, high)))


def test_the_auc_interval_has_its_coverage() -> None:
    rng = np.random.default_rng(0)
    truth = AucComponents.of(margins_of(drawn(rng, 20000, 0.4), drawn(rng, 20000, 0.3, 0.5, -np.inf))).auc
    inside = 0
    for _ in range(400):
        low, high = AucComponents.of(margins_of(drawn(rng, 80, 0.4), drawn(rng, 60, 0.3, 0.5, -np.inf))).interval
        inside += low <= truth <= high
    assert 0.91 < inside / 400 < 0.98


def test_the_bootstrap_is_repeatable_and_equals_resampled_curves() -> None:
    rng = np.random.default_rng(1)
    margins = margins_of(drawn(rng, 30, 0.3), drawn(rng, 20, 0.3, always=-np.inf))
    first, again, other = (bootstrap_metrics([margins], 50, seed)[0] for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    draw = np.random.default_rng(7)
    for row in first[:20]:
        resampled = Curve.of(
            margins_of(margins.seen[draw.integers(0, 30, 30)], margins.unseen[draw.integers(0, 20, 20)])
        )
        expected = resampled.seen_accuracies[0], resampled.unseen_accuracies[-1], resampled.harmonic.max()
        assert row.tolist() == pytest.approx(expected)


def test_paired_p_values_are_calibrated() -> None:
    """Equally good methods differ significantly on about one test set in twenty."""
    rng = np.random.default_rng(4)
    small = {"auc": 0, "hm": 0, "seen": 0}
    for _ in range(100):
        seen, unseen = rng.standard_normal(60), rng.standard_normal(50)

        def noisy(x: np.ndarray, rng=rng) -> np.ndarray:
            return np.where(rng.random(x.size) < 0.3, np.nan, x + 0.5 * rng.standard_normal(x.size))

        a, b = (margins_of(noisy(seen), noisy(unseen)) for _ in range(2))
        for name, gain in compare(a, b, rounds=60).items():
            if name in small:
                small[name] += gain.p < 0.05
    assert all(count <= 14 for count in small.values()) and small["auc"] >= 1


def test_intervals_are_95_percent() -> None:
    assert percentiles(np.arange(1001.0)) == (25.0, 975.0)
    rng = np.random.default_rng(0)
    first, second = (margins_of(rng.random(40), rng.random(30)) for _ in range(2))
    gain = compare(first, second, rounds=50)["auc"]
    assert gain.interval is not None and gain.p is not None
    error = (gain.interval[1] - gain.value) / 1.959964
    assert gain.value - gain.interval[0] == pytest.approx(1.959964 * error)
    assert gain.p == pytest.approx(2 * (1 - NormalDist().cdf(abs(gain.value) / error)), abs=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_p_values_are_two_sided(sign: float) -> None:
    """As small for a loss as for the same gain, and 1 for no difference; the bootstrap's is at least `2 / (R + 1)`."""
    assert _normal_p(sign * 1.959964, 1.0) == pytest.approx(0.05, abs=1e-6)
    assert _normal_p(0.0, 1.0) == 1.0 and _normal_p(sign, None) is None
    assert _normal_p(0.0, 0.0) == 1.0 and _normal_p(sign, 0.0) == 0.0
    change = sign * np.arange(1.0, 100.0)
    assert bootstrap_p(change) == pytest.approx(2 / 100)
    change[:10] *= -1
    assert bootstrap_p(change) == pytest.approx(2 * 11 / 100)
    assert bootstrap_p(np.array([-1.0, 1.0])) == 1.0 and bootstrap_p(np.empty(0)) is None


def test_two_images_per_group_give_a_standard_error() -> None:
    two, one = np.array([0.0, 2.0]), np.array([1.0])
    assert AucComponents.of(margins_of(two, two + 0.5)).standard_error is not None
    for found in (AucComponents.of(margins_of(two, one)), AucComponents.of(margins_of(one, two))):
        assert found.standard_error is None is found.interval and found.auc == 0.5
    assert AucComponents.of(margins_of(two[:0], two)).auc is None is AucComponents.of(margins_of(two, two[:0])).auc


def test_a_group_without_images_gives_nan_draws() -> None:
    drawn_seen = bootstrap_metrics([margins_of(np.array([1.0, np.nan]), np.empty(0))], 20, 0)[0]
    assert np.isnan(drawn_seen[:, 1:]).all() and set(drawn_seen[:, 0]) == {0.0, 0.5, 1.0}
    drawn_unseen = bootstrap_metrics([margins_of(np.empty(0), np.array([1.0, np.nan]))], 20, 0)[0]
    assert np.isnan(drawn_unseen[:, [0, 2]]).all() and set(drawn_unseen[:, 1]) == {0.0, 0.5, 1.0}
    assert percentiles(np.empty(0)) is None is percentiles(np.array([0.5, np.nan]))


def test_a_comparison_is_second_minus_first() -> None:
    rng = np.random.default_rng(5)
    first, second = (
        margins_of(drawn(rng, 30, 0.3, shift), drawn(rng, 20, 0.3, -shift, always=-np.inf)) for shift in (0.0, 0.4)
    )
    found, draws = compare(first, second, 80, 3), bootstrap_metrics([first, second], 80, 3)
    for column, name in enumerate(("seen", "unseen", "hm")):
        ends = [
            (curve.seen_accuracies[0], curve.unseen_accuracies[-1], curve.harmonic.max())[column]
            for curve in map(Curve.of, (first, second))
        ]
        change = draws[1, :, column] - draws[0, :, column]
        assert found[name].value == pytest.approx(ends[1] - ends[0])
        assert found[name].interval == pytest.approx(tuple(np.percentile(change, [2.5, 97.5])))
        assert found[name].p == bootstrap_p(change)
    assert compare(first, second, 80) == compare(first, second, 80, 0) != compare(first, second, 80, 1)
