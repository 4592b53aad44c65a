"""Confidence intervals of S, U, HM and AUC, for one method and for the difference of two.

AUC is a Mann-Whitney statistic, so its variance follows from one number per image (DeLong et al., 1988). S, U and HM
are bootstrapped over images; images of seen and of unseen pairs are resampled separately, because a test set fixes how
many of each there are.

Over seeds and splits the bootstrap is hierarchical, because a seed affects all images of a run, an image affects all
runs, and the choice of unseen pairs affects all runs on a split. Each round draws splits, and for each of them seeds
and images, the same ones for both methods, and averages the metrics over the drawn runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duplex.errors import UsageError
from duplex.evaluation.accumulator import Floats
from duplex.evaluation.curve import Curve, Margins, harmonic_mean
from duplex.labels import Ints
from duplex.metric_table import METRICS

Interval = tuple[float, float]
NORMAL_95 = 1.959963984540054
ROUNDS = 1000


@dataclass(frozen=True)
class Components:
    """Each image's part of AUC; the variance of the parts gives the standard error of AUC (DeLong's method).

    The part of an image of a seen pair is the share of the images of unseen pairs for which some bias makes both images
    right; the part of an image of an unseen pair is the same share of the images of seen pairs. Ties count one half.
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
        """AUC as a fraction; None without images of seen or without images of unseen pairs."""
        return float(self.seen.mean()) if self.seen.size and self.unseen.size else None

    @property
    def standard_error(self) -> float | None:
        """Standard error of AUC by DeLong's formula; None with fewer than two images of seen or of unseen pairs."""
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
    """Return, for each value, how many elements of the sorted array `among` are smaller; equal ones count one half."""
    rank: Floats = (np.searchsorted(among, values, "left") + np.searchsorted(among, values, "right")) / 2
    return rank


def bootstrap(methods: Sequence[Margins], rounds: int = ROUNDS, seed: int = 0) -> Floats:
    """S, U and best HM of each method in each bootstrap round over images [methods, rounds, 3].

    Args:
        methods: margins of each method on the same images. A round draws
            the same images for all methods.
    """
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
    """The differences of two methods, `second - first`, on the same images: metric -> `Difference`.

    A difference has a 95 % interval and p-value. The metrics are `seen, unseen, hm, auc`; undefined ones are left out.

    Args:
        first, second: the methods' margins.
        rounds, seed: number of rounds and random seed of the bootstrap over images.
    """
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
    """The two-sided p-value of bootstrapped differences [rounds]: twice the smaller share on one side of 0.

    Differences of 0 count on both sides. None without rounds.
    """
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


NAMES = tuple(METRICS)


def compare_seeds(
    first: Sequence[Margins], second: Sequence[Margins], rounds: int = ROUNDS, seed: int = 0
) -> dict[str, Difference]:
    """The differences of two methods, `second - first`, averaged over seeds: metric -> `Difference`.

    A difference has a 95 % interval and p-value. The metrics are `seen, unseen, hm, auc`; undefined ones are left out.

    Raise `UsageError` unless both methods have the same number of seeds.

    Args:
        first, second: the methods' margins, one `Margins` per seed.
        rounds, seed: number of rounds and random seed of the bootstrap over seeds and images; with one training seed
            over images only, and AUC is compared by DeLong's method.
    """
    if len(first) != len(second) or not first:
        raise UsageError(f"the methods have {len(first)} and {len(second)} runs; compare the same seeds of both")
    if len(first) == 1:
        return compare(first[0], second[0], rounds, seed)
    curves = [[Curve.of(margins) for margins in runs] for runs in (first, second)]
    rng = np.random.default_rng(seed)
    draws = np.array([mean_change(curves, *resample(first, rng)) for _ in range(rounds)]).reshape(rounds, len(NAMES))
    return differences(mean_change(curves, *all_indices(first)), draws)


def differences(values: Floats, draws: Floats) -> dict[str, Difference]:
    """The `Difference` of each metric (value, 95 % interval and p-value) by name, from bootstrapped differences.

    Args:
        values: differences of the first D of the metrics `seen, unseen, hm, auc` [D]; NaN: the metric is left out.
        draws: the same differences in each bootstrap round [rounds, D].
    """
    return {
        name: Difference(float(value), percentiles(change), bootstrap_p(change))
        for name, value, change in zip(NAMES, values, draws.T, strict=False)
        if not np.isnan(value)
    }


def all_indices(runs: Sequence[Margins]) -> tuple[Ints, Ints, Ints]:
    """The indices of all runs, of all images of seen pairs and of all images of unseen pairs.

    With them, `mean_change` (the mean difference of two methods) covers all data, not a bootstrap sample.
    """
    return np.arange(len(runs)), np.arange(runs[0].seen.size), np.arange(runs[0].unseen.size)


def resample(runs: Sequence[Margins], rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Draw a bootstrap sample: indices of runs and of images of seen and of unseen pairs, with replacement."""
    drawn, seen, unseen = [rng.integers(0, i.size, i.size) if i.size else i for i in all_indices(runs)]
    return drawn, seen, unseen


def mean_change(curves: Sequence[Sequence[Curve]], runs: Ints, seen: Ints, unseen: Ints) -> Floats:
    """The mean difference of two methods in S, U, HM and AUC [4] over chosen runs and images.

    Args:
        curves: for each of the two methods, the seen–unseen curves of its runs.
        runs, seen, unseen: indices of runs, of images of seen pairs and of images of unseen pairs; repeated indices
            count repeatedly.
    """
    drawn, times = np.unique(runs, return_counts=True)
    change = [
        headline_metrics(curves[1][run], seen, unseen) - headline_metrics(curves[0][run], seen, unseen) for run in drawn
    ]
    mean: Floats = np.average(change, axis=0, weights=times)
    return mean


def headline_metrics(curve: Curve, seen: Ints, unseen: Ints) -> Floats:
    """S, U, best HM and AUC [4] of a seen–unseen curve, over chosen images.

    Args:
        seen, unseen: indices of the images of seen and of unseen pairs; repeated indices count repeatedly.
    """
    s, u = curve.resampled(seen, unseen)
    return np.array([s[0], u[-1], harmonic_mean(s, u).max(), area_under_curve(s, u)])


def area_under_curve(seen: Floats, unseen: Floats) -> float:
    """The area under the curve through the points (unseen accuracy, seen accuracy), by trapezoids.

    Args:
        seen, unseen: accuracies at the curve's points, unseen accuracy rising. The area left of the first point (images
            of unseen pairs that are right at every bias) is included.
    """
    steps = np.diff(unseen) * (seen[1:] + seen[:-1]) / 2
    return float(steps.sum() + unseen[0] * seen[0])


@dataclass(frozen=True)
class SplitComparison:
    """Differences of two methods in `seen, unseen, hm, auc` over several splits of a data set.

    Metrics that are undefined for the images are left out.
    """

    difference: dict[str, Difference]  # mean over splits
    by_split: list[dict[str, float]]  # difference of each metric on each split
    deviation: dict[str, float]  # standard deviation between the splits' differences


def compare_splits(
    first: Sequence[Sequence[Margins]], second: Sequence[Sequence[Margins]], rounds: int = ROUNDS, seed: int = 0
) -> SplitComparison:
    """Compare two methods over re-splits of a data set: the same images with other random choices of unseen pairs.

    Raise `UsageError` for fewer than two splits, or if the methods differ in splits or seeds.

    Args:
        first, second: the methods' margins: per split, one `Margins` per
            seed, with the same seeds and images in both.
        rounds, seed: number of rounds and random seed of the bootstrap over splits, training seeds and images.
    """
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
