"""Estimate what more labelled images of the same pairs would bring, by closed forms fitted to parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from duplex.evaluation.accumulate import Floats
from duplex.evaluation.probabilities import fit_probabilities, image_weights
from duplex.features.tokens import Examples
from duplex.labels import Ints, LabelSpace
from duplex.methods.gaussian import ClassStatistics, ClosedForm
from duplex.methods.layers import unit

SHARES = (0.25, 0.5, 1.0)  # of the training images
DRAWS = 5  # of each share below 1
BLOCK_SCORES = 1 << 22  # scores in memory at once, and scores that temperature and prior are fitted to


@dataclass(frozen=True)
class SampleSizeCurve:
    """Test accuracy by number of training images, and the power law that its error follows."""

    accuracies: Mapping[int, Sequence[float]]  # number of training images -> percent, of each draw
    slope: float  # exponent beta of the power law
    doubled: float  # accuracy in percent expected of twice as many images: an extrapolation

    @classmethod
    def of(cls, examples: Mapping[str, Examples], labels: LabelSpace, new_share: float) -> SampleSizeCurve | None:
        """Measure accuracy with a quarter, half and all images; None if two are as many, or all answers right.

        new_share: expected share of images of unseen pairs.
        """
        train = examples["train"].compositions.numpy()
        known = np.flatnonzero(train >= 0)  # rows with both labels
        target = examples["test"].compositions.numpy()
        weights = image_weights(labels.is_seen(target), new_share)
        accuracies = {}
        for share in SHARES:
            seeds = range(DRAWS if share < 1 else 1)
            draws = [known[draw_share(train[known], share, seed)] for seed in seeds]
            right = [closed_form_answers(examples, labels, rows, new_share) == target for rows in draws]
            accuracies[len(draws[0])] = [100 * float(weights @ each) for each in right]
        means = [fmean(each) for each in accuracies.values()]
        if len(accuracies) < len(SHARES) or right[0].all():  # with all images
            return None
        return cls(accuracies, *extrapolate(list(accuracies), means, len(examples["test"])))


def draw_share(compositions: Ints, share: float, seed: int) -> Ints:
    """Draw a random share of each pair's images, at least one; returns indices, ascending."""
    generator = np.random.default_rng(seed)
    rows = []
    for pair in np.unique(compositions):
        members = np.flatnonzero(compositions == pair)
        rows.append(generator.permutation(members)[: max(1, int(share * len(members) + 0.5))])
    return np.sort(np.concatenate(rows))


def extrapolate(images: list[int], accuracies: list[float], measured: int) -> tuple[float, float]:
    """Fit a power law to error by number of images; returns its slope and the doubled accuracy.

    log e(n) = alpha + beta log n,    e = 100 - accuracy, fitted by least squares
    """
    error = np.maximum(100 - np.array(accuracies), 50 / measured)
    beta, alpha = np.polyfit(np.log(images), np.log(error), 1)
    doubled = np.exp(alpha + beta * np.log(2 * images[-1]))
    return float(beta), 100 - float(min(100.0, doubled))


def closed_form_answers(examples: Mapping[str, Examples], labels: LabelSpace, rows: Ints, new_share: float) -> Ints:
    """Answers for test images by a closed form, fitted to the training images `rows`."""
    train = examples["train"]
    val = examples["val"]
    chosen = torch.from_numpy(rows)
    shape = len(labels.states), len(labels.objects)
    statistics = ClassStatistics.of(unit(train.cls[chosen]), train.compositions[chosen], *shape)
    candidates = labels.candidates("closed", "train")
    seen = labels.is_seen(candidates)
    scorer = ClosedForm.fit(statistics).to(torch.float32).scorer(torch.from_numpy(candidates))

    def log_p(cls: Tensor) -> Tensor:
        return scorer(unit(cls).float()).log_softmax(1)

    step = max(1, BLOCK_SCORES // len(candidates))
    judged = torch.from_numpy(np.linspace(0, len(val) - 1, min(len(val), step)).astype(int))
    label = np.searchsorted(candidates, val.compositions[judged].numpy())
    confidence = fit_probabilities(log_p(val.cls[judged]).double(), label, seen, new_share)
    prior: Floats = confidence.log_prior(seen, np.ones_like(seen))
    shift = torch.from_numpy(prior * confidence.temperature).float()  # argmax of log p / T + prior
    best = [(log_p(part) + shift).argmax(1).numpy() for part in examples["test"].cls.split(step)]
    return np.asarray(candidates[np.concatenate(best)])
