"""Reliability of probabilities: accuracy against probability in bins, and the expected calibration error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duplex.evaluation.accumulator import Floats
from duplex.labels import Bools, Ints

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """A model's answers in B equally wide bins of their probability, to compare probability with accuracy."""

    images: Ints  # [B]
    weight: Floats  # [B] share of the images' weight
    probability: Floats  # [B] mean probability of the answers; NaN in an empty bin
    accuracy: Floats  # [B] share of right answers; NaN in an empty bin

    @classmethod
    def of(cls, probability: Floats, right: Bools, weight: Floats, bins: int = BINS) -> Reliability:
        """Group answers into bins by their probability.

        Args:
            probability: probability of each answer [N], from 0 to 1.
            right: mask of right answers [N].
            weight: weights of the images [N]; they are scaled to sum to 1.
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
        """Expected calibration error, a fraction: sum of `weight |accuracy - probability|` over bins."""
        return float(np.nansum(self.weight * np.abs(self.accuracy - self.probability)))


def image_weights(is_seen: Bools, new_share: float) -> Floats:
    """Weights [N] that give images of unseen pairs the share `new_share`, assumed to be their share in practice.

    The weights sum to 1, those of unseen pairs to `new_share`. Without images of seen or of unseen pairs, all are
    equal.
    """
    unseen = int((~is_seen).sum())
    if unseen in (0, len(is_seen)):
        return np.full(len(is_seen), 1 / max(1, len(is_seen)))
    return np.where(is_seen, (1 - new_share) / (len(is_seen) - unseen), new_share / unseen)
