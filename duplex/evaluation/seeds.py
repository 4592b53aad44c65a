"""Comparison of two methods over seeds, and over splits of a data set, by a hierarchical bootstrap.

A seed affects all images of a run and an image affects all runs. So each round draws seeds (the same for both methods:
run `s` of one is paired with run `s` of the other) and images (the same for all runs; seen and unseen ones separately),
and averages the metrics over the drawn runs.

The choice of unseen pairs affects every run on a split and is the same for both methods. So over several splits each
round draws splits, and in each drawn split independently seeds and images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duplex.errors import UsageError
from duplex.evaluation.accumulator import Floats
from duplex.evaluation.curve import Curve, Margins, falling, harmonic_mean, rising
from duplex.evaluation.uncertainty import ROUNDS, Difference, bootstrap_p, compare, percentiles
from duplex.labels import Ints

NAMES = ("seen", "unseen", "hm", "auc")


def compare_seeds(
    first: Sequence[Margins], second: Sequence[Margins], rounds: int = ROUNDS, seed: int = 0
) -> dict[str, Difference]:
    """Return `second - first`, averaged over seeds, for `seen, unseen, hm, auc`; undefined metrics are left out.

    Each method has one `Margins` per seed. With one seed only images are resampled, and AUC is compared by DeLong.
    """
    if len(first) != len(second) or not first:
        raise UsageError(f"the methods have {len(first)} and {len(second)} runs; compare the same seeds of both")
    if len(first) == 1:
        return compare(first[0], second[0], rounds, seed)
    curves = [[Curve.of(margins) for margins in runs] for runs in (first, second)]
    rng = np.random.default_rng(seed)
    draws = np.array([mean_change(curves, *resample(first, rng)) for _ in range(rounds)]).reshape(rounds, len(NAMES))
    return differences(mean_change(curves, *everything(first)), draws)


def differences(values: Floats, draws: Floats) -> dict[str, Difference]:
    """Return the values [4] with intervals and p-values from a bootstrap [rounds, 4]; undefined ones are left out."""
    return {
        name: Difference(float(values[i]), percentiles(draws[:, i]), bootstrap_p(draws[:, i]))
        for i, name in enumerate(NAMES)
        if not np.isnan(values[i])
    }


def everything(runs: Sequence[Margins]) -> tuple[Ints, Ints, Ints]:
    """Return the indices of all runs, all seen and all unseen images."""
    return np.arange(len(runs)), np.arange(runs[0].seen.size), np.arange(runs[0].unseen.size)


def resample(runs: Sequence[Margins], rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Draw as many runs, seen and unseen images as there are, with replacement."""
    drawn, seen, unseen = (rng.integers(0, i.size, i.size) if i.size else i for i in everything(runs))
    return drawn, seen, unseen


def mean_change(curves: Sequence[Sequence[Curve]], runs: Ints, seen: Ints, unseen: Ints) -> Floats:
    """Return second minus first [4] over the given runs and images, repetitions counted."""
    drawn, times = np.unique(runs, return_counts=True)
    change = [summary_of(curves[1][run], seen, unseen) - summary_of(curves[0][run], seen, unseen) for run in drawn]
    mean: Floats = np.average(change, axis=0, weights=times)
    return mean


def summary_of(curve: Curve, seen: Ints, unseen: Ints) -> Floats:
    """Return S, U, best HM and AUC [4] of the given images of a curve."""
    s = falling(curve.seen_until[seen], curve.breakpoints.size)
    u = rising(curve.unseen_from[unseen], curve.breakpoints.size)
    return np.array([s[0], u[-1], harmonic_mean(s, u).max(), area(s, u)])


def area(seen: Floats, unseen: Floats) -> float:
    """Return the area under the curve through points `(unseen_p, seen_p)`: trapezoids (ties count one half) and, on the
    left, the rectangle of unseen images that are right at every bias."""
    steps = np.diff(unseen) * (seen[1:] + seen[:-1]) / 2
    return float(steps.sum() + unseen[0] * seen[0])


@dataclass(frozen=True)
class SplitComparison:
    """`second - first` for `seen, unseen, hm, auc`; undefined metrics are left out."""

    difference: dict[str, Difference]  # mean over splits
    by_split: list[dict[str, float]]
    deviation: dict[str, float]  # standard deviation between the splits' differences


def compare_splits(
    first: Sequence[Sequence[Margins]], second: Sequence[Sequence[Margins]], rounds: int = ROUNDS, seed: int = 0
) -> SplitComparison:
    """Compare the runs of two methods, given per split, paired by seed and image within each split."""
    splits = len(first), len(second)
    if splits[0] != splits[1] or splits[0] < 2:
        raise UsageError(f"the methods have {splits[0]} and {splits[1]} splits; compare the same two or more of both")
    pairs = list(zip(first, second, strict=True))
    for runs in ((len(a), len(b)) for a, b in pairs):
        if runs[0] != runs[1] or not runs[0]:
            raise UsageError(f"the methods have {runs[0]} and {runs[1]} runs on a split; compare the same seeds")
    curves = [[[Curve.of(margins) for margins in runs] for runs in pair] for pair in pairs]  # [splits][2][seeds]
    by_split = np.array(
        [mean_change(pair, *everything(runs)) for pair, runs in zip(curves, first, strict=True)]
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
