"""The exact seen–unseen curve and the area under it (AUC), from the margin of each image.

At a bias `b`, an image of a seen pair is right iff `b < d`, an image of an unseen pair iff `b >
d`; `d` is its margin. Over `N_s` images `i` of seen pairs and `N_u` images `j` of unseen pairs,
ties counting one half,

    AUC = #{(i, j): d_i > d_j} / (N_s N_u)

is a Mann-Whitney statistic, whose standard error `AucComponents` computes (DeLong et al., 1988).
`area_under` has the area under the points of any other curve, by trapezoids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from duplex.errors import UsageError, shown
from duplex.evaluation.accumulate import Floats, TopCompetitors
from duplex.labels import Bools, Ints

if TYPE_CHECKING:
    import pandas as pd

Interval = tuple[float, float]
NORMAL_95 = 1.959963984540054


@dataclass(frozen=True)
class Margins:
    """Margin of each image: the bias at which it becomes right or wrong; NaN if it is never right.

    An image is right if fewer than `k` other columns score at least as much as its label. So a
    label that ties for the k-th place is wrong, and the order of columns has no effect.
    """

    seen: Floats  # [N_s] +inf: right at every bias
    unseen: Floats  # [N_u] -inf: right at every bias
    is_seen: Bools  # [N] mask of the images of `seen`; the others are those of `unseen`

    @classmethod
    def of(cls, competitors: TopCompetitors, k: int = 1) -> Margins:
        """Compute margins for top-`k` accuracy; `k`: at most that of the `ScoreAccumulator`."""
        if not (isinstance(k, Integral) and 1 <= k <= competitors.seen.shape[1]):
            raise UsageError(
                f"k is {shown(k)}, but the ScoreAccumulator was made with k={competitors.seen.shape[1]}; give a "
                "whole number from 1 to that k, or make the ScoreAccumulator with a larger one"
            )
        is_seen = competitors.is_seen
        same = np.where(is_seen[:, None], competitors.seen, competitors.unseen)[:, :k]
        other = np.where(is_seen[:, None], competitors.unseen, competitors.seen)[:, :k]
        # a: labels that tie or lead in the label's group, which no bias moves
        ahead = (same >= competitors.label[:, None]).sum(axis=1)
        place = np.clip(k - 1 - ahead, 0, k - 1)
        barrier = other[np.arange(is_seen.size), place]  # the (k - a)-th of the other group
        with np.errstate(invalid="ignore", over="ignore"):
            d = np.where(is_seen, competitors.label - barrier, barrier - competitors.label)
        never = (ahead >= k) | (competitors.label == -np.inf) | (d == np.where(is_seen, -np.inf, np.inf))
        d = np.where(never, np.nan, d)
        return cls(d[is_seen], d[~is_seen], is_seen)

    def right(self, bias: float = 0.0) -> Bools:
        """Mask [N]: whether each image is right with `bias` added to unseen pairs' scores."""
        right = np.empty(self.is_seen.size, dtype=bool)
        right[self.is_seen] = bias < self.seen
        right[~self.is_seen] = bias > self.unseen
        return right


@dataclass(frozen=True)
class Curve:
    """Seen and unseen accuracy at points 0 to P, in the order of rising bias.

    Point `p` is the interval of biases between the breakpoints `p - 1` and `p`. An image of a seen
    pair is right up to the point `seen_until`, one of an unseen pair from `unseen_from` on.
    """

    breakpoints: Floats  # [P] distinct biases at which an image becomes right or wrong, ascending
    seen_until: Ints  # [N_s] -1: never
    unseen_from: Ints  # [N_u] P + 1: never

    @classmethod
    def of(cls, margins: Margins) -> Curve:
        """Compute the curve of images with these margins."""
        both = np.concatenate([margins.seen, margins.unseen])
        breakpoints = np.unique(both[np.isfinite(both)])
        seen_until = np.searchsorted(breakpoints, margins.seen, side="left")
        unseen_from = np.searchsorted(breakpoints, margins.unseen, side="left") + 1
        unseen_from = np.where(margins.unseen == -np.inf, 0, unseen_from)
        never_seen, never_unseen = np.isnan(margins.seen), np.isnan(margins.unseen)
        unseen_from = np.where(never_unseen, breakpoints.size + 1, unseen_from)
        return cls(breakpoints, np.where(never_seen, -1, seen_until), unseen_from)

    def resampled(self, seen: Ints | slice, unseen: Ints | slice) -> tuple[Floats, Floats]:
        """Seen and unseen accuracies at each point [P + 1], on the images with the indices `seen` and `unseen`."""
        points = self.breakpoints.size
        right_seen = share_right_until(self.seen_until[seen], points)
        return right_seen, share_right_from(self.unseen_from[unseen], points)

    @cached_property
    def seen_accuracies(self) -> Floats:
        """Accuracy on seen pairs' images at each point [P + 1], falling; NaN without any."""
        return share_right_until(self.seen_until, self.breakpoints.size)

    @cached_property
    def unseen_accuracies(self) -> Floats:
        """Accuracy on unseen pairs' images at each point [P + 1], rising; NaN without any."""
        return share_right_from(self.unseen_from, self.breakpoints.size)

    @cached_property
    def harmonic(self) -> Floats:
        """Harmonic mean of seen and unseen accuracy at each point [P + 1]."""
        return harmonic_mean(self.seen_accuracies, self.unseen_accuracies)

    def bias(self, point: int) -> float:
        """A bias at `point`: the interval's middle or, at either end, beyond all breakpoints."""
        v = self.breakpoints
        if not v.size:
            return 0.0
        if point == 0:
            return float(v[0] - max(1.0, abs(v[0])))
        if point == v.size:
            return float(v[-1] + max(1.0, abs(v[-1])))
        return float(v[point - 1] / 2 + v[point] / 2)

    def table(self, limit: int | None = 500) -> pd.DataFrame:
        """The curve as a table with the columns `bias, seen, unseen, hm`, accuracies as fractions.

        Args:
            limit: about how many points to keep, evenly spread, with both ends and the best HM;
                None: all points.
        """
        points = np.arange(self.breakpoints.size + 1)
        if limit is not None and points.size > limit:
            seen = np.nan_to_num(self.seen_accuracies)
            travelled = np.nan_to_num(self.unseen_accuracies) - seen  # rises along the curve
            steps = np.linspace(travelled[0], travelled[-1], max(limit - 2, 2))
            marks = np.searchsorted(travelled, steps)
            best = int(np.argmax(np.nan_to_num(self.harmonic)))
            points = np.unique(np.r_[marks, best])  # marks begin and end with the curve
        import pandas as pd

        columns = {
            "bias": [self.bias(int(p)) for p in points],
            "seen": self.seen_accuracies[points],
            "unseen": self.unseen_accuracies[points],
            "hm": self.harmonic[points],
        }
        return pd.DataFrame(columns)


def share_right_until(until: Ints, breakpoints: int) -> Floats:
    """Share of images right at points 0 to P; `until`: the last point of each, -1: never."""
    counts = np.bincount(until + 1, minlength=breakpoints + 2)[1:]
    return _share(np.cumsum(counts[::-1])[::-1], until.size)


def share_right_from(since: Ints, breakpoints: int) -> Floats:
    """Share of images right at points 0 to P; `since`: the first point of each, P + 1: never."""
    return _share(np.cumsum(np.bincount(since, minlength=breakpoints + 2)[:-1]), since.size)


def _share(counts: Ints, images: int) -> Floats:
    return counts / images if images else np.full(counts.size, np.nan)


def harmonic_mean(seen: Floats, unseen: Floats) -> Floats:
    """Elementwise harmonic mean of seen and unseen accuracies; 0 where both are 0."""
    total = seen + unseen
    undefined = np.where(np.isnan(total), np.nan, 0.0)
    return np.divide(2 * seen * unseen, total, out=undefined, where=total > 0)


def area_under(seen: Floats, unseen: Floats) -> float:
    """Area under straight lines through points, in the order of rising unseen accuracy."""
    return float(((seen[1:] + seen[:-1]) / 2 * np.diff(unseen)).sum())


@dataclass(frozen=True)
class AucComponents:
    """Each image's part of AUC; their variance gives the standard error of AUC (DeLong's method).

    An image's part is the share of the other group's images for which some bias makes both right.
    """

    seen: Floats  # [N_s] V10_i = mean_j (d_i > d_j) + (d_i = d_j) / 2
    unseen: Floats  # [N_u] V01_j, the mean over i

    @classmethod
    def of(cls, margins: Margins) -> AucComponents:
        if not margins.seen.size or not margins.unseen.size:
            return cls(np.full(margins.seen.size, np.nan), np.full(margins.unseen.size, np.nan))
        seen = np.sort(margins.seen[~np.isnan(margins.seen)])
        unseen = np.sort(margins.unseen[~np.isnan(margins.unseen)])
        below = _rank(unseen, margins.seen) / margins.unseen.size
        above = (seen.size - _rank(seen, margins.unseen)) / margins.seen.size
        return cls(
            np.where(np.isnan(margins.seen), 0.0, below),  # NaN: never right
            np.where(np.isnan(margins.unseen), 0.0, above),
        )

    @property
    def auc(self) -> float | None:
        """AUC, a fraction; None if images of seen pairs or of unseen pairs are missing."""
        return float(self.seen.mean()) if self.seen.size and self.unseen.size else None

    @property
    def standard_error(self) -> float | None:
        """Standard error of AUC; None with fewer than two images of seen or of unseen pairs."""
        if min(self.seen.size, self.unseen.size) < 2:
            return None
        seen = self.seen.var(ddof=1) / self.seen.size
        unseen = self.unseen.var(ddof=1) / self.unseen.size
        return math.sqrt(seen + unseen)

    @property
    def interval(self) -> Interval | None:
        """The 95 % confidence interval of AUC, within [0, 1]; None without a standard error."""
        auc = self.auc
        error = self.standard_error
        if auc is None or error is None:
            return None
        return max(0.0, auc - NORMAL_95 * error), min(1.0, auc + NORMAL_95 * error)

    def minus(self, other: AucComponents) -> AucComponents:
        """Each image's part of the difference in AUC to the `other` method on the same images."""
        return AucComponents(self.seen - other.seen, self.unseen - other.unseen)


def _rank(among: Floats, values: Floats) -> Floats:
    # how many elements of the sorted array are smaller than each value; equal ones count one half
    smaller = np.searchsorted(among, values, "left")
    return np.asarray((smaller + np.searchsorted(among, values, "right")) / 2)
