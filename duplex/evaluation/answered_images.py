"""Labelled images with a model's answers: accuracies, calibration error, confusion matrices, confused pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from duplex.evaluation.accumulator import Floats
from duplex.evaluation.reliability import Reliability, image_weights
from duplex.evaluation.retrieval import confusions
from duplex.labels import Bools, Ints, LabelSpace


@dataclass(frozen=True)
class AnsweredImages:
    """N labelled images with the most probable answer of a model."""

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
        """Accuracy in percent, with images weighted to the expected share of unseen pairs (`new_share`)."""
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
        """Accuracy against probability, with images weighted to the expected share of unseen pairs (`new_share`)."""
        return Reliability.of(self.probability, self.right, image_weights(self.is_seen, self.new_share))

    def accuracies(self, part: Callable[[Ints], Ints]) -> list[LabelAccuracy]:
        """Return the accuracy of each state, object or pair that occurs among the labels, in ascending order.

        part: function from compositions to labels: `labels.state_of`, `labels.object_of`, or the identity.
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
        """Return the confusion matrix [size, size]: number of images by label (row) and answer (column).

        part: function from compositions to labels, as in `accuracies`. size: number of such labels.
        """
        cells = part(self.target) * size + part(self.answer)
        return np.bincount(cells, minlength=size * size).reshape(size, size)

    def confused(self, limit: int) -> list[Confusion]:
        """Return the most frequent wrong (label, answer) pairs, at most `limit`."""
        pairs, counts = confusions(self.target, self.answer)
        return [
            Confusion(
                label, answer, count, np.flatnonzero((self.target == label) & (self.answer == answer)),
                int((self.target == label).sum()),
            )
            for (label, answer), count in zip(pairs[:limit].tolist(), counts[:limit].tolist(), strict=True)
        ]  # fmt: skip

    def wrong(self, limit: int) -> Ints:
        """Return the positions of wrong answers, the most probable first, at most `limit`."""
        order = np.argsort(-self.probability, kind="stable")
        return order[~self.right[order]][:limit]


@dataclass(frozen=True)
class LabelAccuracy:
    """Numbers of images and of right answers of one state, object or pair: (of seen pairs, of unseen pairs)."""

    label: int
    images: tuple[int, int]
    right: tuple[int, int]
    rival: tuple[int, int] | None  # most frequent wrong answer and its number of images

    @property
    def percent(self) -> float:
        """Accuracy in percent over all images of the label."""
        return 100 * sum(self.right) / sum(self.images)

    def percent_of(self, kind: int) -> float | None:
        """Accuracy in percent over images of seen (0) or unseen (1) pairs; None without any."""
        return 100 * self.right[kind] / self.images[kind] if self.images[kind] else None


@dataclass(frozen=True)
class Confusion:
    """Images of one pair that were answered with another."""

    label: int
    answer: int
    count: int
    places: Ints  # [count] positions among the answered images
    images: int  # of the label
