"""95 % confidence intervals of metrics, and of differences between two methods on the same images.

The interval of AUC, or of the difference between two runs, follows from its standard error
(`curve.AucComponents`); everything else is bootstrapped over images, those of seen and of unseen
pairs separately. Over several seeds and splits, each round draws splits, then for each drawn split
seeds and images, the same for both methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duplex.errors import UsageError
from duplex.evaluation.accumulate import Floats
from duplex.evaluation.curve import NORMAL_95, AucComponents, Curve, Interval, Margins, area_under, harmonic_mean
from duplex.labels import Ints

ROUNDS = 1000  # of a bootstrap, for library calls; the pipeline has `evaluation.bootstrap`
NAMES = ("seen", "unseen", "hm", "auc")


def bootstrap_metrics(methods: Sequence[Margins], rounds: int = ROUNDS, seed: int = 0) -> Floats:
    """S, U and best HM [methods, rounds, 3]; all methods get the same drawn images."""
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
    """The middle 95 % of bootstrapped values; None without values, or if one of them is NaN."""
    if not draws.size or np.isnan(draws).any():
        return None
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """Difference between two methods in one metric (a fraction)."""

    value: float
    interval: Interval | None  # 95 %
    p: float | None  # two-sided


def compare(first: Margins, second: Margins, rounds: int = ROUNDS, seed: int = 0) -> dict[str, Difference]:
    """Metric -> difference `second - first` on the same images, for each defined metric."""
    curves = [Curve.of(margins) for margins in (first, second)]
    ends = np.array(  # [2, 3]
        [(c.seen_accuracies[0], c.unseen_accuracies[-1], c.harmonic.max()) for c in curves]
    )
    draws = bootstrap_metrics([first, second], rounds, seed)
    result = difference_intervals(ends[1] - ends[0], draws[1] - draws[0])
    gain = AucComponents.of(second).minus(AucComponents.of(first))
    if gain.auc is not None:
        error = gain.standard_error
        interval = None if error is None else (gain.auc - NORMAL_95 * error, gain.auc + NORMAL_95 * error)
        result["auc"] = Difference(gain.auc, interval, _normal_p(gain.auc, error))
    return result


def bootstrap_p(change: Floats) -> float | None:
    """Two-sided p-value: about twice the share on the rarer side of 0; None if empty."""
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


def compare_seeds(first: Sequence[Margins], second: Sequence[Margins], rounds: int = ROUNDS) -> dict[str, Difference]:
    """Metric -> mean of `second - first` over seeds; methods have one `Margins` per seed."""
    if len(first) != len(second) or not first:
        raise UsageError(f"the methods have {len(first)} and {len(second)} runs; give runs of both with the same seeds")
    if len(first) == 1:
        return compare(first[0], second[0], rounds)
    curves = [[Curve.of(margins) for margins in runs] for runs in (first, second)]
    rng = np.random.default_rng(0)
    draws = np.array([mean_change(curves, *resample(first, rng)) for _ in range(rounds)])
    values = mean_change(curves, *all_indices(first))
    return difference_intervals(values, draws.reshape(rounds, len(NAMES)))


def difference_intervals(values: Floats, draws: Floats) -> dict[str, Difference]:
    """Metric -> difference with interval and p-value; NaN differences are left out.

    values: the differences [D] in the first D metrics; draws: those in each bootstrap round.
    """
    return {
        name: Difference(float(value), percentiles(change), bootstrap_p(change))
        for name, value, change in zip(NAMES, values, draws.T, strict=False)
        if not np.isnan(value)
    }


def all_indices(runs: Sequence[Margins]) -> tuple[Ints, Ints, Ints]:
    """Indices of all runs, seen pairs' images and unseen pairs' images, for `mean_change`."""
    return np.arange(len(runs)), np.arange(runs[0].seen.size), np.arange(runs[0].unseen.size)


def resample(runs: Sequence[Margins], rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Draw indices of runs, seen pairs' images and unseen pairs' images, with replacement."""
    drawn, seen, unseen = [rng.integers(0, i.size, i.size) if i.size else i for i in all_indices(runs)]
    return drawn, seen, unseen


def mean_change(curves: Sequence[Sequence[Curve]], runs: Ints, seen: Ints, unseen: Ints) -> Floats:
    """Mean difference in S, U, HM and AUC [4] of `curves[method][run]`, second method minus first."""
    drawn, times = np.unique(runs, return_counts=True)
    change = []
    for run in drawn:
        before = headline_metrics(curves[0][run], seen, unseen)
        change.append(headline_metrics(curves[1][run], seen, unseen) - before)
    return np.asarray(np.average(change, axis=0, weights=times))


def headline_metrics(curve: Curve, seen: Ints, unseen: Ints) -> Floats:
    """S, U, best HM and AUC [4] of a curve, over the images with the given indices."""
    s, u = curve.resampled(seen, unseen)
    area = area_under(s, u) + u[0] * s[0]  # and left of the first point
    return np.array([s[0], u[-1], harmonic_mean(s, u).max(), area])


@dataclass(frozen=True)
class SplitComparison:
    """Two methods compared over several splits: the second minus the first."""

    difference: dict[str, Difference]  # mean over splits
    by_split: list[dict[str, float]]  # difference of each metric on each split
    deviation: dict[str, float]  # standard deviation between the splits' differences


def compare_splits(
    first: Sequence[Sequence[Margins]], second: Sequence[Sequence[Margins]], rounds: int = ROUNDS, seed: int = 0
) -> SplitComparison:
    """Compare two methods over several splits; `first[i][j]` has margins of split i, seed j."""
    seeds = [len(runs) for runs in first]
    others = [len(runs) for runs in second]
    if seeds != others or len(seeds) < 2 or 0 in seeds:
        raise UsageError(
            f"the methods have {seeds} and {others} runs per split; give two or more splits and, on each of "
            "them, runs of both methods with the same seeds"
        )
    pairs = list(zip(first, second, strict=True))
    curves = [  # [splits][2][seeds]
        [[Curve.of(margins) for margins in runs] for runs in pair] for pair in pairs
    ]
    numbers = range(len(first))
    by_split = np.array([mean_change(curves[n], *all_indices(first[n])) for n in numbers])
    rng = np.random.default_rng(seed)

    def draw() -> Floats:
        drawn = rng.integers(0, len(first), len(first))
        changes = [mean_change(curves[n], *resample(first[n], rng)) for n in drawn]
        return np.asarray(np.mean(changes, axis=0))

    draws = np.array([draw() for _ in range(rounds)]).reshape(rounds, len(NAMES))
    difference = difference_intervals(by_split.mean(axis=0), draws)
    return SplitComparison(
        difference,
        [{name: float(row[NAMES.index(name)]) for name in difference} for row in by_split],
        {name: float(by_split[:, NAMES.index(name)].std(ddof=1)) for name in difference},
    )


def in_percentage_points(gains: Mapping[str, Difference]) -> dict[str, dict[str, Any]]:
    """Differences for JSON: metric -> `value` and `interval` in percentage points, and `p`."""
    return {
        name: {
            "value": 100 * gain.value,
            "interval": None if gain.interval is None else [100 * end for end in gain.interval],
            "p": gain.p,
        }
        for name, gain in gains.items()
    }
