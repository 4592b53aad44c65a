"""Operations and waits of training and evaluation, counted on a pretended device."""

from collections import Counter
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.features.tokens import Examples
from duplex.methods.base import Batch
from duplex.methods.duplex import DuplexOptions
from duplex.methods.team import ALONE, Team
from duplex.options import TrainingOptions
from duplex.training.devices import divide
from duplex.training.loop import optimiser_step
from duplex.training.scoring import SplitScorer, score_split
from tests.methods.world import features, small_labels, small_method, small_tower
from tests.pretended import Pretended

LABELS = small_labels()


def method_on(device: str) -> Any:
    method = small_method(DuplexOptions(width=5)).to(device)
    method.paths.prompts.__dict__["tower"] = small_tower.__wrapped__(device=device)
    return method


def examples(split: str, count: int, device: str) -> Examples:
    own = torch.as_tensor(np.resize(LABELS.pairs[split], count))
    return Examples(np.arange(count), {"cls": features(count, 3)}, own).to(torch.device(device))


def test_only_score_statistics_leave_the_device(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy of the top scores per block of images; at the end the labels and the best three."""
    method = method_on(pretended.name)
    test = examples("test", 8, pretended.name)
    field = SplitScorer.of(method, LABELS.candidates("open", "test"))
    pretended.reset()
    monkeypatch.setattr("duplex.training.scoring.BLOCK_SCORES", 2 * LABELS.size)
    score_split(field, test, LABELS, top=3)
    waits = Counter((what, place.split(":")[0]) for what, place in pretended.synchronisations.elements())
    scoring, statistics = "training/scoring.py", "evaluation/accumulate.py"
    assert waits == {
        ("copy to the device", scoring): 1,  # what is added to each candidate's scores
        ("copy to the CPU", scoring): 2,
        ("copy to the CPU", statistics): 4,
    }


def test_a_step_with_other_processes_adds_no_wait_of_the_host(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duplex.methods.team.distributed.all_reduce", lambda values: None)
    chosen = examples("train", 8, pretended.name)
    images = Batch(chosen.inputs, chosen.compositions)
    waits = []
    for team in (ALONE, Team(1, 2)):
        settings = TrainingOptions(0.1, 8, 1, devices=team.size)
        method = method_on(pretended.name).train()
        divide(method, settings, team)
        optimiser = torch.optim.SGD(method.groups(), lr=0.1)
        for _ in range(2):  # the first step makes index tensors
            pretended.reset()
            optimiser_step(method, images, torch.arange(8), settings, optimiser, team)
        waits.append(dict(pretended.synchronisations))
    assert waits[0] == waits[1]


@pytest.mark.parametrize(("k", "bucketed", "kind"), [(1, False, "float32"), (3, True, "float64"), (2, True, "int64")])
def test_statistics_computed_on_the_device_equal_those_on_the_cpu(pretended, k, bucketed, kind) -> None:
    """Blocks cut both ways, with ties, infinite scores, infeasible columns and groups of fewer than `k`."""
    random = np.random.default_rng(k)
    for _ in range(10):
        seen, target = random.random(17) < 0.4, random.integers(0, 17, 9)
        more = {"bucket": random.integers(0, 4, 17), "feasible_mask": random.random(17) < 0.8} if bucketed else {}
        scores = torch.as_tensor(random.integers(-3, 4, (9, 17))).to(getattr(torch, kind))
        if scores.is_floating_point():
            scores[torch.as_tensor(random.random((9, 17)) < 0.1)] = -torch.inf
        here, elsewhere = (ScoreAccumulator(target, seen, k=k, **more) for _ in range(2))
        for rows in (slice(0, 4), slice(4, 9)):
            for first, last in ((0, 6), (6, 17)):
                here.add(scores[rows, first:last], rows, first)
                elsewhere.add(scores[rows, first:last].to(pretended.name), rows, first)
        for a, b in zip(here.cumulative(), elsewhere.cumulative(), strict=True):
            assert all(np.array_equal(getattr(a, part.name), getattr(b, part.name)) for part in fields(a))
