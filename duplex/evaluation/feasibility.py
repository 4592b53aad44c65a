"""Feasibility thresholds, which exclude implausible unseen compositions in the open world.

Unseen compositions below the threshold score -inf. The threshold with the best validation AUC is
chosen. Its gain is cross-fitted: the threshold is chosen on one half of the unseen pairs and
measured on the other, both ways and for many random halves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError
from duplex.evaluation.accumulate import Floats, ScoreAccumulator
from duplex.evaluation.curve import AucComponents, Margins
from duplex.labels import Bools, Ints

HALVINGS = 100  # number of random halves
BucketNumbers = NDArray[Any]  # [C] in the narrowest integer type that holds them
ERRORS = 2  # standard errors that a gain must exceed: with one, a sixth of useless ones pass


@dataclass(frozen=True)
class CrossFitGain:
    """Gain in AUC (a fraction) by a threshold, measured on pairs without a part in its choice."""

    value: float  # mean over images of unseen pairs, as AUC is
    standard_error: float | None  # over unseen pairs; None for fewer than two
    pairs: int  # number of unseen pairs

    @property
    def is_clear(self) -> bool:
        return self.standard_error is not None and self.value > ERRORS * self.standard_error


def auc_points_by_pair(components: AucComponents, pair: Ints, pairs: int) -> Floats:
    """Contribution of each of P unseen pairs to AUC [P], in points: 2 for each image that it wins, 1 for each tie.

    Whole points have exact sums: `AUC = points.sum() / (2 N_s N_u)`.
    """
    won = np.rint(2 * components.seen.size * components.unseen)  # [N_u] 2 N_s V01_j
    return np.bincount(pair, weights=won, minlength=pairs).astype(np.float64)


def random_halvings(pairs: int) -> Bools:
    """100 random halves of `pairs` pairs, as masks [100, pairs]; always the same."""
    rng = np.random.default_rng(0)
    return np.array([rng.permutation(pairs) for _ in range(HALVINGS)]) < pairs // 2


def crossfit_gain(wins: Floats, images: Ints, seen_images: int) -> CrossFitGain:
    """The gain in AUC by a threshold, measured on pairs that had no part in choosing it.

    With `t_h` the best threshold of a half `h`, `H_p` the halves without the pair `p`,

        g_p = mean_{h in H_p} (wins[t_h, p] - wins[0, p]) / (2 N_s)
        t_h = argmax_t sum_{q in h} wins[t, q]
        gain = sum_p g_p / N_u,   SE = sqrt(P / (P - 1) sum_p (g_p - n_p gain)^2) / N_u

    wins: `auc_points_by_pair` at each threshold [T, P], ascending; the first excludes nothing.
    images, seen_images: numbers n_p of images of each unseen pair [P], and N_s of seen pairs.
    """
    pairs = images.size
    unseen_images = int(images.sum())
    first = random_halvings(pairs)  # [R, P]
    by_first = wins @ first.T  # [T, R] whole numbers, hence exact
    by_second = wins.sum(axis=1, keepdims=True) - by_first
    best_of_first = by_first.argmax(axis=0)[:, None]
    best_of_second = by_second.argmax(axis=0)[:, None]
    threshold = np.where(first, best_of_second, best_of_first)  # [R, P]
    won = np.take_along_axis(wins, threshold, axis=0) - wins[0]  # [R, P]
    gains = won.mean(axis=0) / (2 * seen_images)  # [P]
    value = float(gains.sum()) / unseen_images
    if pairs < 2:
        return CrossFitGain(value, None, pairs)
    spread = float(np.square(gains - images * value).sum())
    return CrossFitGain(value, math.sqrt(pairs / (pairs - 1) * spread) / unseen_images, pairs)


def thresholds(feasibility: Floats, seen: Bools, count: int = 50) -> Floats:
    """`count` evenly spaced thresholds over the range of unseen compositions' feasibility [C]."""
    unseen = feasibility[~seen]
    if not unseen.size:
        raise DuplexError("every composition is seen, so a threshold excludes none; leave the threshold out")
    return np.linspace(unseen.min(), unseen.max(), count)


def buckets(feasibility: Floats, steps: Floats) -> BucketNumbers:
    """Bucket of each composition [C]: how many of the ascending thresholds `steps` exclude it."""
    kind = np.min_scalar_type(-steps.size - 1)
    passed = np.searchsorted(steps, feasibility, side="right").astype(kind)
    return np.asarray(kind.type(steps.size) - passed)


@dataclass(frozen=True)
class Threshold:
    """The chosen threshold with its cross-fitted gain, and the validation AUC of all tried."""

    value: float
    candidates: Floats  # all thresholds tried, ascending
    auc: Floats  # of each candidate, fractions
    gain: CrossFitGain

    @property
    def passing_buckets(self) -> int:
        """Number of buckets at or above the chosen threshold."""
        return int(self.candidates.size - np.searchsorted(self.candidates, self.value))


def choose_threshold(accumulator: ScoreAccumulator, steps: Floats) -> Threshold:
    """Choose the threshold of `steps` (ascending) with the best AUC; the lowest if several tie."""
    unseen = ~accumulator.seen[accumulator.target]
    _, pair, images = np.unique(accumulator.target[unseen], return_inverse=True, return_counts=True)
    by_cut = []  # with none, one, ... buckets feasible
    wins = []
    for statistics in accumulator.cumulative():
        components = AucComponents.of(Margins.of(statistics))
        if components.auc is None:
            lacking = "seen" if unseen.all() else "unseen"
            raise DuplexError(f"feasibility thresholds need images of {lacking} pairs, but val has none; add some")
        by_cut.append(components.auc)
        wins.append(auc_points_by_pair(components, pair, images.size))
    left = np.arange(steps.size, 0, -1)  # buckets that pass each threshold
    passing = np.minimum(left, len(by_cut) - 1)
    auc = np.array(by_cut, dtype=np.float64)[passing]
    gain = crossfit_gain(np.array(wins)[passing], images, components.seen.size)
    return Threshold(float(steps[auc.argmax()]), steps, auc, gain)
