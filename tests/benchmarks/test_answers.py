import numpy as np
import pytest

from benchmarks.answers import calibration_error, error_by_chance

RANDOM = np.random.default_rng(5)
SHARE = RANDOM.random(400)


def by_hand(share: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    total = 0.0
    for number in range(bins):
        inside = [place for place, p in enumerate(share) if min(int(p * bins), bins - 1) == number]
        if inside:
            gap = abs(sum(right[place] for place in inside) - sum(share[place] for place in inside))
            total += gap / len(share)
    return total


def test_the_calibration_error_is_that_of_bins_by_hand():
    right = RANDOM.random(400) < SHARE
    assert calibration_error(SHARE, right) == pytest.approx(by_hand(SHARE, right))
    assert calibration_error(np.ones(10), np.arange(10) < 7) == pytest.approx(0.3)


def test_the_error_by_chance_is_that_of_right_probabilities():
    other = np.random.default_rng(9)
    expected = np.mean([by_hand(SHARE, other.random(400) < SHARE) for _ in range(100)])
    assert error_by_chance(SHARE, draws=200) == pytest.approx(expected, abs=0.004)
    assert error_by_chance(np.ones(50), draws=3) == 0
