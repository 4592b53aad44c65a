"""Choose feasibility thresholds, which exclude implausible unseen compositions in the open world.

Feasibility is a number per composition, larger for more plausible ones (Mancini et al., 2021; Open-World CZSL). Unseen
compositions with a feasibility below the threshold score -inf. All thresholds are tried in one pass over the scores:
unseen compositions are divided into buckets, and each step to a lower threshold adds one bucket to the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError
from duplex.evaluation.accumulator import Floats, ScoreAccumulator
from duplex.evaluation.crossfit import CrossFitGain, crossfit_gain, wins_by_pair
from duplex.evaluation.curve import Margins
from duplex.evaluation.uncertainty import Components
from duplex.labels import Bools

BucketNumbers = NDArray[Any]  # [C] in the narrowest integer type that holds them


class FeasibilityBlocks(Protocol):
    """Feasibility, computed in blocks for label spaces too large for memory."""

    def blocks(self) -> Iterator[tuple[int, Floats]]:
        """Yield the feasibility values in blocks: (index of the block's first composition, values)."""


FeasibilityValues = Floats | FeasibilityBlocks  # [C], +inf for seen columns


def thresholds(feasible: FeasibilityValues, seen: Bools, count: int = 50) -> Floats:
    """`count` evenly spaced thresholds from the least to the greatest feasibility of unseen compositions."""
    parts = (values[~seen[first : first + len(values)]] for first, values in _blocks(feasible))
    ends = [(part.min(), part.max()) for part in parts if part.size]
    if not ends:
        raise DuplexError("every composition is seen; a feasibility threshold needs unseen ones")
    return np.linspace(min(low for low, _ in ends), max(high for _, high in ends), count)


def buckets(feasible: FeasibilityValues, steps: Floats) -> BucketNumbers:
    """Each composition's bucket [C]: the number of `steps` (thresholds) that exclude it as implausible.

    Args:
        steps: thresholds, ascending. Compositions in bucket 0 reach every threshold; `ScoreAccumulator` includes
            buckets from 0 on.
    """
    kind = np.min_scalar_type(-steps.size - 1)
    below = (np.searchsorted(steps, values, side="right").astype(kind) for _, values in _blocks(feasible))
    return np.concatenate([kind.type(steps.size) - part for part in below])


def is_feasible(feasible: FeasibilityValues, threshold: float) -> Bools:
    """The mask [C] of compositions whose feasibility is at least the threshold."""
    return np.concatenate([values >= threshold for _, values in _blocks(feasible)])


def _blocks(feasible: FeasibilityValues) -> Iterator[tuple[int, Floats]]:
    return iter([(0, feasible)]) if isinstance(feasible, np.ndarray) else feasible.blocks()


@dataclass(frozen=True)
class Threshold:
    """Chosen threshold that excludes implausible pairs; all thresholds tried, with their validation AUC; and its gain.

    The gain in AUC over no threshold is measured on pairs that had no part in choosing the threshold.
    """

    value: float
    candidates: Floats  # all thresholds tried, ascending
    auc: Floats  # of each candidate, fractions
    gain: CrossFitGain

    @property
    def passing_buckets(self) -> int:
        """Number of buckets (compositions between two thresholds) whose feasibility reaches the chosen threshold."""
        return int(self.candidates.size - np.searchsorted(self.candidates, self.value))


def choose_threshold(accumulator: ScoreAccumulator, steps: Floats, k: int = 1) -> Threshold:
    """The feasibility threshold with the best validation AUC; of equally good ones the lowest.

    Raise `DuplexError` without validation images of both seen and unseen pairs.

    Args:
        accumulator: statistics of the scores of **validation** images, with unseen pairs grouped by these thresholds.
    """
    unseen = ~accumulator.seen[accumulator.target]
    _, pair, images = np.unique(accumulator.target[unseen], return_inverse=True, return_counts=True)
    by_cut, wins = [], []  # with none, one, ... buckets feasible
    for statistics in accumulator.cumulative():
        components = Components.of(Margins.of(statistics, k))
        if components.auc is None:
            raise DuplexError("choosing a feasibility threshold needs validation images of both seen and unseen pairs")
        by_cut.append(components.auc)
        wins.append(wins_by_pair(components, pair, images.size))
    passing = np.minimum(np.arange(steps.size, 0, -1), len(by_cut) - 1)  # buckets that pass each threshold
    auc = np.array(by_cut, dtype=np.float64)[passing]
    gain = crossfit_gain(np.array(wins)[passing], images, components.seen.size)
    return Threshold(float(steps[auc.argmax()]), steps, auc, gain)
