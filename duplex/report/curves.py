"""Seen–unseen curve of a method: mean over seeds, with an interval over test images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from duplex.evaluation.accumulator import Floats
from duplex.evaluation.curve import Curve, Margins

POINTS, ROUNDS = 81, 200


@dataclass(frozen=True)
class MeanCurve:
    """Unseen accuracy at G evenly spaced seen accuracies, in percent; `low` to `high` is its 95 % interval."""

    seen: Floats
    unseen: Floats
    low: Floats
    high: Floats


def margins_of(predictions: pd.DataFrame, world: str) -> Margins | None:
    """Return images' margins (biases at which they turn right or wrong); None unless seen and unseen pairs occur."""
    rows = predictions[predictions["world"] == world]
    is_seen = rows["seen"].to_numpy(dtype=bool)
    margin = rows["margin"].to_numpy(dtype=np.float64)
    if not is_seen.any() or is_seen.all():
        return None
    return Margins(margin[is_seen], margin[~is_seen], is_seen)


def mean_curve(seeds: Sequence[Margins], points: int = POINTS, rounds: int = ROUNDS) -> MeanCurve:
    """Return the best unseen accuracy for each minimum of seen accuracy, averaged over seeds.

    Each of the `rounds` of the bootstrap draws the same seen and unseen images for every seed. Seeds with different
    test sets get no interval.
    """
    curves = [Curve.of(margins) for margins in seeds]
    top = max(float(curve.seen_accuracies[0]) for curve in curves)
    grid = np.linspace(0.0, top, points)
    centre = np.mean([unseen_at(c.seen_accuracies, c.unseen_accuracies, grid) for c in curves], axis=0)
    if len({(c.seen_until.size, c.unseen_from.size) for c in curves}) > 1:
        return MeanCurve(100 * grid, 100 * centre, 100 * centre, 100 * centre)
    rng, drawn = np.random.default_rng(0), np.empty((rounds, points))
    for turn in range(rounds):
        seen = rng.integers(0, curves[0].seen_until.size, curves[0].seen_until.size)
        unseen = rng.integers(0, curves[0].unseen_from.size, curves[0].unseen_from.size)
        drawn[turn] = np.mean([unseen_at(*curve.resampled(seen, unseen), grid) for curve in curves], axis=0)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return MeanCurve(100 * grid, 100 * centre, 100 * low, 100 * high)


def unseen_at(seen: Floats, unseen: Floats, grid: Floats) -> Floats:
    """Return a curve's best unseen accuracy [G] for each minimum of seen accuracy in `grid` [G]; 0 if not reached.

    seen, unseen: accuracies of the curve's points, seen accuracy falling.
    """
    last = seen.size - np.searchsorted(seen[::-1], grid - 1e-12, side="left") - 1
    return np.where(last >= 0, unseen[last], 0.0)
