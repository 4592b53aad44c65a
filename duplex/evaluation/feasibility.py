"""Which unseen compositions of the open world are worth considering (Mancini et al., 2021; Open-World CZSL).

Columns whose feasibility (`duplex.feasibility`) lies below a threshold score -inf; seen ones never do. All thresholds
come from one pass over the scores, because each only adds a bucket of columns to the one above it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duplex.errors import DuplexError
from duplex.evaluation.curve import Margins
from duplex.evaluation.evidence import Evidence, Floats
from duplex.evaluation.uncertainty import Components
from duplex.labels import Bools, Ints


def thresholds(feasible: Floats, seen: Bools, count: int = 50) -> Floats:
    """`count` points between the smallest and the largest unseen feasibility, ascending."""
    unseen = feasible[~seen]
    if not unseen.size:
        raise DuplexError("no composition is unseen, so there is no feasibility to threshold")
    return np.linspace(unseen.min(), unseen.max(), count)


def buckets(feasible: Floats, steps: Floats) -> Ints:
    """[C] bucket 0 passes every threshold, bucket `count` none; for `Evidence(bucket=...)`."""
    return steps.size - np.searchsorted(steps, feasible, side="right")


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
