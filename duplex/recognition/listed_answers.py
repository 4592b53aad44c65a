"""Answers for labelled images, to measure accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from duplex.evaluation.answered_images import AnsweredImages
from duplex.evaluation.confidence import Confidence
from duplex.features.examples import Examples
from duplex.labels import LabelSpace, World
from duplex.methods.base import Method
from duplex.recognition.candidates import Candidates
from duplex.training.scoring import ScoringTask


@torch.no_grad()
def listed_answers(
    method: Method[Any], examples: Examples, labels: LabelSpace, confidence: Confidence, world: World
) -> AnsweredImages:
    """The most probable composition of each labelled image, with its probability and the image's label."""
    compositions = labels.candidates(world, "train")
    task = ScoringTask.of(method, compositions)
    feasible = np.ones(len(compositions), dtype=bool)
    candidates = Candidates.of(labels, compositions, feasible, confidence, task.scorer, None, method.probabilities)
    answers = []
    shares = []
    for _, scores in task.blocks(examples.inputs):
        share, best = candidates.log_posteriors(scores).exp().max(1)
        answers.append(best.cpu().numpy())
        shares.append(share.cpu().numpy())
    target = examples.compositions.cpu().numpy()
    answer = compositions[np.concatenate(answers)]
    return AnsweredImages(labels, examples.rows, target, answer, np.concatenate(shares), confidence.new_share)
