"""Cross-fitted gain of a feasibility threshold: the AUC that it gains on unseen pairs that had no part in choosing it.

A feasibility threshold excludes implausible unseen pairs from the candidates. It is chosen by the AUC over validation
images, so its gain on the same images is optimistic: its cost, the real pairs outside of validation that it excludes,
does not show there. Here one half of the unseen pairs chooses the threshold and the other half measures it, both ways
and for many random halves. Leaving out one pair at a time would hide the cost, which would show only for the least
feasible pair, if the others choose a threshold above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duplex.evaluation.accumulator import Floats
from duplex.evaluation.uncertainty import Components
from duplex.labels import Bools, Ints

HALVINGS = 100  # number of random halves
ERRORS = 2  # standard errors that a gain must exceed: with one, a sixth of thresholds without effect would pass


@dataclass(frozen=True)
class CrossFitGain:
    """Gain in AUC (a fraction) of a feasibility threshold over none, on pairs that had no part in choosing it."""

    value: float  # mean over images of unseen pairs, as AUC is
    standard_error: float | None  # over unseen pairs; None for fewer than two
    pairs: int  # number of unseen pairs

    @property
    def is_clear(self) -> bool:
        """Whether the gain in AUC exceeds twice its standard error."""
        return self.standard_error is not None and self.value > ERRORS * self.standard_error


def wins_by_pair(components: Components, pair: Ints, pairs: int) -> Floats:
    """Each unseen pair's contribution to AUC [P]: the points that its images win against images of seen pairs.

    AUC compares each of the N_u images of unseen pairs with each of the N_s images of seen pairs: a win (a bias exists
    that makes both right) counts 2 points, a tie 1. Points are whole numbers, hence their sums are exact, and `AUC =
    points.sum() / (2 N_s N_u)`.

    Args:
        components: each image's part of AUC, which compares it with all images of the other group (seen, unseen).
        pair: index of each unseen image's pair [N_u].
        pairs: number of unseen pairs P.
    """
    won = np.rint(2 * components.seen.size * components.unseen)  # [N_u] 2 N_s V01_j
    return np.bincount(pair, weights=won, minlength=pairs).astype(np.float64)


def pair_halves(pairs: int, count: int = HALVINGS) -> Bools:
    """Masks [count, pairs] that each select a random half of `pairs` pairs; the same masks in every call."""
    rng = np.random.default_rng(0)
    ranks = np.array([rng.permutation(pairs) for _ in range(count)])
    return ranks < pairs // 2


def crossfit_gain(wins: Floats, images: Ints, seen_images: int, first_halves: Bools | None = None) -> CrossFitGain:
    """The gain in AUC of choosing a feasibility threshold, measured on pairs that had no part in the choice.

    Each unseen pair is measured at the thresholds that are chosen by random halves of the pairs without it.

    With `t_h` the best threshold of a half `h`, `H_p` the halves without the pair `p`, and `N_u = sum_p n_p`,

        g_p = mean_{h in H_p} (wins[t_h, p] - wins[0, p]) / (2 N_s),   t_h = argmax_t sum_{q in h} wins[t, q]
        gain = sum_p g_p / N_u,   SE = sqrt(P / (P - 1) sum_p (g_p - n_p gain)^2) / N_u

    Args:
        wins: points of each unseen pair at each threshold [T, P] (`wins_by_pair`); thresholds ascending, the first
            excludes nothing. Of equally good thresholds the lowest is chosen.
        images: number n_p of images of each unseen pair [P].
        seen_images: number N_s of images of seen pairs.
        first_halves: masks of random halves of the pairs [R, P] (default: `pair_halves`).
    """
    pairs, unseen_images = images.size, int(images.sum())
    first = pair_halves(pairs) if first_halves is None else first_halves  # [R, P]
    by_first = wins @ first.T  # [T, R] whole numbers, hence exact
    by_second = wins.sum(axis=1, keepdims=True) - by_first
    threshold = np.where(first, by_second.argmax(axis=0)[:, None], by_first.argmax(axis=0)[:, None])  # [R, P]
    won = np.take_along_axis(wins, threshold, axis=0) - wins[0]  # [R, P]
    gains = won.mean(axis=0) / (2 * seen_images)  # [P]
    value = float(gains.sum()) / unseen_images
    if pairs < 2:
        return CrossFitGain(value, None, pairs)
    spread = float(np.square(gains - images * value).sum())
    return CrossFitGain(value, math.sqrt(pairs / (pairs - 1) * spread) / unseen_images, pairs)


def largest_clear_gain(gains: Sequence[CrossFitGain]) -> int | None:
    """The index of the largest of several gains in AUC; None if no gain exceeds twice its standard error."""
    clear = [place for place, gain in enumerate(gains) if gain.is_clear]
    return max(clear, key=lambda place: gains[place].value, default=None)
