"""Which compositions are plausible, from word vectors (Mancini et al., 2021; Open-World CZSL).

A state is plausible with an object if it was seen with a similar one:
`f(s, o) = 1/2 [max cos(o, o') over o' != o seen with s + max cos(s, s') over s' != s seen with o]`, -1 for a missing
neighbour. Methods take margins from it, `duplex.evaluation.feasibility` chooses a threshold of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from duplex.errors import DuplexError
from duplex.labels import Ints, LabelSpace

Floats = NDArray[np.float64]
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
    """[count, count]"""
    rows = np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2 or len(rows) != count or not np.isfinite(rows).all():
        raise DuplexError(f"{count} {kind}s need a finite word vector each, not an array of shape {rows.shape}")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows / np.where(lengths > 0, lengths, 1.0)
    cosines: Floats = rows @ rows.T
    return cosines


def _nearest(cosines: Floats, here: Ints, there: Ints, others: int) -> Floats:
    """[A, B]: for primitive `a` and other primitive `b`, the largest cosine between `a` and any `a'` seen with `b`.

    `here`, `there`: the `A`-side and `B`-side primitive of each seen composition. `a` itself is among them only where
    `(a, b)` is seen, whose number nobody reads.
    """
    found = np.full((len(cosines), others), NO_NEIGHBOUR)
    order = np.argsort(there, kind="stable")
    partners, starts = np.unique(there[order], return_index=True)
    nearest = np.maximum.reduceat(cosines[:, here[order]], starts, axis=1)  # [A, partners]
    found[:, partners] = np.maximum(nearest, NO_NEIGHBOUR)
    return found
