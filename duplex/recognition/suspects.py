"""Likely wrong labels: pictures whose label is not what others with other labels would call them.

Each image is scored by prototypes that did not see it: over folds, a class's prototype is the mean of the unit features
of its other folds' images. The margin is the own label's score less the best other label's; the
lower, the more suspicious. `knn` asks the nearest images of other folds instead, which vote by cosine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from duplex.errors import UsageError
from duplex.labels import Ints

Floats = NDArray[np.float64]
Way = Literal["run", "knn"]
FOLDS, NEIGHBOURS, SHARPNESS = 5, 20, 20.0


@dataclass(frozen=True)
class Suspicion:
    """Of every image, how its label stands against others: margins below 0 speak against it."""

    margin: Floats  # [n]
    better: Ints  # [n] the best other class


def margins(features: NDArray[Any], labels: Ints, way: Way, *, folds: int = FOLDS, seed: int = 0) -> Suspicion:
    """Out-of-fold margins of labels `[n]` over unit features `[n, d]`."""
    if len(features) < 2 * folds:
        raise UsageError(f"{len(features)} images are too few to judge labels; it takes at least {2 * folds}")
    classes, own = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise UsageError("all images have one label; there is nothing to tell it from")
    scores = np.full((len(features), len(classes)), -np.inf)
    fold = np.random.default_rng(seed).permutation(len(features)) % folds
    for number in range(folds):
        out, rest = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        score = _by_prototypes if way == "run" else _by_neighbours
        scores[out] = score(features[rest], own[rest], features[out], len(classes))
    every = np.arange(len(features))
    mine = scores[every, own]
    scores[every, own] = -np.inf
    best = scores.argmax(1)
    rival = scores[every, best]
    alone = ~np.isfinite(mine) | ~np.isfinite(rival)  # no other fold has the class, or any other: nothing can be said
    mine, rival = (np.where(alone, 0.0, side) for side in (mine, rival))
    return Suspicion(mine - rival, classes[best])


def _by_prototypes(features: NDArray[Any], own: Ints, asked: NDArray[Any], count: int) -> Floats:
    """Cosines with class means [B, K]; -inf for a class without images."""
    sums, sizes = np.zeros((count, features.shape[1])), np.bincount(own, minlength=count)
    np.add.at(sums, own, features)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(sizes > 0, asked @ (sums / np.maximum(norms, 1e-12)).T, -np.inf)


def _by_neighbours(features: NDArray[Any], own: Ints, asked: NDArray[Any], count: int) -> Floats:
    """Shares of the votes of the nearest images, weighted by `exp(cosine)` [B, K]; -inf for a class without images."""
    votes = np.zeros((len(asked), count))
    k = min(NEIGHBOURS, len(features))
    for start in range(0, len(asked), 1024):
        cosines = asked[start : start + 1024] @ features.T
        near = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
        weights = np.exp(SHARPNESS * np.take_along_axis(cosines, near, 1))
        rows = np.repeat(np.arange(len(cosines)), k)
        np.add.at(votes, (start + rows, own[near].ravel()), weights.ravel())
    return np.where(np.bincount(own, minlength=count) > 0, votes / votes.sum(1, keepdims=True), -np.inf)
