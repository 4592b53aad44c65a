"""Find likely wrong labels by margins: the score of an image's label minus that of the best other label.

The lower the margin, the more suspicious the label. Images are divided into folds, so that an image is not scored by
itself: its score for a label is the cosine with the label's prototype, the mean of the unit features of the label's
images in the other folds. `knn` replaces prototypes by votes of the nearest images of other folds, weighted by cosine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from duplex.errors import UsageError
from duplex.evaluation.retrieval import most_similar
from duplex.labels import Ints

Floats = NDArray[np.float64]
Way = Literal["run", "knn"]
FOLDS, NEIGHBOURS, SHARPNESS = 5, 20, 20.0


@dataclass(frozen=True)
class LabelMargins:
    """For n images: the best other label, and the margin: score of the image's label minus that of the other."""

    margin: Floats  # [n]
    better: Ints  # [n] the best other class


def margins(features: NDArray[Any], labels: Ints, way: Way, *, folds: int = FOLDS, seed: int = 0) -> LabelMargins:
    """The best other label per image, and how much higher the image's label scores; 0 if the other folds lack it.

    features: unit features of the images [n, d].
    labels: class of each image [n].
    way: "run" compares images with prototypes of the classes, "knn" with their nearest images.
    folds: number of parts that the images are divided into at random.
    """
    if len(features) < 2 * folds:
        raise UsageError(f"{len(features)} images are too few to check labels; expected at least {2 * folds}")
    classes, label = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise UsageError("all images have one label; expected at least two labels")
    scores = np.full((len(features), len(classes)), -np.inf)
    fold = np.random.default_rng(seed).permutation(len(features)) % folds
    score = _by_prototypes if way == "run" else _by_neighbours
    for number in range(folds):
        out = np.flatnonzero(fold == number)
        rest = np.flatnonzero(fold != number)
        scores[out] = score(features[rest], label[rest], features[out], len(classes))
    rows = np.arange(len(features))
    own = scores[rows, label]
    scores[rows, label] = -np.inf
    best = scores.argmax(1)
    other = scores[rows, best]
    undecided = ~np.isfinite(own) | ~np.isfinite(other)  # the other folds lack the class, or have no other class
    margin = np.where(undecided, 0.0, own) - np.where(undecided, 0.0, other)
    return LabelMargins(margin, classes[best])


def _by_prototypes(features: NDArray[Any], labels: Ints, queries: NDArray[Any], count: int) -> Floats:
    """Cosine [B, K] of each query with the mean of each of K classes; -inf for a class without images."""
    sums = np.zeros((count, features.shape[1]))
    sizes = np.bincount(labels, minlength=count)
    np.add.at(sums, labels, features)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(sizes > 0, queries @ (sums / np.maximum(norms, 1e-12)).T, -np.inf)


def _by_neighbours(features: NDArray[Any], labels: Ints, queries: NDArray[Any], count: int) -> Floats:
    """Share [B, K] of the votes of the 20 nearest images, weighted by `exp(20 cosine)`; -inf for an absent class."""
    near, cosines = most_similar(queries, features, NEIGHBOURS)
    votes = np.zeros((len(queries), count))
    rows = np.repeat(np.arange(len(queries)), near.shape[1])
    np.add.at(votes, (rows, labels[near].ravel()), np.exp(SHARPNESS * cosines).ravel())
    return np.where(np.bincount(labels, minlength=count) > 0, votes / votes.sum(1, keepdims=True), -np.inf)
