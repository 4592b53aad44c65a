"""Looking things up by cosine, and what predictions confuse: arrays in, arrays out.

The paper's image-to-composition, prototype-to-image and feature-swapping retrieval are questions to `nearest`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from duplex.errors import UsageError
from duplex.evaluation.accumulator import Floats
from duplex.labels import Bools, Ints

BLOCK = 1 << 22  # similarities held at once: 32 MiB
Vectors = NDArray[np.floating]


def unit(vectors: Vectors) -> Floats:
    """Rows of length one; a row of zeros stays."""
    wide = np.asarray(vectors, dtype=np.float64)
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    found: Floats = np.divide(wide, length, out=np.zeros_like(wide), where=length > 0)
    return found


def nearest(queries: Vectors, gallery: Vectors, k: int, allowed: Bools | None = None) -> tuple[Ints, Floats]:
    """Rows [Q, k] of `gallery` [N, d] by falling cosine to each of `queries` [Q, d], and the cosines; of equal ones the
    lower row comes first. `allowed` [N] leaves rows out; `k` is cut to what is left."""
    if queries.ndim != 2 or gallery.ndim != 2 or queries.shape[1] != gallery.shape[1]:
        raise UsageError(f"queries {queries.shape} and gallery {gallery.shape} must be rows of one width")
    rows = np.arange(len(gallery)) if allowed is None else np.flatnonzero(allowed)
    k = min(k, rows.size)
    asked, among = unit(queries), unit(gallery[rows])
    found, cosines = np.empty((len(asked), k), dtype=np.int64), np.empty((len(asked), k))
    step = max(1, BLOCK // max(1, rows.size))
    for start in range(0, len(asked), step):
        block = slice(start, start + step)
        similar = asked[block] @ among.T  # [b, N]
        order = _first(similar, k)
        found[block], cosines[block] = rows[order], np.take_along_axis(similar, order, axis=1)
    return found, cosines


def _first(similar: Floats, k: int) -> Ints:
    """[b, k] columns of the k largest values, ties by column: those above the k-th value, then its equals in order."""
    if not k:
        return np.empty((len(similar), 0), dtype=np.int64)
    last = np.partition(similar, -k, axis=1)[:, -k, None]
    above, equal = similar > last, similar == last
    room = k - above.sum(axis=1, keepdims=True)
    kept = above | (equal & (np.cumsum(equal, axis=1) <= room))
    columns = np.nonzero(kept)[1].reshape(len(similar), k)
    order = np.argsort(-np.take_along_axis(similar, columns, axis=1), axis=1, kind="stable")
    picked: Ints = np.take_along_axis(columns, order, axis=1)
    return picked


def precision(found: Ints, labels: Ints, wanted: Ints) -> float:
    """Share of retrieved rows [Q, k] whose label [N] is the one wanted [Q]."""
    return float((labels[found] == wanted[:, None]).mean()) if found.size else float("nan")


def confusions(label: Ints, predicted: Ints) -> tuple[Ints, Ints]:
    """Distinct wrong pairs [P, 2] of label and prediction with their counts [P], most frequent first."""
    wrong = np.stack([label, predicted], axis=1)[label != predicted]
    pairs, counts = np.unique(wrong.reshape(-1, 2), axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return pairs[order], counts[order]


def accuracy_by_label(label: Ints, right: Bools) -> tuple[Ints, Ints, Floats]:
    """Distinct labels [L], their images [L] and the share of them that is right [L], best first, then by images."""
    names, place, images = np.unique(label, return_inverse=True, return_counts=True)
    share = np.bincount(place, weights=right, minlength=names.size) / images
    order = np.lexsort((names, -images, -share))
    return names[order], images[order], share[order]
