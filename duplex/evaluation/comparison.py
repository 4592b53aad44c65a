"""Differences of two methods on the same images, with 95 % intervals and p-values.

With one seed each, AUC is compared by DeLong's variance; everything else is bootstrapped. Over seeds and splits the
bootstrap is hierarchical: each round draws splits, and for each of them seeds and images, the same ones for both
methods, and averages the metrics over the drawn runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duplex.errors import UsageError
from duplex.evaluation.accumulate import Floats
from duplex.evaluation.metrics import (
    METRICS,
    NORMAL_95,
    ROUNDS,
    Components,
    Curve,
    Interval,
    Margins,
    bootstrap,
    harmonic_mean,
    number,
    percentiles,
)
from duplex.labels import Ints

NAMES = tuple(METRICS)


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
    seeds = [len(runs) for runs in first]
    if seeds != [len(runs) for runs in second] or len(seeds) < 2 or 0 in seeds:
        raise UsageError("compare the same seeds of both methods, on the same two or more splits")
    pairs = list(zip(first, second, strict=True))
    curves = [[[Curve.of(margins) for margins in runs] for runs in pair] for pair in pairs]  # [splits][2][seeds]
    by_split = np.array([mean_change(pair, *all_indices(runs)) for pair, runs in zip(curves, first, strict=True)])
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


def estimate_line(name: str, estimate: Mapping[str, Any]) -> str:
    """A metric as a line such as `auc       12.34   [11.00, 13.70]   p = 0.012`; missing parts are left out."""
    line = f"{name}{number(estimate['value']):>6}"
    if estimate["interval"] is not None:
        low, high = estimate["interval"]
        line += f"   [{low:6.2f}, {high:6.2f}]"
    p = estimate.get("p")
    if p is None:
        return line
    return f"{line}   p < 0.001" if p < 0.001 else f"{line}   p = {p:.3f}"


def to_points(gains: Mapping[str, Difference]) -> dict[str, dict[str, Any]]:
    """Differences as percentage points, of fractions; p-values stay probabilities."""
    return {
        name: {
            "value": 100 * gain.value,
            "interval": None if gain.interval is None else [100 * end for end in gain.interval],
            "p": gain.p,
        }
        for name, gain in gains.items()
    }
