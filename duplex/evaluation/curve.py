"""The exact calibration curve: seen against unseen accuracy as a bias on unseen scores goes from -inf to +inf.

Chao et al. (2016) trace the curve by trying biases; here each image contributes the one bias `d` at which it turns, so
the whole curve is a sort. A seen image is right iff `b < d`, an unseen one iff `b > d`, hence
`AUC = #{(i, j): d_i > d_j} / (N_s N_u)`, ties counting one half.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from duplex.errors import UsageError
from duplex.evaluation.accumulator import Floats, Rivals
from duplex.labels import Bools, Ints


@dataclass(frozen=True)
class Margins:
    """The bias `d` at which each image turns; NaN for one that no bias makes right.

    An image is right when fewer than `k` other columns score at least as much as its label: a label that ties for the
    last place among the best `k` is wrong, so that the order of columns cannot matter.
    """

    seen: Floats  # [N_s] +inf: right at every bias
    unseen: Floats  # [N_u] -inf: right at every bias
    is_seen: Bools  # [N] which images the two rows are, in order

    @classmethod
    def of(cls, rivals: Rivals, k: int = 1) -> Margins:
        if not 1 <= k <= rivals.seen.shape[1]:
            raise UsageError(f"top-{k} was asked of evidence that keeps the best {rivals.seen.shape[1]}")
        mask = rivals.is_seen
        own = np.where(mask[:, None], rivals.seen, rivals.unseen)[:, :k]
        other = np.where(mask[:, None], rivals.unseen, rivals.seen)[:, :k]
        ahead = (own >= rivals.label[:, None]).sum(axis=1)  # a: rivals no bias can move against the label
        barrier = other[np.arange(mask.size), np.clip(k - 1 - ahead, 0, k - 1)]  # the (k - a)-th of the other group
        with np.errstate(invalid="ignore", over="ignore"):
            d = np.where(mask, rivals.label - barrier, barrier - rivals.label)
        never = (ahead >= k) | (rivals.label == -np.inf) | (d == np.where(mask, -np.inf, np.inf))
        d = np.where(never, np.nan, d)
        return cls(d[mask], d[~mask], mask)

    def right(self, bias: float = 0.0) -> Bools:
        """[N] whether each image is right at a bias."""
        found = np.empty(self.is_seen.size, dtype=bool)
        found[self.is_seen], found[~self.is_seen] = bias < self.seen, bias > self.unseen
        return found


@dataclass(frozen=True)
class Curve:
    """The curve as points `p = 0 .. P`: what holds between breakpoints `p - 1` and `p` (the first and last are open).

    A seen image is right at the points up to `seen_until`, an unseen one from `unseen_from` on.
    """

    breakpoints: Floats  # [P] distinct biases at which any image turns, ascending
    seen_until: Ints  # [N_s] -1: never
    unseen_from: Ints  # [N_u] P + 1: never

    @classmethod
    def of(cls, margins: Margins) -> Curve:
        both = np.concatenate([margins.seen, margins.unseen])
        breakpoints = np.unique(both[np.isfinite(both)])
        seen_until = np.searchsorted(breakpoints, margins.seen, side="left")
        unseen_from = np.searchsorted(breakpoints, margins.unseen, side="left") + 1
        unseen_from = np.where(margins.unseen == -np.inf, 0, unseen_from)
        never_seen, never_unseen = np.isnan(margins.seen), np.isnan(margins.unseen)
        return cls(
            breakpoints, np.where(never_seen, -1, seen_until), np.where(never_unseen, breakpoints.size + 1, unseen_from)
        )

    @cached_property
    def seen_accuracy(self) -> Floats:
        """[P + 1] falls along the curve; NaN throughout where no image is seen."""
        return falling(self.seen_until, self.breakpoints.size)

    @cached_property
    def unseen_accuracy(self) -> Floats:
        """[P + 1] rises along the curve; NaN throughout where no image is unseen."""
        return rising(self.unseen_from, self.breakpoints.size)

    @cached_property
    def harmonic(self) -> Floats:
        """[P + 1]"""
        return harmonic_mean(self.seen_accuracy, self.unseen_accuracy)

    def bias(self, point: int) -> float:
        """A bias at which `point` holds: the middle of its interval, or just outside of the outer breakpoints."""
        v = self.breakpoints
        if not v.size:
            return 0.0
        if point == 0:
            return float(v[0] - max(1.0, abs(v[0])))
        if point == v.size:
            return float(v[-1] + max(1.0, abs(v[-1])))
        return float(v[point - 1] / 2 + v[point] / 2)

    def table(self, limit: int | None = 500) -> pd.DataFrame:
        """Points as rows `bias, seen, unseen, hm` (fractions), thinned evenly along the curve to about `limit`.

        The ends and the best harmonic mean always stay.
        """
        points = np.arange(self.breakpoints.size + 1)
        if limit is not None and points.size > limit:
            travelled = np.nan_to_num(self.unseen_accuracy) - np.nan_to_num(self.seen_accuracy)  # rises along the curve
            marks = np.searchsorted(travelled, np.linspace(travelled[0], travelled[-1], max(limit - 2, 2)))
            best = 0 if np.isnan(self.harmonic).all() else int(np.nanargmax(self.harmonic))
            points = np.unique(np.r_[marks, best])  # marks begin and end with the curve
        return pd.DataFrame(
            {
                "bias": [self.bias(int(p)) for p in points],
                "seen": self.seen_accuracy[points],
                "unseen": self.unseen_accuracy[points],
                "hm": self.harmonic[points],
            }
        )


def falling(until: Ints, breakpoints: int) -> Floats:
    """[P + 1] share of images right at each point, when each is right up to `until` (-1: never)."""
    counts = np.bincount(until + 1, minlength=breakpoints + 2)[1:]
    return _share(np.cumsum(counts[::-1])[::-1], until.size)


def rising(since: Ints, breakpoints: int) -> Floats:
    """[P + 1] share of images right at each point, when each is right from `since` on (P + 1: never)."""
    return _share(np.cumsum(np.bincount(since, minlength=breakpoints + 2)[:-1]), since.size)


def _share(counts: Ints, images: int) -> Floats:
    return counts / images if images else np.full(counts.size, np.nan)


def harmonic_mean(seen: Floats, unseen: Floats) -> Floats:
    """`2 s u / (s + u)`, 0 where both are 0."""
    total = seen + unseen
    return np.divide(2 * seen * unseen, total, out=np.where(np.isnan(total), np.nan, 0.0), where=total > 0)
