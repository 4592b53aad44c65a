"""The cross-fitted gain of a threshold equals a plain computation, half by half and pair by pair."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.feasibility import (
    HALVINGS,
    CrossFitGain,
    Threshold,
    buckets,
    choose_threshold,
    random_halvings,
    thresholds,
)


def choose(scores, target, feasible, count: int) -> Threshold:
    """Choose among `count` thresholds; seen compositions are those of infinite feasibility."""
    seen = np.isinf(feasible)
    steps = thresholds(feasible, seen, count)
    return choose_threshold(ScoreAccumulator(target, seen, bucket=buckets(feasible, steps)).add(scores), steps)


def won_halves(scores: np.ndarray, target: np.ndarray, seen: np.ndarray, allowed: np.ndarray) -> dict[int, list[int]]:
    """Unseen pair -> per image, twice the number of seen images that it beats (1 for a tie), image against image."""

    def margin(image: int) -> float:
        label, row = target[image], scores[image]
        rivals = [c for c in range(row.size) if c != label and allowed[c]]
        same = max((row[c] for c in rivals if seen[c] == seen[label]), default=-math.inf)
        other = max((row[c] for c in rivals if seen[c] != seen[label]), default=-math.inf)
        if not allowed[label] or same >= row[label]:
            return math.nan
        return float(row[label] - other) if seen[label] else float(other - row[label])

    margins = [margin(image) for image in range(target.size)]
    won: dict[int, list[int]] = {}
    for image, label in enumerate(target):
        if not seen[label]:
            rivals = [margins[i] for i, other in enumerate(target) if seen[other]]
            halves = sum(2 * (d > margins[image]) + (d == margins[image]) for d in rivals)
            won.setdefault(int(label), []).append(halves)
    return won


def naive_gain(scores, target, seen, feasible, steps) -> tuple[float, float]:
    """Mean gain over images and its standard error over pairs: one threshold, one half and one pair at a time."""
    by_step = [won_halves(scores, target, seen, feasible >= step) for step in steps]
    pairs, seen_images = sorted(by_step[0]), int(seen[target].sum())
    measured: dict[int, list[float]] = {pair: [] for pair in pairs}
    for mask in random_halvings(len(pairs)):
        first = [pair for pair, inside in zip(pairs, mask, strict=True) if inside]
        second = [pair for pair in pairs if pair not in first]
        for choosing, left_out in ((first, second), (second, first)):
            best = max(by_step, key=lambda won: sum(sum(won[pair]) for pair in choosing))  # the first of equal ones
            for pair in left_out:
                measured[pair].append((sum(best[pair]) - sum(by_step[0][pair])) / (2 * seen_images))
    gains = [sum(values) / len(values) for values in measured.values()]
    sizes = [len(by_step[0][pair]) for pair in pairs]
    mean = sum(gains) / sum(sizes)
    spread = sum((gain - size * mean) ** 2 for gain, size in zip(gains, sizes, strict=True))
    return mean, math.sqrt(len(pairs) / (len(pairs) - 1) * spread) / sum(sizes)


@pytest.mark.parametrize("pairs", [1, 2, 7, 24])
def test_halves_are_halves_and_the_same_at_every_call(pairs: int) -> None:
    masks = random_halvings(pairs)
    assert masks.shape == (HALVINGS, pairs) and (masks.sum(1) == pairs // 2).all()
    assert np.array_equal(masks, random_halvings(pairs))
    assert pairs == 1 or len(np.unique(masks, axis=0)) > 1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.sampled_from([0, 3]), count=st.sampled_from([1, 4, 9]))
def test_the_gain_is_that_of_the_pairs_that_did_not_choose(seed: int, levels: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    columns, images = 12, 25
    seen = np.arange(columns) < 5
    feasible = np.where(seen, np.inf, rng.integers(0, 6, columns) / 4)
    target = np.r_[rng.integers(0, 5, 10), 5, 6, rng.integers(5, columns, images - 12)]
    shape = (images, columns)
    scores = rng.integers(0, levels, shape).astype(float) if levels else rng.standard_normal(shape)
    scores[np.arange(images), target] += 1
    chosen = choose(scores, target, feasible, count)
    mean, error = naive_gain(scores, target, seen, feasible, thresholds(feasible, seen, count))
    assert chosen.gain.value == pytest.approx(mean, abs=1e-12)
    assert chosen.gain.standard_error == pytest.approx(error, abs=1e-12)
    assert chosen.gain.pairs == len(set(target[~seen[target]]))


def test_a_threshold_that_only_rules_out_compositions_without_images_pays() -> None:
    target = np.array([0, 0, 1, 2, 3])
    scores = np.eye(5)[target] + np.array([0, 0, 0, 0, 2.0])  # the last composition is always scored best
    chosen = choose(scores, target, np.array([np.inf, 1.0, 1.0, 1.0, 0.0]), 2)
    assert chosen.value == 1.0 and chosen.gain == CrossFitGain(1.0, 0.0, 3) and chosen.gain.is_clear


def test_a_threshold_that_rules_out_a_pair_left_out_does_not_pay() -> None:
    feasible = np.array([np.inf, 2.0, 1.0, 0.0])  # every pair is the least feasible one of those that are left in
    target = np.array([0, 0, 1, 2, 3])
    assert not choose(np.eye(4)[target] + np.array([0, 0, 0, 0.5]), target, feasible, 3).gain.is_clear


def test_one_pair_has_a_gain_without_standard_error_that_never_pays() -> None:
    chosen = choose(np.array([[1, 0, 2.0], [0, 1, 2]]), [0, 1], np.array([np.inf, 1.0, 0.0]), 2)
    assert chosen.gain == CrossFitGain(0.0, None, 1) and not chosen.gain.is_clear
