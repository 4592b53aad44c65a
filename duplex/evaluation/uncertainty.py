"""Confidence intervals: DeLong's variance for AUC, a bootstrap over images for S, U and HM; for one method and for two.

AUC is a Mann-Whitney statistic, so its variance follows from one number per image (DeLong et al., 1988). The bootstrap
resamples seen and unseen images separately, because a test set fixes how many of each there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duplex.evaluation.accumulator import Floats
from duplex.evaluation.curve import Curve, Margins, falling, harmonic_mean, rising

Interval = tuple[float, float]
NORMAL_95 = 1.959963984540054
ROUNDS = 1000


@dataclass(frozen=True)
class Components:
    """DeLong's components of AUC: per image, the share of images of the other group that it is ordered right with."""

    seen: Floats  # [N_s] V10_i = mean_j (d_i > d_j) + (d_i = d_j) / 2
    unseen: Floats  # [N_u] V01_j, the mean over i

    @classmethod
    def of(cls, margins: Margins) -> Components:
        if not margins.seen.size or not margins.unseen.size:
            return cls(np.full(margins.seen.size, np.nan), np.full(margins.unseen.size, np.nan))
        seen, unseen = (np.sort(values[~np.isnan(values)]) for values in (margins.seen, margins.unseen))
        below = _rank(unseen, margins.seen) / margins.unseen.size
        above = (seen.size - _rank(seen, margins.unseen)) / margins.seen.size
        return cls(
            np.where(np.isnan(margins.seen), 0.0, below),  # NaN: never right
            np.where(np.isnan(margins.unseen), 0.0, above),
        )

    @property
    def auc(self) -> float | None:
        """AUC as a fraction; None without seen or without unseen images."""
        return float(self.seen.mean()) if self.seen.size and self.unseen.size else None

    @property
    def standard_error(self) -> float | None:
        """`sqrt(var(V10) / N_s + var(V01) / N_u)`; None with fewer than two images of either group."""
        if min(self.seen.size, self.unseen.size) < 2:
            return None
        return math.sqrt(self.seen.var(ddof=1) / self.seen.size + self.unseen.var(ddof=1) / self.unseen.size)

    @property
    def interval(self) -> Interval | None:
        """95 % confidence interval, within [0, 1]."""
        auc, error = self.auc, self.standard_error
        if auc is None or error is None:
            return None
        return max(0.0, auc - NORMAL_95 * error), min(1.0, auc + NORMAL_95 * error)

    def minus(self, other: Components) -> Components:
        """Return the components of the difference between two methods on the same images."""
        return Components(self.seen - other.seen, self.unseen - other.unseen)


def _rank(among: Floats, values: Floats) -> Floats:
    """Return how many of `among` (sorted) lie below each value, equal ones counting one half."""
    rank: Floats = (np.searchsorted(among, values, "left") + np.searchsorted(among, values, "right")) / 2
    return rank


def bootstrap(methods: Sequence[Margins], rounds: int = ROUNDS, seed: int = 0) -> Floats:
    """Return S, U and best HM [methods, rounds, 3] over resampled images; each round draws the same ones for all."""
    rng = np.random.default_rng(seed)
    curves = [Curve.of(margins) for margins in methods]
    seen_images, unseen_images = methods[0].seen.size, methods[0].unseen.size
    drawn = np.full((len(methods), rounds, 3), np.nan)
    for turn in range(rounds):
        chosen_seen = rng.integers(0, seen_images, seen_images) if seen_images else slice(0)
        chosen_unseen = rng.integers(0, unseen_images, unseen_images) if unseen_images else slice(0)
        for method, curve in enumerate(curves):
            seen = falling(curve.seen_until[chosen_seen], curve.breakpoints.size)
            unseen = rising(curve.unseen_from[chosen_unseen], curve.breakpoints.size)
            drawn[method, turn] = seen[0], unseen[-1], harmonic_mean(seen, unseen).max()
    return drawn


def percentiles(draws: Floats) -> Interval | None:
    """Return the middle 95 % of a bootstrap's rounds; None if any round is undefined."""
    if not draws.size or np.isnan(draws).any():
        return None
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """Difference of a metric (fraction) between two methods on the same images."""

    value: float
    interval: Interval | None  # 95 %
    p: float | None  # two-sided


def compare(first: Margins, second: Margins, rounds: int = ROUNDS, seed: int = 0) -> dict[str, Difference]:
    """Return `second - first` for `seen, unseen, hm, auc` with interval and p-value; undefined metrics are left out."""
    result = {}
    curves = [Curve.of(margins) for margins in (first, second)]
    ends = [(float(c.seen_accuracy[0]), float(c.unseen_accuracy[-1]), float(c.harmonic.max())) for c in curves]
    draws = bootstrap([first, second], rounds, seed)
    change = draws[1] - draws[0]
    for column, name in enumerate(("seen", "unseen", "hm")):
        value = ends[1][column] - ends[0][column]
        if not math.isnan(value):
            result[name] = Difference(value, percentiles(change[:, column]), bootstrap_p(change[:, column]))
    gain = Components.of(second).minus(Components.of(first))
    if gain.auc is not None:
        error = gain.standard_error
        interval = None if error is None else (gain.auc - NORMAL_95 * error, gain.auc + NORMAL_95 * error)
        result["auc"] = Difference(gain.auc, interval, _normal_p(gain.auc, error))
    return result


def bootstrap_p(change: Floats) -> float | None:
    """Return the two-sided p-value: twice the smaller share of rounds beyond 0, at least 2 / (rounds + 1)."""
    if not change.size:
        return None
    tail = min((change <= 0).sum(), (change >= 0).sum())
    return float(min(1.0, 2 * (tail + 1) / (change.size + 1)))


def _normal_p(value: float, error: float | None) -> float | None:
    if error is None:
        return None
    if error == 0:
        return 1.0 if value == 0 else 0.0
    return math.erfc(abs(value) / error / math.sqrt(2))
