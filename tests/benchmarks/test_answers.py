from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.answers import by_share, error_by_chance
from duplex.evaluation.probabilities import Confidence
from duplex.labels import LabelSpace
from duplex.recognition.answers import Candidates

RANDOM = np.random.default_rng(5)
SHARE = RANDOM.random(400)


def by_hand(share: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    total = 0.0
    for number in range(bins):
        inside = [place for place, p in enumerate(share) if min(int(p * bins), bins - 1) == number]
        if inside:
            gap = abs(sum(right[place] for place in inside) - sum(share[place] for place in inside))
            total += gap / len(share)
    return total


def test_the_error_by_chance_is_that_of_right_probabilities():
    other = np.random.default_rng(9)
    expected = np.mean([by_hand(SHARE, other.random(400) < SHARE) for _ in range(100)])
    assert error_by_chance(SHARE, draws=200) == pytest.approx(expected, abs=0.004)
    assert error_by_chance(np.ones(50), draws=3) == 0


def test_the_prior_alone_can_hide_a_model_that_is_right_on_new_pairs():
    labels = LabelSpace.from_pairs({"train": [("red", "star"), ("blue", "moon")], "test": [("red", "moon")]})
    target = labels.index(["red", "red"], ["star", "moon"])
    compositions = np.arange(labels.size)
    candidates = Candidates.of(
        labels, compositions, confidence=Confidence(), world="open",
        scorer=lambda inputs: inputs["cls"], probabilities=lambda scores: scores.softmax(1)
    )  # fmt: skip
    scores = torch.zeros(2, labels.size)
    scores[torch.arange(2), torch.from_numpy(target)] = 1.0  # less than what the prior takes from new pairs
    recognizer: Any = SimpleNamespace(
        labels=labels, worlds=("open",), candidates=lambda world: candidates, scores=lambda images, world: scores
    )
    found = by_share(recognizer, [], target)
    assert found["assumed"] == {"seen": 100.0, "new": 0.0}
    assert found["true"] == found["alone"] == {"seen": 100.0, "new": 100.0}
    assert found["shares"] == {"assumed": 10.0, "true": 50.0}
