"""Which unseen compositions of the open world are worth considering (Mancini et al., 2021; Open-World CZSL).

A state is plausible with an object if it was seen with a similar one:
`f(s, o) = 1/2 [max cos(o, o') over o' != o seen with s + max cos(s, s') over s' != s seen with o]`, -1 for a missing
neighbour. Columns below a threshold score -inf; seen ones never do. All thresholds come from one pass over the scores,
because each only adds a bucket of columns to the one above it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from duplex.errors import DuplexError
from duplex.evaluation.curve import Margins
from duplex.evaluation.evidence import Evidence, Floats
from duplex.evaluation.uncertainty import Components
from duplex.labels import Bools, Ints, LabelSpace

NO_NEIGHBOUR = -1.0


def feasibility(states: ArrayLike, objects: ArrayLike, labels: LabelSpace) -> Floats:
    """[M*N] from word vectors [M, w] and [N, w]; +inf for seen compositions."""
    seen = np.asarray(labels.pairs["train"], dtype=np.int64)
    m, n = labels.state_of(seen), labels.object_of(seen)
    by_object = _nearest(_cosines(states, len(labels.states), "state"), m, n, len(labels.objects))  # [M, N]
    by_state = _nearest(_cosines(objects, len(labels.objects), "object"), n, m, len(labels.states)).T  # [M, N]
    found: Floats = ((by_object + by_state) / 2).ravel()
    found[seen] = np.inf
    return found


def _cosines(vectors: ArrayLike, count: int, kind: str) -> Floats:
    """[count, count] with -inf on the diagonal: nothing is its own neighbour."""
    rows = np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2 or len(rows) != count or not np.isfinite(rows).all():
        raise DuplexError(f"{count} {kind}s need a finite word vector each, not an array of shape {rows.shape}")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows / np.where(lengths > 0, lengths, 1.0)
    cosines: Floats = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    return cosines


def _nearest(cosines: Floats, here: Ints, there: Ints, others: int) -> Floats:
    """[A, B]: for primitive `a` and other primitive `b`, the largest cosine between `a` and any `a'` seen with `b`.

    `here`, `there`: the `A`-side and `B`-side primitive of each seen composition.
    """
    found = np.full((len(cosines), others), NO_NEIGHBOUR)
    if here.size:
        order = np.argsort(there, kind="stable")
        partners, starts = np.unique(there[order], return_index=True)
        nearest = np.maximum.reduceat(cosines[:, here[order]], starts, axis=1)  # [A, partners]
        found[:, partners] = np.maximum(nearest, NO_NEIGHBOUR)
    return found


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
