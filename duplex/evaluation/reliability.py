"""Reliability of probabilities: accuracy against probability in bins, and the expected calibration error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duplex.evaluation.accumulator import Floats
from duplex.labels import Bools, Ints

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Answers grouped into B bins of equal width by their probability."""

    images: Ints  # [B]
    weight: Floats  # [B] share of the images' weight
    probability: Floats  # [B] mean probability of the answers; NaN in an empty bin
    accuracy: Floats  # [B] share of right answers; NaN in an empty bin

    @classmethod
    def of(cls, probability: Floats, right: Bools, weight: Floats, bins: int = BINS) -> Reliability:
        """Group answers into bins by their probability.

        probability: of each answer [N], from 0 to 1. right: mask of right answers [N].
        weight: weights of the images [N], of any sum.
        """
        place = np.minimum((probability * bins).astype(int), bins - 1)
        share = weight / weight.sum()
        mass = np.bincount(place, share, bins).astype(np.float64)
        with np.errstate(invalid="ignore"):
            probabilities = np.bincount(place, share * probability, bins) / mass
            accuracies = np.bincount(place, share * right, bins) / mass
        return cls(np.bincount(place, minlength=bins), mass, probabilities, accuracies)

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: `sum_b weight_b |accuracy_b - probability_b|`, a fraction."""
        return float(np.nansum(self.weight * np.abs(self.accuracy - self.probability)))


def image_weights(is_seen: Bools, new_share: float) -> Floats:
    """Return weights [N] of images that sum to `new_share` over images of unseen pairs, and to 1 over all images.

    Without images of seen or of unseen pairs, all weights are equal.
    """
    unseen = int((~is_seen).sum())
    if unseen in (0, len(is_seen)):
        return np.full(len(is_seen), 1 / max(1, len(is_seen)))
    return np.where(is_seen, (1 - new_share) / (len(is_seen) - unseen), new_share / unseen)
