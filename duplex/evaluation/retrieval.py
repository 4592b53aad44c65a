"""Nearest neighbours by cosine, with NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from duplex.evaluation.accumulate import Floats
from duplex.labels import Ints

BLOCK = 1 << 22  # similarities in memory at once: 32 MiB
Vectors = NDArray[np.floating]


def unit(vectors: Vectors) -> Floats:
    """`vectors` with rows scaled to unit length; rows of zeros stay zero."""
    wide = np.asarray(vectors, dtype=np.float64)
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.asarray(np.divide(wide, length, out=np.zeros_like(wide), where=length > 0))


def nearest(queries: Vectors, gallery: Vectors, k: int) -> tuple[Ints, Floats]:
    """Rows of the k vectors in `gallery` [N, d] nearest to each query [Q, d], and their cosines, both [Q, min(k, N)].

    The largest cosine comes first; of equal cosines, the one with the lower row number.
    """
    return most_similar(unit(queries), unit(gallery), k)


def most_similar(queries: Vectors, gallery: Vectors, k: int) -> tuple[Ints, Floats]:
    """Like `nearest`, for vectors that already have unit length; cosines have the precision of the vectors."""
    k = min(k, len(gallery))
    nearest_rows = np.empty((len(queries), k), dtype=np.int64)
    cosines = np.empty((len(queries), k), np.result_type(queries, gallery))
    step = max(1, BLOCK // max(1, len(gallery)))
    for start in range(0, len(queries), step):
        block = slice(start, start + step)
        similar = queries[block] @ gallery.T  # [b, N]
        nearest_rows[block] = _largest(similar, k)
        cosines[block] = np.take_along_axis(similar, nearest_rows[block], axis=1)
    return nearest_rows, cosines


def _largest(similar: Floats, k: int) -> Ints:
    if not k:
        return np.empty((len(similar), 0), dtype=np.int64)
    last = np.partition(similar, -k, axis=1)[:, -k, None]
    above, equal = similar > last, similar == last
    room = k - above.sum(axis=1, keepdims=True)
    chosen = above | (equal & (np.cumsum(equal, axis=1) <= room))
    columns = np.nonzero(chosen)[1].reshape(len(similar), k)
    order = np.argsort(-np.take_along_axis(similar, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)


def precision(rows: Ints, labels: Ints, wanted: Ints) -> float:
    """Share of the retrieved items `rows` [Q, k] whose label equals the query's, `wanted` [Q]; NaN without items."""
    return float((labels[rows] == wanted[:, None]).mean()) if rows.size else float("nan")
