"""Answers for labelled images, at any share of new pairs: accuracy and reliability.

The prior share r of unseen pairs multiplies all probabilities of a group, so it does not change the
order of the seen compositions, nor that of the unseen ones:

    q_r(c|x) = w q(c|x) / ((1 - r)(1 - q(x)) + r q(x)),    w = r if c is unseen, 1 - r if it is seen

`q(c|x)` are the probabilities at r = 1/2, and `q(x)` is their sum over unseen compositions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from duplex.evaluation.accumulate import Floats
from duplex.evaluation.new_share import NewShare, estimate_share
from duplex.evaluation.probabilities import NEW_SHARE, UnseenMass, image_weights
from duplex.labels import Bools, Ints, LabelSpace

BINS = 15
SHARES = tuple(percent / 100 for percent in range(10, 91))  # of new pairs, from which the balanced one is chosen


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
    def harmonic_mean(self) -> float:
        """Harmonic mean of the accuracies on seen and on unseen pairs, in percent."""
        total = self.seen_accuracy + self.unseen_accuracy
        return 2 * self.seen_accuracy * self.unseen_accuracy / total if total else 0.0

    def accuracies(self) -> dict[str, float]:
        """`new_share`, and accuracy in percent: at this share, on seen, and on unseen pairs."""
        return {
            "new_share": self.new_share,
            "accuracy": self.accuracy,
            "accuracy_seen": self.seen_accuracy,
            "accuracy_unseen": self.unseen_accuracy,
        }

    @property
    def reliability(self) -> Reliability:
        return Reliability.of(self.probability, self.right, image_weights(self.is_seen, self.new_share))

    def matrix(self, part: Callable[[Ints], Ints], size: int) -> Ints:
        """Counts by label (row) and answer (column); `part`: compositions -> classes."""
        cells = part(self.target) * size + part(self.answer)
        return np.bincount(cells, minlength=size * size).reshape(size, size)


def group_weights(new_share: float, unseen: Floats) -> Floats:
    """Factors [N, 2] from probabilities at r = 1/2 to those at `new_share`: of seen and of unseen compositions.

    unseen: [N] probability q(x) of all unseen compositions.
    """
    weights = np.array([1 - new_share, new_share])
    total = (1 - new_share) * (1 - unseen) + new_share * unseen
    return np.asarray(weights / total[:, None])


@dataclass(frozen=True)
class GroupAnswers:
    """Labelled images, each with its most probable seen and its most probable unseen composition."""

    labels: LabelSpace
    rows: Ints  # [N] rows of the manifest
    target: Ints  # [N] label, a composition
    best: Ints  # [N, 2] most probable seen and unseen composition
    probability: Floats  # [N, 2] their q(c|x); 0 without candidates of a group
    unseen: Floats  # [N] q(x)
    stored: float = NEW_SHARE  # the model's share of new pairs
    mass: UnseenMass | None = None  # for an estimate of the share

    def at(self, new_share: float) -> AnsweredImages:
        """The answers at a share of new pairs."""
        probability = self.probability * group_weights(new_share, self.unseen)
        group = probability.argmax(1)
        image = np.arange(len(group))
        answer = self.best[image, group]
        return AnsweredImages(self.labels, self.rows, self.target, answer, probability[image, group], new_share)

    @property
    def estimated(self) -> NewShare:
        """The share of new pairs among the images, estimated without their labels."""
        return estimate_share(self.unseen, None if self.mass is None else asdict(self.mass), self.stored)

    @property
    def balanced_share(self) -> float:
        """The share at which the harmonic mean of the accuracies on seen and on unseen pairs is highest.

        Of several, the middle one.
        """
        means = [self.at(share).harmonic_mean for share in SHARES]
        best = [share for share, mean in zip(SHARES, means, strict=True) if mean == max(means)]
        return best[len(best) // 2]

    @property
    def true_share(self) -> float:
        """The share of new pairs among the images, by their labels."""
        return float((~self.labels.is_seen(self.target)).mean())

    def by_share(self) -> dict[str, dict[str, float]]:
        """Accuracy in percent at the `stored`, the `estimated` and the `true` share of new pairs.

        At the estimated share, it is the accuracy over these images, and `error` is the share's
        standard error. Left out are a share that cannot be estimated, and a true share of 0 or 1.
        """
        table = {"stored": self.at(self.stored).accuracies()}
        estimate = self.estimated
        if estimate.error is not None:
            answers = self.at(estimate.value)
            over_all = {"accuracy": 100 * float(answers.right.mean()), "error": estimate.error}
            table["estimated"] = answers.accuracies() | over_all
        if 0 < self.true_share < 1:
            table["true"] = self.at(self.true_share).accuracies()
        return table
