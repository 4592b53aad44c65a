"""Which compositions are plausible, from word vectors (Mancini et al., 2021; Open-World CZSL).

A state is plausible with an object if it was seen with a similar one:
`f(s, o) = 1/2 [max cos(o, o') over o' != o seen with s + max cos(s, s') over s' != s seen with o]`, -1 for a missing
neighbour. Methods take margins from it, `duplex.evaluation.feasibility` chooses a threshold of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from duplex.errors import DuplexError
from duplex.labels import Ints, LabelSpace

Floats = NDArray[np.float64]
NO_NEIGHBOUR = -1.0
BLOCK = 1 << 20  # compositions made at a time
TABLE = 1 << 12  # primitives of a kind up to which all their cosines are held at once


def feasibility(states: ArrayLike, objects: ArrayLike, labels: LabelSpace) -> Floats:
    """[M*N] from word vectors [M, w] and [N, w]; +inf for seen compositions."""
    return np.concatenate([values for _, values in Feasibility(states, objects, labels).blocks()])


class Feasibility:
    """`f` of all compositions, made by blocks of states: at rest there are the word vectors and the seen pairs."""

    def __init__(self, states: ArrayLike, objects: ArrayLike, labels: LabelSpace) -> None:
        self.labels = labels
        self._states = Cosines(states, len(labels.states), "state")
        self._objects = Cosines(objects, len(labels.objects), "object")
        self._seen = np.asarray(labels.pairs["train"], dtype=np.int64)

    def blocks(self) -> Iterator[tuple[int, Floats]]:
        """The first composition of each block, and its values."""
        step = max(1, BLOCK // len(self.labels.objects))
        m, n = self.labels.state_of(self._seen), self.labels.object_of(self._seen)
        by_n = np.argsort(n, kind="stable")
        for first in range(0, len(self.labels.states), step):
            yield first * len(self.labels.objects), self._block(first, step, m, n, by_n)

    def _block(self, first: int, step: int, m: Ints, n: Ints, by_n: Ints) -> Floats:
        """Of `step` states from `first` on, [S * N]. A primitive is among its own neighbours only where the composition
        is seen, whose number is not read."""
        states, objects = len(self.labels.states), len(self.labels.objects)
        last = min(first + step, states)
        a, b = np.searchsorted(m, [first, last])  # the seen pairs of these states
        by_object = _nearest(self._states.of(slice(first, last))[:, m[by_n]], n[by_n], objects)  # [S, N]
        by_state = _nearest(self._objects.to(n[a:b]), m[a:b] - first, last - first).T  # [S, N]
        found: Floats = ((by_object + by_state) / 2).ravel()
        found[self._seen[a:b] - first * objects] = np.inf
        return found


class Cosines:
    """Of word vectors with each other: a table of few, products of many."""

    def __init__(self, vectors: ArrayLike, count: int, kind: str) -> None:
        rows = np.asarray(vectors, dtype=np.float64)
        if rows.ndim != 2 or len(rows) != count or not np.isfinite(rows).all():
            raise DuplexError(f"{count} {kind}s need a finite word vector each, not an array of shape {rows.shape}")
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        self._rows: Floats = rows / np.where(lengths > 0, lengths, 1.0)
        self._table: Floats | None = self._rows @ self._rows.T if count <= TABLE else None

    def of(self, some: slice) -> Floats:
        """Some of them with all [S, count]."""
        return self._rows[some] @ self._rows.T if self._table is None else self._table[some]

    def to(self, some: Ints) -> Floats:
        """All of them with some [count, S]."""
        return self._rows @ self._rows[some].T if self._table is None else self._table[:, some]


def _nearest(cosines: Floats, there: Ints, others: int) -> Floats:
    """[A, B]: for primitive `a` and other primitive `b`, the largest cosine between `a` and any `a'` seen with `b`.

    `cosines` [A, K] are those of `a` with the `A`-side primitive of each seen composition, `there` [K] their `B`-side
    primitives, rising.
    """
    found = np.full((len(cosines), others), NO_NEIGHBOUR)
    partners, starts = np.unique(there, return_index=True)
    nearest = np.maximum.reduceat(cosines, starts, axis=1)  # [A, partners]
    found[:, partners] = np.maximum(nearest, NO_NEIGHBOUR)
    return found
