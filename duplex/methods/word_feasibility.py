"""Feasibility of compositions by word vectors, for margins in losses and the open world.

    f(s, o) = 1/2 [max cos(o, o') over o' != o seen with s + max cos(s, s') over s' != s seen with o]

A composition is more feasible if its object is more similar to one seen with its state, and its
state to one seen with its object (CompCos, Mancini et al., CVPR 2021). If there is none, the
maximum counts as -1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from duplex.labels import Ints, LabelSpace

NO_NEIGHBOUR = -1.0
Floats = NDArray[np.float64]


def feasibility(states: ArrayLike, objects: ArrayLike, labels: LabelSpace) -> Floats:
    """Feasibility [M*N] by word vectors of states [M, w] and objects [N, w]; +inf if seen."""
    seen = labels.pairs["train"]
    m, n = labels.state_of(seen), labels.object_of(seen)
    by_n = np.argsort(n, kind="stable")
    by_object = _nearest(_cosines(states)[:, m[by_n]], n[by_n], len(labels.objects))  # [M, N]
    by_state = _nearest(_cosines(objects)[:, n], m, len(labels.states)).T  # [M, N]
    values: Floats = ((by_object + by_state) / 2).ravel()
    values[seen] = np.inf  # a state or object counts as its own neighbour only here
    return values


def _cosines(vectors: ArrayLike) -> Floats:
    rows = np.asarray(vectors, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1.0)
    return np.asarray(unit @ unit.T)


def _nearest(cosines: Floats, partners: Ints, others: int) -> Floats:
    largest = np.full((len(cosines), others), NO_NEIGHBOUR)
    distinct, starts = np.unique(partners, return_index=True)
    nearest = np.maximum.reduceat(cosines, starts, axis=1)  # [A, distinct]
    largest[:, distinct] = np.maximum(nearest, NO_NEIGHBOUR)
    return largest
