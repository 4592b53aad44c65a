import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError
from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.feasibility import buckets, choose_threshold, thresholds
from duplex.evaluation.metrics import measure
from duplex.methods.word_feasibility import feasibility
from tests.methods.test_word_feasibility import space


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_all_thresholds_from_one_pass(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = space(rng, 5, 6, 0.4)
    found = feasibility(rng.standard_normal((5, 3)), rng.standard_normal((6, 3)), labels)
    seen, target = labels.seen, rng.integers(0, 30, 40)
    if not seen[target].any() or seen[target].all():
        return
    scores = rng.standard_normal((40, 30)).astype(np.float32)
    scores[np.arange(40), target] += 1
    steps = thresholds(found, seen, 50)
    assert steps.size == 50 and steps[0] == found[~seen].min() and steps[-1] == found[~seen].max()
    chosen = choose_threshold(ScoreAccumulator(target, seen, bucket=buckets(found, steps)).add(scores), steps)
    for step, auc in zip(steps, chosen.auc, strict=True):
        masked = ScoreAccumulator(target, seen).add(np.where(found >= step, scores, -np.inf))
        assert auc == pytest.approx(measure(masked.competitors(), rounds=0).auc)
    assert chosen.value == steps[np.argmax(chosen.auc)]


def test_of_equally_good_thresholds_the_lowest_is_chosen() -> None:
    rng = np.random.default_rng(0)
    labels = space(rng, 4, 4, 0.5)
    seen = labels.seen
    found = np.where(seen, np.inf, 0.25)
    steps = thresholds(found, seen)
    assert (buckets(found, steps)[~seen] == 0).all()
    target = np.arange(16)
    statistics = ScoreAccumulator(target, seen, bucket=buckets(found, steps)).add(rng.standard_normal((16, 16)))
    chosen = choose_threshold(statistics, steps)
    assert chosen.value == 0.25 and np.ptp(chosen.auc) == 0


@pytest.mark.parametrize("count", [1, 2, 50, 200])
def test_buckets_count_the_thresholds_that_exclude_a_composition(count: int) -> None:
    rng = np.random.default_rng(count)
    labels = space(rng, 5, 6, 0.4)
    found = feasibility(rng.standard_normal((5, 3)), rng.standard_normal((6, 3)), labels)
    steps = thresholds(found, labels.seen, count)
    assert np.array_equal(buckets(found, steps), count - (found[:, None] >= steps).sum(1))


def test_data_without_a_choice_is_refused() -> None:
    labels = space(np.random.default_rng(0), 3, 3, 1.0)
    with pytest.raises(DuplexError, match="every composition is seen"):
        thresholds(np.full(9, np.inf), labels.seen)
    seen = np.arange(9) < 5
    found = np.linspace(0, 1, 9)
    steps = thresholds(found, seen)
    statistics = ScoreAccumulator([0, 1], seen, bucket=buckets(found, steps)).add(np.eye(9)[:2])
    with pytest.raises(DuplexError, match="need images of unseen pairs, but val has none; add some"):
        choose_threshold(statistics, steps)


@pytest.mark.parametrize("count", [126, 127, 128, 129, 255, 256])
def test_buckets_count_the_thresholds_above(count):
    steps = np.arange(count, dtype=float)
    values = np.array([-1.0, 0.0, 0.5, count - 1.0, count + 5.0])
    expected = [int((steps > value).sum()) for value in values]
    assert buckets(values, steps).tolist() == expected
