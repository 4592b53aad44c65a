"""Accuracy and calibration error of the most probable answers, as recognition lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from duplex.evaluation.accumulator import Floats
from duplex.evaluation.reliability import Reliability, image_weights
from duplex.features.examples import Examples
from duplex.labels import Bools, Ints, LabelSpace, World
from duplex.methods.base import Method
from duplex.recognition.candidates import Candidates
from duplex.training.confidence import Confidence
from duplex.training.scoring import ScoringTask


@dataclass(frozen=True)
class ListedAnswers:
    """The most probable answer of each of N images."""

    target: Ints  # [N] label, a composition
    answer: Ints  # [N] composition
    probability: Floats  # [N] of the answer
    is_seen: Bools  # [N] whether training showed the image's pair
    new_share: float  # expected share of images of unseen pairs

    @property
    def right(self) -> Bools:
        """Whether each answer is the label [N]."""
        right: Bools = self.answer == self.target
        return right

    @property
    def seen(self) -> float:
        """Accuracy in percent on images of pairs that training showed; 0 without any."""
        return 100 * float(self.right[self.is_seen].mean()) if self.is_seen.any() else 0.0

    @property
    def unseen(self) -> float:
        """Accuracy in percent on images of pairs that training never showed; 0 without any."""
        return 100 * float(self.right[~self.is_seen].mean()) if not self.is_seen.all() else 0.0

    @property
    def expected(self) -> float:
        """Accuracy in percent where images have the expected share of unseen pairs."""
        return (1 - self.new_share) * self.seen + self.new_share * self.unseen

    @property
    def calibration_error(self) -> float:
        """Expected calibration error in percent: the mean distance of accuracy and probability over 15 bins, where
        images are weighted to the expected share of unseen pairs."""
        weight = image_weights(self.is_seen, self.new_share)
        return 100 * Reliability.of(self.probability, self.right, weight).calibration_error


@torch.no_grad()
def listed_answers(
    method: Method[Any], examples: Examples, labels: LabelSpace, confidence: Confidence, world: World
) -> ListedAnswers:
    """Return the most probable answers of images among all pairs (open) or the labelled ones (closed)."""
    compositions = labels.candidates(world, "train")
    task = ScoringTask.of(method, compositions)
    feasible = np.ones(len(compositions), dtype=bool)
    candidates = Candidates.of(labels, compositions, feasible, confidence, task.scorer, None, method.probabilities)
    answers, shares = [], []
    for _, scores in task.blocks(examples.inputs):
        share, best = candidates.log_posteriors(scores).exp().max(1)
        answers.append(best.cpu().numpy())
        shares.append(share.cpu().numpy())
    target = examples.compositions.cpu().numpy()
    answer = compositions[np.concatenate(answers)]
    return ListedAnswers(target, answer, np.concatenate(shares), labels.is_seen(target), confidence.new_share)
