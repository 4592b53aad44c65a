"""Which unseen compositions of the open world are worth considering (Mancini et al., 2021; Open-World CZSL).

Columns whose feasibility (`duplex.layers.word_feasibility`) lies below a threshold score -inf; seen ones never do. All thresholds
come from one pass over the scores, because each only adds a bucket of columns to the one above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError
from duplex.evaluation.accumulator import Evidence, Floats
from duplex.evaluation.curve import Margins
from duplex.evaluation.uncertainty import Components
from duplex.labels import Bools

Small = NDArray[Any]  # of the narrowest integers that hold a number of buckets


class FeasibleBlocks(Protocol):
    """Feasibility that is never held whole."""

    def blocks(self) -> Iterator[tuple[int, Floats]]:
        """The first column of each block, and its values."""
        ...


Feasible = Floats | FeasibleBlocks  # [C], +inf for seen columns


def thresholds(feasible: Feasible, seen: Bools, count: int = 50) -> Floats:
    """`count` points between the smallest and the largest unseen feasibility, ascending."""
    parts = (values[~seen[first : first + len(values)]] for first, values in _blocks(feasible))
    ends = [(part.min(), part.max()) for part in parts if part.size]
    if not ends:
        raise DuplexError("no composition is unseen, so there is no feasibility to threshold")
    return np.linspace(min(low for low, _ in ends), max(high for _, high in ends), count)


def buckets(feasible: Feasible, steps: Floats) -> Small:
    """[C] bucket 0 passes every threshold, bucket `count` none; for `Evidence(bucket=...)`."""
    kind = np.min_scalar_type(-steps.size - 1)
    below = (np.searchsorted(steps, values, side="right").astype(kind) for _, values in _blocks(feasible))
    return np.concatenate([kind.type(steps.size) - part for part in below])


def passing(feasible: Feasible, threshold: float) -> Bools:
    """[C] Which columns a threshold lets through."""
    return np.concatenate([values >= threshold for _, values in _blocks(feasible)])


def _blocks(feasible: Feasible) -> Iterator[tuple[int, Floats]]:
    return iter([(0, feasible)]) if isinstance(feasible, np.ndarray) else feasible.blocks()


@dataclass(frozen=True)
class Threshold:
    """The chosen threshold and how each candidate did."""

    value: float
    candidates: Floats  # ascending
    auc: Floats  # of each candidate, fractions


def choose_threshold(evidence: Evidence, steps: Floats, k: int = 1) -> Threshold:
    """The candidate with the best AUC on **validation** evidence read with `bucket=buckets(feasible, steps)`.

    Among equals the lowest, which rules out the fewest compositions.
    """
    by_cut = [Components.of(Margins.of(rivals, k)).auc for rivals in evidence.cuts()]  # none, one, ... buckets feasible
    if by_cut[0] is None:
        raise DuplexError("a threshold is chosen by validation AUC, which needs both seen and unseen validation images")
    passing = np.minimum(np.arange(steps.size, 0, -1), len(by_cut) - 1)  # buckets that pass each threshold
    auc = np.array(by_cut, dtype=np.float64)[passing]
    return Threshold(float(steps[auc.argmax()]), steps, auc)
