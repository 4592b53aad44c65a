"""Metrics of scored images: S, U, best HM and AUC, with confidence intervals and differences of two methods.

Chao et al. (2016) trace the curve of seen against unseen accuracy by trying biases on unseen pairs' scores. Here the
bias `d` at which each image becomes right or wrong, its margin, is computed from its scores, and sorting the margins
gives every point of the curve. At a bias `b`, an image of a seen pair is right iff `b < d`, one of an unseen pair iff
`b > d`. Over `N_s` images `i` of seen pairs and `N_u` images `j` of unseen pairs, ties counting one half, `AUC = #{(i,
j): d_i > d_j} / (N_s N_u)`.

AUC is a Mann-Whitney statistic, so its variance follows from one number per image (DeLong et al., 1988). S, U and HM
are bootstrapped over images, those of seen and of unseen pairs separately, because a test set fixes how many of each
there are. Over seeds and splits the bootstrap is hierarchical: each round draws splits, and for each of them seeds and
images, the same ones for both methods, and averages the metrics over the drawn runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from duplex.errors import DuplexError, UsageError, require_whole, shown
from duplex.evaluation.accumulate import Floats, TopCompetitors, checked_names
from duplex.evaluation.metric_table import METRICS
from duplex.labels import GROUPS, Bools, FrequencyGroups, Ints

if TYPE_CHECKING:
    import pandas as pd

Interval = tuple[float, float]
NAMES = tuple(METRICS)
NORMAL_95 = 1.959963984540054
ROUNDS = 1000  # of a bootstrap
NO_PERCENTAGES = {"k", "bias", "images_seen", "images_unseen"}


@dataclass(frozen=True)
class Margins:
    """The margin of each image: the bias on unseen scores at which it becomes right or wrong; NaN if it is never right.

    An image is right when fewer than `k` other columns score at least as much as its label. A label that ties for the
    last place is therefore wrong, and the order of columns cannot matter.
    """

    seen: Floats  # [N_s] +inf: right at every bias
    unseen: Floats  # [N_u] -inf: right at every bias
    is_seen: Bools  # [N] mask of the images of `seen`; the others are those of `unseen`

    @classmethod
    def of(cls, competitors: TopCompetitors, k: int = 1) -> Margins:
        """Margins for top-`k` accuracy; `k` is at most that of the accumulator."""
        if not (isinstance(k, Integral) and 1 <= k <= competitors.seen.shape[1]):
            raise UsageError(
                f"k is {shown(k)}; expected 1 to {competitors.seen.shape[1]}, the k of the score accumulator"
            )
        is_seen = competitors.is_seen
        same = np.where(is_seen[:, None], competitors.seen, competitors.unseen)[:, :k]
        other = np.where(is_seen[:, None], competitors.unseen, competitors.seen)[:, :k]
        ahead = (same >= competitors.label[:, None]).sum(axis=1)  # a: in the label's group, which no bias moves
        barrier = other[np.arange(is_seen.size), np.clip(k - 1 - ahead, 0, k - 1)]  # the (k - a)-th of the other group
        with np.errstate(invalid="ignore", over="ignore"):
            d = np.where(is_seen, competitors.label - barrier, barrier - competitors.label)
        never = (ahead >= k) | (competitors.label == -np.inf) | (d == np.where(is_seen, -np.inf, np.inf))
        d = np.where(never, np.nan, d)
        return cls(d[is_seen], d[~is_seen], is_seen)

    def right(self, bias: float = 0.0) -> Bools:
        """Mask [N] of the images that are right if `bias` is added to unseen pairs' scores."""
        right = np.empty(self.is_seen.size, dtype=bool)
        right[self.is_seen] = bias < self.seen
        right[~self.is_seen] = bias > self.unseen
        return right


@dataclass(frozen=True)
class Curve:
    """Seen–unseen curve: accuracy on images of seen and of unseen pairs at its points `p = 0 .. P`, by rising bias.

    Breakpoints are the P biases at which an image becomes right or wrong; point `p` is the interval of biases between
    breakpoints `p - 1` and `p`. An image of a seen pair is right at the points up to `seen_until`, one of an unseen
    pair from the point `unseen_from` on.
    """

    breakpoints: Floats  # [P] distinct biases at which an image becomes right or wrong, ascending
    seen_until: Ints  # [N_s] -1: never
    unseen_from: Ints  # [N_u] P + 1: never

    @classmethod
    def of(cls, margins: Margins) -> Curve:
        """The curve of images with these `margins`."""
        both = np.concatenate([margins.seen, margins.unseen])
        breakpoints = np.unique(both[np.isfinite(both)])
        seen_until = np.searchsorted(breakpoints, margins.seen, side="left")
        unseen_from = np.searchsorted(breakpoints, margins.unseen, side="left") + 1
        unseen_from = np.where(margins.unseen == -np.inf, 0, unseen_from)
        never_seen, never_unseen = np.isnan(margins.seen), np.isnan(margins.unseen)
        unseen_from = np.where(never_unseen, breakpoints.size + 1, unseen_from)
        return cls(breakpoints, np.where(never_seen, -1, seen_until), unseen_from)

    def resampled(self, seen: Ints | slice, unseen: Ints | slice) -> tuple[Floats, Floats]:
        """Accuracies [P + 1] over `seen` and `unseen` images chosen by index; repeated indices count repeatedly."""
        points = self.breakpoints.size
        return share_right_until(self.seen_until[seen], points), share_right_from(self.unseen_from[unseen], points)

    @cached_property
    def seen_accuracies(self) -> Floats:
        """Accuracy on images of seen pairs [P + 1], falling; NaN without such images."""
        return share_right_until(self.seen_until, self.breakpoints.size)

    @cached_property
    def unseen_accuracies(self) -> Floats:
        """Accuracy on images of unseen pairs [P + 1], rising; NaN without such images."""
        return share_right_from(self.unseen_from, self.breakpoints.size)

    @cached_property
    def harmonic(self) -> Floats:
        """Harmonic mean of both accuracies [P + 1]."""
        return harmonic_mean(self.seen_accuracies, self.unseen_accuracies)

    def bias(self, point: int) -> float:
        """A bias that leads to a `point` from 0 to P: the middle of its interval, or a value beyond the breakpoints."""
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
            limit: approximate number of points, evenly spread, with the curve's ends and best HM; None: all points.
        """
        points = np.arange(self.breakpoints.size + 1)
        if limit is not None and points.size > limit:
            seen, unseen = np.nan_to_num(self.seen_accuracies), np.nan_to_num(self.unseen_accuracies)
            travelled = unseen - seen  # rises along the curve
            marks = np.searchsorted(travelled, np.linspace(travelled[0], travelled[-1], max(limit - 2, 2)))
            best = 0 if np.isnan(self.harmonic).all() else int(np.nanargmax(self.harmonic))
            points = np.unique(np.r_[marks, best])  # marks begin and end with the curve
        import pandas as pd

        accuracies = {"seen": self.seen_accuracies, "unseen": self.unseen_accuracies, "hm": self.harmonic}
        columns = {name: values[points] for name, values in accuracies.items()}
        return pd.DataFrame({"bias": [self.bias(int(p)) for p in points], **columns})


def share_right_until(until: Ints, breakpoints: int) -> Floats:
    """Share of images that are right at each of the P + 1 points, given the last one of each image (-1: none)."""
    counts = np.bincount(until + 1, minlength=breakpoints + 2)[1:]
    return _share(np.cumsum(counts[::-1])[::-1], until.size)


def share_right_from(since: Ints, breakpoints: int) -> Floats:
    """Share of images that are right at each of the P + 1 points, given the first one of each image (P + 1: none)."""
    return _share(np.cumsum(np.bincount(since, minlength=breakpoints + 2)[:-1]), since.size)


def _share(counts: Ints, images: int) -> Floats:
    return counts / images if images else np.full(counts.size, np.nan)


def harmonic_mean(seen: Floats, unseen: Floats) -> Floats:
    """The elementwise harmonic mean of seen and unseen accuracies; 0 where both are 0."""
    total = seen + unseen
    return np.divide(2 * seen * unseen, total, out=np.where(np.isnan(total), np.nan, 0.0), where=total > 0)


@dataclass(frozen=True)
class Components:
    """Each image's part of AUC; the variance of the parts gives the standard error of AUC (DeLong's method).

    It is the share of the images of the other kind (of seen or of unseen pairs) for which some bias makes both images
    right; ties count one half.
    """

    seen: Floats  # [N_s] V10_i = mean_j (d_i > d_j) + (d_i = d_j) / 2
    unseen: Floats  # [N_u] V01_j, the mean over i

    @classmethod
    def of(cls, margins: Margins) -> Components:
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
        """AUC as a fraction; None without images of seen or of unseen pairs."""
        return float(self.seen.mean()) if self.seen.size and self.unseen.size else None

    @property
    def standard_error(self) -> float | None:
        """DeLong's; None with fewer than two images of seen or of unseen pairs."""
        if min(self.seen.size, self.unseen.size) < 2:
            return None
        return math.sqrt(self.seen.var(ddof=1) / self.seen.size + self.unseen.var(ddof=1) / self.unseen.size)

    @property
    def interval(self) -> Interval | None:
        """95 % confidence interval of AUC, within [0, 1]."""
        auc, error = self.auc, self.standard_error
        if auc is None or error is None:
            return None
        return max(0.0, auc - NORMAL_95 * error), min(1.0, auc + NORMAL_95 * error)

    def minus(self, other: Components) -> Components:
        """Each image's part of the difference in AUC: this method minus another one on the same images."""
        return Components(self.seen - other.seen, self.unseen - other.unseen)


def _rank(among: Floats, values: Floats) -> Floats:
    # how many elements of the sorted array are smaller than each value; equal ones count one half
    rank: Floats = (np.searchsorted(among, values, "left") + np.searchsorted(among, values, "right")) / 2
    return rank


def bootstrap(methods: Sequence[Margins], rounds: int = ROUNDS, seed: int = 0) -> Floats:
    """S, U and best HM in each round [methods, rounds, 3]; a round draws the same images for all methods."""
    rng = np.random.default_rng(seed)
    curves = [Curve.of(margins) for margins in methods]
    seen_images, unseen_images = methods[0].seen.size, methods[0].unseen.size
    drawn = np.full((len(methods), rounds, 3), np.nan)
    for turn in range(rounds):
        chosen_seen = rng.integers(0, seen_images, seen_images) if seen_images else slice(0)
        chosen_unseen = rng.integers(0, unseen_images, unseen_images) if unseen_images else slice(0)
        for method, curve in enumerate(curves):
            seen, unseen = curve.resampled(chosen_seen, chosen_unseen)
            drawn[method, turn] = seen[0], unseen[-1], harmonic_mean(seen, unseen).max()
    return drawn


def percentiles(draws: Floats) -> Interval | None:
    """The interval that holds the middle 95 % of bootstrap values; None without values or if one is NaN."""
    if not draws.size or np.isnan(draws).any():
        return None
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """Difference of one metric (a fraction) between two methods, with its confidence interval and p-value."""

    value: float
    interval: Interval | None  # 95 %
    p: float | None  # two-sided


def compare(first: Margins, second: Margins, rounds: int = ROUNDS, seed: int = 0) -> dict[str, Difference]:
    """Differences `second - first` of two methods on the same images, by metric; undefined metrics are left out."""
    curves = [Curve.of(margins) for margins in (first, second)]
    ends = np.array([(c.seen_accuracies[0], c.unseen_accuracies[-1], c.harmonic.max()) for c in curves])  # [2, 3]
    draws = bootstrap([first, second], rounds, seed)
    result = differences(ends[1] - ends[0], draws[1] - draws[0])
    gain = Components.of(second).minus(Components.of(first))
    if gain.auc is not None:
        error = gain.standard_error
        interval = None if error is None else (gain.auc - NORMAL_95 * error, gain.auc + NORMAL_95 * error)
        result["auc"] = Difference(gain.auc, interval, _normal_p(gain.auc, error))
    return result


def bootstrap_p(change: Floats) -> float | None:
    """Two-sided p-value of bootstrapped differences: twice the smaller share on one side of 0, which counts on both."""
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


def compare_seeds(
    first: Sequence[Margins], second: Sequence[Margins], rounds: int = ROUNDS, seed: int = 0
) -> dict[str, Difference]:
    """Differences `second - first` averaged over seeds, one `Margins` each; undefined metrics are left out."""
    if len(first) != len(second) or not first:
        raise UsageError(f"the methods have {len(first)} and {len(second)} runs; compare the same seeds of both")
    if len(first) == 1:
        return compare(first[0], second[0], rounds, seed)
    curves = [[Curve.of(margins) for margins in runs] for runs in (first, second)]
    rng = np.random.default_rng(seed)
    draws = np.array([mean_change(curves, *resample(first, rng)) for _ in range(rounds)]).reshape(rounds, len(NAMES))
    return differences(mean_change(curves, *all_indices(first)), draws)


def differences(values: Floats, draws: Floats) -> dict[str, Difference]:
    """Value, 95 % interval and p-value of the first D of the metrics `seen, unseen, hm, auc`; NaN: left out.

    `values` are differences [D], `draws` the same in each bootstrap round [rounds, D].
    """
    return {
        name: Difference(float(value), percentiles(change), bootstrap_p(change))
        for name, value, change in zip(NAMES, values, draws.T, strict=False)
        if not np.isnan(value)
    }


def all_indices(runs: Sequence[Margins]) -> tuple[Ints, Ints, Ints]:
    """Indices of all runs, of all images of seen pairs and of all images of unseen pairs."""
    return np.arange(len(runs)), np.arange(runs[0].seen.size), np.arange(runs[0].unseen.size)


def resample(runs: Sequence[Margins], rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """A bootstrap sample: indices of runs and of images of seen and of unseen pairs, with replacement."""
    drawn, seen, unseen = [rng.integers(0, i.size, i.size) if i.size else i for i in all_indices(runs)]
    return drawn, seen, unseen


def mean_change(curves: Sequence[Sequence[Curve]], runs: Ints, seen: Ints, unseen: Ints) -> Floats:
    """Mean difference of two methods' `curves` in S, U, HM and AUC [4], over runs and images chosen by index."""
    drawn, times = np.unique(runs, return_counts=True)
    change = [
        headline_metrics(curves[1][run], seen, unseen) - headline_metrics(curves[0][run], seen, unseen) for run in drawn
    ]
    mean: Floats = np.average(change, axis=0, weights=times)
    return mean


def headline_metrics(curve: Curve, seen: Ints, unseen: Ints) -> Floats:
    """S, U, best HM and AUC [4] of a curve over images of seen and of unseen pairs chosen by index."""
    s, u = curve.resampled(seen, unseen)
    return np.array([s[0], u[-1], harmonic_mean(s, u).max(), area_under_curve(s, u)])


def area_under_curve(seen: Floats, unseen: Floats) -> float:
    """Area under the curve through (unseen accuracy, seen accuracy), by trapezoids, from unseen accuracy 0 on."""
    steps = np.diff(unseen) * (seen[1:] + seen[:-1]) / 2
    return float(steps.sum() + unseen[0] * seen[0])


@dataclass(frozen=True)
class SplitComparison:
    """Differences of two methods over several splits of a data set, by metric; undefined metrics are left out."""

    difference: dict[str, Difference]  # mean over splits
    by_split: list[dict[str, float]]  # difference of each metric on each split
    deviation: dict[str, float]  # standard deviation between the splits' differences


def compare_splits(
    first: Sequence[Sequence[Margins]], second: Sequence[Sequence[Margins]], rounds: int = ROUNDS, seed: int = 0
) -> SplitComparison:
    """Compare two methods over re-splits of a data set: per split one `Margins` per seed, of equal seeds and images."""
    splits = len(first), len(second)
    if splits[0] != splits[1] or splits[0] < 2:
        raise UsageError(f"the methods have {splits[0]} and {splits[1]} splits; compare the same two or more of both")
    pairs = list(zip(first, second, strict=True))
    for runs in ((len(a), len(b)) for a, b in pairs):
        if runs[0] != runs[1] or not runs[0]:
            raise UsageError(f"the methods have {runs[0]} and {runs[1]} runs on a split; compare the same seeds")
    curves = [[[Curve.of(margins) for margins in runs] for runs in pair] for pair in pairs]  # [splits][2][seeds]
    by_split = np.array(
        [mean_change(pair, *all_indices(runs)) for pair, runs in zip(curves, first, strict=True)]
    )  # [splits, 4]
    rng = np.random.default_rng(seed)

    def draw() -> Floats:
        numbers = rng.integers(0, len(first), len(first))
        return np.asarray(np.mean([mean_change(curves[n], *resample(first[n], rng)) for n in numbers], axis=0))

    draws = np.array([draw() for _ in range(rounds)]).reshape(rounds, len(NAMES))
    difference = differences(by_split.mean(axis=0), draws)
    return SplitComparison(
        difference,
        [{name: float(row[NAMES.index(name)]) for name in difference} for row in by_split],
        {name: float(by_split[:, NAMES.index(name)].std(ddof=1)) for name in difference},
    )


@dataclass(frozen=True)
class Metrics:
    """Metrics of scored images as fractions; None if the images that a metric needs are missing (docs/metrics.md)."""

    k: int
    images_seen: int
    images_unseen: int
    seen: float | None  # S: seen accuracy at bias -inf
    unseen: float | None  # U: unseen accuracy at bias +inf
    hm: float | None  # best harmonic mean on the curve
    auc: float | None
    seen_interval: Interval | None = None  # 95 %
    unseen_interval: Interval | None = None
    hm_interval: Interval | None = None
    auc_interval: Interval | None = None
    bias: float | None = None  # at which HM is reached, in units of the scores
    state_accuracy: float | None = None  # of the prediction at bias 0
    object_accuracy: float | None = None
    tied: float | None = None  # share of images that are wrong only because the label ties with the best of its group

    def to_dict(self) -> dict[str, Any]:
        """The metrics as JSON values, accuracies in percent."""
        return {name: value if name in NO_PERCENTAGES else _percent(value) for name, value in vars(self).items()}


def _percent(value: Any) -> Any:
    if value is None:
        return None
    return [100 * end for end in value] if isinstance(value, tuple) else 100 * value


def measure(
    competitors: TopCompetitors,
    k: int = 1,
    *,
    states: ArrayLike | None = None,
    objects: ArrayLike | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Metrics:
    """S, U, HM, AUC and the accuracies of states and objects, from score statistics.

    Args:
        competitors: the result of `ScoreAccumulator.competitors`.
        k: an image is right if its pair is among the best k.
        states: state of each column [C], for the accuracy of states.
        objects: object of each column [C], for the accuracy of objects.
        rounds: resamples of images for the intervals of S, U and HM; 0: no intervals.
        seed: of the resamples.
    """
    rounds, seed = require_whole(rounds, "rounds", 0), require_whole(seed, "seed", 0)
    margins = Margins.of(competitors, k)
    state_accuracy = _primitive_accuracy(competitors, states, "states")
    object_accuracy = _primitive_accuracy(competitors, objects, "objects")
    curve, parts = Curve.of(margins), Components.of(margins)
    draws = bootstrap([margins], rounds, seed)[0]  # [rounds, 3]
    own_group = np.where(competitors.is_seen[:, None], competitors.seen, competitors.unseen)
    tied = own_group[:, k - 1] == competitors.label
    best = int(curve.harmonic.argmax()) if margins.seen.size and margins.unseen.size else None
    return Metrics(
        k=k,
        images_seen=margins.seen.size,
        images_unseen=margins.unseen.size,
        seen=float(curve.seen_accuracies[0]) if margins.seen.size else None,
        unseen=float(curve.unseen_accuracies[-1]) if margins.unseen.size else None,
        hm=None if best is None else float(curve.harmonic[best]),
        auc=parts.auc,
        seen_interval=percentiles(draws[:, 0]),
        unseen_interval=percentiles(draws[:, 1]),
        hm_interval=percentiles(draws[:, 2]),
        auc_interval=parts.interval,
        bias=None if best is None else curve.bias(best),
        state_accuracy=state_accuracy,
        object_accuracy=object_accuracy,
        tied=float((tied & (competitors.label > -np.inf)).mean()),
    )


def _primitive_accuracy(competitors: TopCompetitors, names: ArrayLike | None, noun: str) -> float | None:
    if names is None:
        return None
    name, predicted = checked_names(names, competitors.columns, noun), competitors.best_columns()
    return float(((predicted >= 0) & (name[predicted] == name[competitors.target])).mean())


def group_table(groups: FrequencyGroups, train: Ints, test: Ints, right: Mapping[str, Bools]) -> pd.DataFrame:
    """A line per frequency group (head, medium, tail, unseen): compositions, images, and accuracies in percent.

    `train` and `test` are images' compositions; `right`: name of an accuracy column -> mask of right test images.
    """
    import pandas as pd

    table = pd.DataFrame({"group": list(GROUPS), "compositions": groups.sizes})
    for split, images in (("train", train), ("test", test)):
        counts = np.bincount(groups.groups_of(images), minlength=len(GROUPS))
        table[f"{split}_images"] = counts
        table[f"{split}_percent"] = 100 * counts / max(images.size, 1)
    for run, hits in right.items():
        if hits.shape != test.shape:
            raise DuplexError(
                f"{run} has results for {hits.size} images, the test split has {test.size}; evaluate it again"
            )
        counted = np.bincount(groups.groups_of(test), weights=hits, minlength=len(GROUPS))
        images = table["test_images"].to_numpy()
        table[run] = np.divide(100 * counted, images, out=np.full(len(GROUPS), np.nan), where=images > 0)
    return table
