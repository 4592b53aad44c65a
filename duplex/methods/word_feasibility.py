"""Feasibility of compositions by word vectors, which serves margins in losses and open-world evaluation.

    f(s, o) = 1/2 [max cos(o, o') over o' != o seen with s + max cos(s, s') over s' != s seen with o]

A state is feasible with an object if it was seen with a similar one (CompCos, Mancini et al., CVPR 2021); a missing
neighbour counts -1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from duplex.errors import DuplexError
from duplex.labels import Ints, LabelSpace

NO_NEIGHBOUR = -1.0
BLOCK = 1 << 20  # compositions whose feasibility is computed at a time
TABLE = 1 << 12  # states (or objects) up to which the table of all their cosines is stored
Floats = NDArray[np.float64]


def feasibility(states: ArrayLike, objects: ArrayLike, labels: LabelSpace) -> Floats:
    """Feasibility of all compositions [M*N] by word vectors of states [M, w] and objects [N, w]; +inf for seen ones."""
    return np.concatenate([values for _, values in Feasibility(states, objects, labels).blocks()])


class Feasibility:
    """Computes the feasibility of all compositions a block of states at a time, without storing it."""

    def __init__(self, states: ArrayLike, objects: ArrayLike, labels: LabelSpace) -> None:
        self.labels = labels
        self._states = Cosines(states, len(labels.states), "state")
        self._objects = Cosines(objects, len(labels.objects), "object")
        self._seen = np.asarray(labels.pairs["train"], dtype=np.int64)

    def blocks(self) -> Iterator[tuple[int, Floats]]:
        """Yield, for each block of states, its first composition's index and the feasibility of its compositions."""
        step = max(1, BLOCK // len(self.labels.objects))  # states
        m, n = self.labels.state_of(self._seen), self.labels.object_of(self._seen)
        by_n = np.argsort(n, kind="stable")
        states, objects = len(self.labels.states), len(self.labels.objects)
        for first in range(0, states, step):
            last = min(first + step, states)
            a, b = np.searchsorted(m, [first, last])  # the seen pairs of these states
            by_object = _nearest(self._states.from_words(slice(first, last))[:, m[by_n]], n[by_n], objects)  # [S, N]
            by_state = _nearest(self._objects.to_words(n[a:b]), m[a:b] - first, last - first).T  # [S, N]
            values: Floats = ((by_object + by_state) / 2).ravel()
            # a state or object counts as its own neighbour only in seen compositions, whose values are overwritten
            values[self._seen[a:b] - first * objects] = np.inf
            yield first * objects, values


class Cosines:
    """Cosines between the word vectors of all states, or of all objects; stored as a table if there are few words."""

    def __init__(self, vectors: ArrayLike, count: int, kind: str) -> None:
        rows = np.asarray(vectors, dtype=np.float64)
        if rows.ndim != 2 or len(rows) != count or not np.isfinite(rows).all():
            raise DuplexError(f"word vectors of {kind}s have shape {rows.shape}; expected {count} finite rows")
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        self._rows: Floats = rows / np.where(lengths > 0, lengths, 1.0)
        self._table: Floats | None = self._rows @ self._rows.T if count <= TABLE else None

    def from_words(self, some: slice) -> Floats:
        """Cosines of the words in the slice `some` with all words [S, count]."""
        return self._rows[some] @ self._rows.T if self._table is None else self._table[some]

    def to_words(self, some: Ints) -> Floats:
        """Cosines of all words with the words at the indices `some` [count, S]."""
        return self._rows @ self._rows[some].T if self._table is None else self._table[:, some]


def _nearest(cosines: Floats, partners: Ints, others: int) -> Floats:
    largest = np.full((len(cosines), others), NO_NEIGHBOUR)
    distinct, starts = np.unique(partners, return_index=True)
    nearest = np.maximum.reduceat(cosines, starts, axis=1)  # [A, distinct]
    largest[:, distinct] = np.maximum(nearest, NO_NEIGHBOUR)
    return largest
