"""Two methods over several seeds on the same images: a hierarchical bootstrap over seeds and images.

A seed moves all images of a run together and an image moves all runs together, so a round draws seeds (the same for
both methods: run `s` of one is paired with run `s` of the other) and images (the same for all runs; seen and unseen
ones separately), and averages the quantities over the drawn runs.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """`second - first`, means over seeds, for `seen, unseen, hm, auc`; undefined ones are left out. One seed: over
    images alone, AUC by DeLong."""
    if len(first) != len(second) or not first:
        raise UsageError(f"{len(first)} runs cannot be paired with {len(second)}; compare the same seeds")
    if len(first) == 1:
        return compare(first[0], second[0], rounds, seed)
    curves = [[Curve.of(margins) for margins in runs] for runs in (first, second)]
    rng = np.random.default_rng(seed)
    draws = np.array([mean_change(curves, *redrawn(first, rng)) for _ in range(rounds)]).reshape(rounds, len(NAMES))
    return differences(mean_change(curves, *whole(first)), draws)


def differences(values: Floats, draws: Floats) -> dict[str, Difference]:
    """Values [4] with what a bootstrap's rounds [rounds, 4] say of them; undefined ones are left out."""
    return {
        name: Difference(float(values[i]), percentiles(draws[:, i]), bootstrap_p(draws[:, i]))
        for i, name in enumerate(NAMES)
        if not np.isnan(values[i])
    }


def whole(runs: Sequence[Margins]) -> tuple[Ints, Ints, Ints]:
    """All runs, all seen and all unseen images, once each."""
    return np.arange(len(runs)), np.arange(runs[0].seen.size), np.arange(runs[0].unseen.size)


def redrawn(runs: Sequence[Margins], rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """As many of each, drawn with replacement."""
    drawn, seen, unseen = (rng.integers(0, some.size, some.size) if some.size else some for some in whole(runs))
    return drawn, seen, unseen


def mean_change(curves: Sequence[Sequence[Curve]], runs: Ints, seen: Ints, unseen: Ints) -> Floats:
    """[4] second minus first over drawn runs and images."""
    drawn, times = np.unique(runs, return_counts=True)
    change = [quantities(curves[1][run], seen, unseen) - quantities(curves[0][run], seen, unseen) for run in drawn]
    mean: Floats = np.average(change, axis=0, weights=times)
    return mean


def quantities(curve: Curve, seen: Ints, unseen: Ints) -> Floats:
    """S, U, best HM and AUC [4] of some of a curve's images."""
    s = falling(curve.seen_until[seen], curve.breakpoints.size)
    u = rising(curve.unseen_from[unseen], curve.breakpoints.size)
    return np.array([s[0], u[-1], harmonic_mean(s, u).max(), area(s, u)])


def area(seen: Floats, unseen: Floats) -> float:
    """Under the curve through points `(unseen_p, seen_p)`: trapezoids, so that ties count one half, and on the left the
    unseen images that are right at every bias."""
    steps = np.diff(unseen) * (seen[1:] + seen[:-1]) / 2
    return float(steps.sum() + unseen[0] * seen[0])
