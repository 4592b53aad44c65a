"""Measure accuracy by number of training images, and extrapolate it to twice as many images.

The classifier is in closed form: prototypes computed by least squares from frozen features in seconds, nothing is
trained. Each fit has its own temperature and prior, from validation images, and is measured on test images, with all
labelled pairs as candidates. Training images are drawn at random within every pair, at least one image per pair, so
that seen pairs stay seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duplex.evaluation.accumulator import Floats
from duplex.evaluation.confidence import NEW_SHARE, fit_probabilities
from duplex.evaluation.reliability import image_weights
from duplex.features.examples import Examples
from duplex.labels import Bools, Ints, LabelSpace
from duplex.layers.class_statistics import ClassStatistics
from duplex.layers.factors import unit
from duplex.layers.gaussian_prototypes import ClosedForm

SHARES = (0.25, 0.5, 1.0)
DRAWS = 5  # of each share below 1
BLOCK_SCORES = 1 << 22  # scores in memory at once
FITTED_SCORES = 1 << 22  # of validation images, from which temperature and prior are fitted


@dataclass(frozen=True)
class CurvePoint:
    """Point of a learning curve: the accuracies of several random draws of the same number of training images."""

    images: int  # number of training images
    accuracies: tuple[float, ...]  # percent

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))


@dataclass(frozen=True)
class LearningCurve:
    """Accuracy of a closed-form classifier by number of training images, and an extrapolation to twice as many."""

    points: tuple[CurvePoint, ...]
    slope: float  # beta of `extrapolate`
    doubled: float  # accuracy in percent expected of twice as many images: an extrapolation

    @classmethod
    def of(cls, examples: Mapping[str, Examples], labels: LabelSpace) -> LearningCurve | None:
        """Measure a closed-form classifier's accuracy with a quarter, half and all of the training images.

        None if there are so few images that two of these numbers are equal. `examples`: split -> frozen features.
        """
        train = examples["train"].compositions.numpy()
        points = []
        for share in SHARES:
            draws = [draw_share(train, share, seed) for seed in range(DRAWS if share < 1 else 1)]
            fits = [ClosedFormAnswers.of(examples, labels, rows, "test") for rows in draws]
            points.append(CurvePoint(len(draws[0]), tuple(fit.accuracy for fit in fits)))
        images = [point.images for point in points]
        if len(set(images)) < len(SHARES):
            return None
        return cls(tuple(points), *extrapolate(images, [p.mean for p in points], len(examples["test"])))


def draw_share(compositions: Ints, share: float, seed: int) -> Ints:
    """Draw a random share of the images of every pair, at least one per pair; return their indices, ascending.

    compositions: pair of each image [N].
    """
    generator = np.random.default_rng(seed)
    rows = [
        generator.permutation(members)[: max(1, int(share * len(members) + 0.5))]
        for members in (np.flatnonzero(compositions == pair) for pair in np.unique(compositions))
    ]
    return np.sort(np.concatenate(rows))


def extrapolate(images: list[int], accuracies: list[float], measured: int) -> tuple[float, float]:
    """Fit a power law to a learning curve's errors; return its slope beta, and the accuracy for twice as many images.

        log e(n) = alpha + beta log n,    e = 100 - accuracy, fitted by least squares

    images: number of training images per point of the curve; the last one is doubled.
    accuracies: percent, per point.
    measured: number of test images; e counts as at least half an image.
    """
    error = np.maximum(100 - np.array(accuracies), 50 / measured)
    beta, alpha = np.polyfit(np.log(images), np.log(error), 1)
    return float(beta), 100 - float(min(100.0, np.exp(alpha + beta * np.log(2 * images[-1]))))


@dataclass(frozen=True)
class ClosedFormAnswers:
    """Answers of a closed-form classifier (nothing trained) for the images of one split."""

    model: ClosedForm
    target: Ints  # [N] compositions
    answer: Ints  # [N]
    is_seen: Bools  # [N] whether training shows the label

    @classmethod
    def of(cls, examples: Mapping[str, Examples], labels: LabelSpace, rows: Ints, split: str) -> ClosedFormAnswers:
        """Fit a closed-form classifier to training images, calibrate it on validation images, and classify a split.

        examples: split -> frozen features with compositions.
        rows: indices of the training images to use.
        split: split whose images are answered: `train`, `val` or `test`.
        """
        train, chosen = examples["train"], torch.from_numpy(rows)
        shape = len(labels.states), len(labels.objects)
        statistics = ClassStatistics.of(unit(train.cls[chosen]), train.compositions[chosen], *shape)
        model = ClosedForm.fit(statistics).to(torch.float32)
        candidates = labels.candidates("closed", "train")
        target = examples[split].compositions.numpy()
        place = _best_candidates(model, candidates, examples, split, labels.is_seen(candidates))
        return cls(model, target, candidates[place], labels.is_seen(target))

    @property
    def accuracy(self) -> float:
        """Accuracy in percent, in which images of unseen pairs together have the weight `NEW_SHARE`, 0.1."""
        return 100 * float(image_weights(self.is_seen, NEW_SHARE) @ (self.answer == self.target))


def _best_candidates(
    model: ClosedForm, candidates: Ints, examples: Mapping[str, Examples], split: str, seen: Bools
) -> Ints:
    """Return the position of the most probable candidate for each image of a split [N].

    Temperature and prior of the probabilities are fitted to validation images.
    """
    scorer, val = model.scorer(torch.from_numpy(candidates)), examples["val"]

    def log_p(cls: Tensor) -> Tensor:
        return scorer(unit(cls).float()).log_softmax(1)

    count = min(len(val), max(1, FITTED_SCORES // len(candidates)))
    rows = torch.from_numpy(np.linspace(0, len(val) - 1, count).astype(int))
    label = np.searchsorted(candidates, val.compositions[rows].numpy())
    confidence = fit_probabilities(log_p(val.cls[rows]).double(), label, seen)
    prior: Floats = confidence.log_prior(seen, np.ones_like(seen))
    shift = torch.from_numpy(prior * confidence.temperature).float()  # the argmax of log p / T + prior
    step = max(1, BLOCK_SCORES // len(candidates))
    return np.concatenate([(log_p(part) + shift).argmax(1).numpy() for part in examples[split].cls.split(step)])
