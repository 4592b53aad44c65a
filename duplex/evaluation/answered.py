"""Answers for labelled images: accuracy and reliability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from duplex.evaluation.accumulate import Floats
from duplex.evaluation.probabilities import NEW_SHARE, image_weights
from duplex.labels import Bools, Ints, LabelSpace

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Probability against accuracy of answers, sorted by probability into B equal bins."""

    images: Ints  # [B]
    weight: Floats  # [B] share of the images' weight
    probability: Floats  # [B] mean probability of the answers; NaN in an empty bin
    accuracy: Floats  # [B] share of right answers; NaN in an empty bin

    @classmethod
    def of(cls, probability: Floats, right: Bools, weight: Floats) -> Reliability:
        """Sort N answers into bins, given whether each is `right`, and its `weight`."""
        place = np.minimum((probability * BINS).astype(int), BINS - 1)
        share = weight / weight.sum()
        mass = np.bincount(place, share, BINS).astype(np.float64)
        with np.errstate(invalid="ignore"):
            probabilities = np.bincount(place, share * probability, BINS) / mass
            accuracies = np.bincount(place, share * right, BINS) / mass
        return cls(np.bincount(place, minlength=BINS), mass, probabilities, accuracies)

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: sum over bins of `weight * |accuracy - probability|`."""
        return float(np.nansum(self.weight * np.abs(self.accuracy - self.probability)))


@dataclass(frozen=True)
class AnsweredImages:
    """Labelled images, each with the composition that a model finds most probable."""

    labels: LabelSpace
    rows: Ints  # [N] rows of the manifest
    target: Ints  # [N] label, a composition
    answer: Ints  # [N] the most probable composition
    probability: Floats  # [N] of the answer
    new_share: float = NEW_SHARE  # share of images of unseen pairs to expect in use

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def right(self) -> Bools:
        return np.asarray(self.answer == self.target)

    @property
    def is_seen(self) -> Bools:
        return self.labels.is_seen(self.target)

    @property
    def accuracy(self) -> float:
        """Accuracy in percent; all images of unseen pairs together have the weight `new_share`."""
        return 100 * float(image_weights(self.is_seen, self.new_share) @ self.right)

    @property
    def seen_accuracy(self) -> float:
        """Accuracy on images of seen pairs, in percent; 0 without such images."""
        return 100 * float(self.right[self.is_seen].mean()) if self.is_seen.any() else 0.0

    @property
    def unseen_accuracy(self) -> float:
        """Accuracy on images of unseen pairs, in percent; 0 without such images."""
        return 100 * float(self.right[~self.is_seen].mean()) if not self.is_seen.all() else 0.0

    @property
    def reliability(self) -> Reliability:
        return Reliability.of(self.probability, self.right, image_weights(self.is_seen, self.new_share))

    def matrix(self, part: Callable[[Ints], Ints], size: int) -> Ints:
        """Counts by label (row) and answer (column); `part`: compositions -> classes."""
        cells = part(self.target) * size + part(self.answer)
        return np.bincount(cells, minlength=size * size).reshape(size, size)
