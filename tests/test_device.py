"""What a training step and an evaluation ask of a device: counts, on a pretended one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from duplex.assessment import Field, assess
from duplex.features.examples import Examples
from duplex.methods.base import Batch
from duplex.methods.duplex import DuplexOptions
from duplex.methods.prompts import PromptOptions
from duplex.options import Options, TrainingOptions
from duplex.training import make_optimiser, optimiser_step, train
from tests.methods.world import features, small_labels, small_method, small_tower
from tests.pretended import Pretended

SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=4, accumulate=2, epochs=1)
LABELS = small_labels()
ROWS = [
    DuplexOptions(width=5),
    DuplexOptions(width=5, refine_over="open", nodes="label", weighing="by_kind", blend="anchored"),
    DuplexOptions(width=5, unseen_rows="random", seen_rows="random", fusion="additive"),
    DuplexOptions(width=5, codebook="trainable"),
    DuplexOptions(width=5, graph=False, unseen_rows="empty"),
    PromptOptions(width=5),
]


def there(options: Options, device: str) -> Any:
    """A small method and its text tower on a device."""
    method = small_method(options).to(device)
    method.paths.prompts._tower[0] = small_tower.__wrapped__(device=device)
    return method


def examples(split: str, count: int, device: str) -> Examples:
    own = torch.as_tensor(np.resize(LABELS.pairs[split], count))
    return Examples(np.arange(count), {"cls": features(count, 3)}, own).to(torch.device(device))


@pytest.mark.parametrize("options", ROWS, ids=["duplex", "labels", "random", "trainable", "empty", "prompts"])
def test_nothing_in_a_step_waits_for_the_device(pretended: Pretended, options: Options) -> None:
    method = there(options, pretended.name)
    found = examples("train", 16, pretended.name)
    images = Batch(found.inputs, found.compositions, found.compositions.cpu().numpy())
    optimiser = make_optimiser(method, SETTINGS)
    for rows in (torch.arange(8), torch.arange(8, 16)):  # the first makes what lasts, such as the optimiser's moments
        pretended.reset()
        optimiser_step(method, images, rows, SETTINGS, optimiser)
    assert pretended.synchronisations == {}


def test_losses_are_read_once_every_few_steps(pretended: Pretended) -> None:
    method, waits = there(DuplexOptions(width=5), pretended.name), []

    def validate(_: object) -> float:
        waits.append(sum(n for (_, place), n in pretended.synchronisations.items() if "training.py" in place))
        return 0.5

    settings = TrainingOptions(learning_rate=0.01, batch_size=4, epochs=2)
    train(method, examples("train", 80, pretended.name), settings, 0, validate)  # 20 steps an epoch
    tensors = len(method.state_dict())  # each is looked at once an epoch
    assert [after - before for before, after in zip(waits, waits[1:], strict=False)] == [3 + tensors] * 2


def test_only_evidence_leaves_the_device(pretended: Pretended) -> None:
    """However many columns: for each block of images, what its groups keep, and no score beside it."""
    method = there(DuplexOptions(width=5), pretended.name)
    test = examples("test", 8, pretended.name)
    field = Field.of(method, LABELS.target("open", "test"))
    pretended.reset()
    assess(field, test, LABELS, top=3)
    assert pretended.synchronisations == Counter()
