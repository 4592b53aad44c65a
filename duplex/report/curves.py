"""Seen–unseen curve of a method for the report: averaged over seeds, with an interval over test images."""

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
    """Seen–unseen curve, averaged over seeds: unseen accuracy at G evenly spaced seen accuracies, in percent.

    `low` to `high` is the 95 % interval of unseen accuracy over test images.
    """

    seen: Floats
    unseen: Floats
    low: Floats
    high: Floats


def margins_of(predictions: pd.DataFrame, world: str) -> Margins | None:
    """Return margins (biases at which images become right or wrong) from a run's closed- or open-world predictions.

    None unless there are images of both seen and unseen pairs.
    """
    rows = predictions[predictions["world"] == world]
    is_seen = rows["seen"].to_numpy(dtype=bool)
    margin = rows["margin"].to_numpy(dtype=np.float64)
    if not is_seen.any() or is_seen.all():
        return None
    return Margins(margin[is_seen], margin[~is_seen], is_seen)


def mean_curve(seeds: Sequence[Margins], points: int = POINTS, rounds: int = ROUNDS) -> MeanCurve:
    """Return the seen–unseen curve, averaged over seeds: best unseen accuracy for each minimum of seen accuracy.

    seeds: margins (biases at which images become right or wrong) of each seed.
    points: number of points of the curve.
    rounds: number of bootstrap rounds for its interval. A round draws the same images for all seeds.

    Seeds with different test sets get no interval.
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
    """Return the best unseen accuracy [G] on a seen–unseen curve for each minimum of seen accuracy; 0 if not reached.

    seen, unseen: accuracies at the curve's points, seen accuracy falling.
    grid: minima of seen accuracy [G].
    """
    last = seen.size - np.searchsorted(seen[::-1], grid - 1e-12, side="left") - 1
    return np.where(last >= 0, unseen[last], 0.0)
