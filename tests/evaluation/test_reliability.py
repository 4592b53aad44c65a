import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.evaluation.answered import BINS, Reliability
from duplex.evaluation.probabilities import image_weights

IMAGES = st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.floats(0.01, 5)), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(IMAGES)
def test_bins_and_calibration_error_equal_those_of_a_loop(images) -> None:
    probability, right, weight = (np.array(column) for column in zip(*images, strict=True))
    made = Reliability.of(probability, right, weight)
    error, total = 0.0, sum(w for _, _, w in images)
    for b in range(BINS):
        here = [(p, r, w) for p, r, w in images if int(min(p * BINS, BINS - 1)) == b]
        assert made.images[b] == len(here)
        mass = sum(w for *_, w in here)
        assert made.weight[b] == pytest.approx(mass / total)
        if not here:
            assert np.isnan(made.probability[b]) and np.isnan(made.accuracy[b])
            continue
        mean, accuracy = (sum(image[i] * image[2] for image in here) / mass for i in (0, 1))
        assert (made.probability[b], made.accuracy[b]) == (pytest.approx(mean), pytest.approx(accuracy))
        error += mass / total * abs(accuracy - mean)
    assert made.calibration_error == pytest.approx(error)


def test_weights_give_unseen_pairs_the_expected_share() -> None:
    is_seen = np.array([True, True, True, False])
    assert image_weights(is_seen, 0.1).tolist() == pytest.approx([0.3, 0.3, 0.3, 0.1])
    assert image_weights(is_seen[:3], 0.1).tolist() == pytest.approx([1 / 3] * 3)
    assert image_weights(~is_seen[:3], 0.1).tolist() == pytest.approx([1 / 3] * 3)
