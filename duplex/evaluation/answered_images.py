"""Labelled images with a model's answers: accuracies, calibration error and confusion matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from duplex.evaluation.accumulator import Floats
from duplex.evaluation.reliability import Reliability, image_weights
from duplex.labels import Bools, Ints, LabelSpace


@dataclass(frozen=True)
class AnsweredImages:
    """N labelled images, each with the composition that a model finds most probable for it (its answer)."""

    labels: LabelSpace
    rows: Ints  # [N] rows of the manifest
    target: Ints  # [N] label, a composition
    answer: Ints  # [N] the most probable composition
    probability: Floats  # [N] of the answer
    new_share: float = 0.1  # share of images of unseen pairs to expect in use

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def right(self) -> Bools:
        """Mask of the images whose answer is their label [N]."""
        right: Bools = self.answer == self.target
        return right

    @property
    def is_seen(self) -> Bools:
        """Mask of the images whose pair has training images [N]."""
        return self.labels.is_seen(self.target)

    @property
    def accuracy(self) -> float:
        """Accuracy in percent, in which images of unseen pairs together have the weight `new_share`, such as 0.1."""
        return 100 * float(image_weights(self.is_seen, self.new_share) @ self.right)

    @property
    def seen_accuracy(self) -> float:
        """Accuracy in percent on images of pairs with training images; 0 without such images."""
        return 100 * float(self.right[self.is_seen].mean()) if self.is_seen.any() else 0.0

    @property
    def unseen_accuracy(self) -> float:
        """Accuracy in percent on images of pairs without training images; 0 without such images."""
        return 100 * float(self.right[~self.is_seen].mean()) if not self.is_seen.all() else 0.0

    @property
    def reliability(self) -> Reliability:
        """Accuracy of the answers by their probability, for a reliability diagram.

        Images of unseen pairs together have the weight `new_share`, such as 0.1.
        """
        return Reliability.of(self.probability, self.right, image_weights(self.is_seen, self.new_share))

    def accuracies(self, part: Callable[[Ints], Ints]) -> list[LabelAccuracy]:
        """A `LabelAccuracy` per state, object or pair that occurs in the images' labels, in ascending order.

        Args:
            part: function that maps compositions to what is counted: `labels.state_of`, `labels.object_of`, or the
                identity for pairs.
        """
        target, answer = part(self.target), part(self.answer)
        groups = []
        for label in np.unique(target).tolist():
            here = target == label
            counts = [int((here & kind).sum()) for kind in (self.is_seen, ~self.is_seen)]
            right = [int((here & kind & (answer == label)).sum()) for kind in (self.is_seen, ~self.is_seen)]
            wrong, times = np.unique(answer[here & (answer != label)], return_counts=True)
            rival = (int(wrong[times.argmax()]), int(times.max())) if len(wrong) else None
            groups.append(LabelAccuracy(label, (counts[0], counts[1]), (right[0], right[1]), rival))
        return groups

    def matrix(self, part: Callable[[Ints], Ints], size: int) -> Ints:
        """The confusion matrix [size, size] of states or objects: images by label (row) and answer (column).

        Args:
            part: function that maps compositions to states or objects: `labels.state_of` or `labels.object_of`.
        """
        cells = part(self.target) * size + part(self.answer)
        return np.bincount(cells, minlength=size * size).reshape(size, size)


@dataclass(frozen=True)
class LabelAccuracy:
    """Numbers of images and of right answers for one state, object or pair.

    Each is a tuple: (among images of seen pairs, among images of unseen pairs).
    """

    label: int
    images: tuple[int, int]
    right: tuple[int, int]
    rival: tuple[int, int] | None  # most frequent wrong answer and its number of images

    @property
    def percent(self) -> float:
        """Accuracy in percent over all images that are labelled with this state, object or pair."""
        return 100 * sum(self.right) / sum(self.images)

    def percent_of(self, kind: int) -> float | None:
        """The label's accuracy in percent on images of seen (kind 0) or unseen (kind 1) pairs; None if none."""
        return 100 * self.right[kind] / self.images[kind] if self.images[kind] else None
