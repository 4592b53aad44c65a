"""One run on several devices: processes take the steps of one, and what they cannot divide is refused."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD

from duplex.errors import DuplexError, UsageError
from duplex.features.tokens import Examples
from duplex.methods.base import Batch, Method
from duplex.methods.blocks import finetuned_blocks_factory
from duplex.methods.registry import make_method, parse_options
from duplex.methods.team import ALONE, Team
from duplex.options import FinetuneOptions, TrainingOptions
from duplex.testing import small_batch, small_context
from duplex.training.devices import divide, in_team, require_devices, require_equal
from duplex.training.loop import optimiser_step, train
from tests.methods.test_kinds import TRAINED
from tests.methods.test_with_finetuning import block_batch, finetuning_task, started

FEW = 21  # images of a step; the two batches have 13 and 8
SETTINGS = TrainingOptions(learning_rate=0.1, batch_size=13, epochs=1, accumulate=2, clip=1.0, word_dropout=0.2)


def from_features(kind: str) -> tuple[Method[Any], Batch]:
    context = small_context()  # the first one draws its towers
    torch.manual_seed(0)
    method = make_method(kind, parse_options(kind, {}), context)
    method.eval().start(small_batch(48, 0))
    return method, small_batch(FEW, 3)


def with_blocks(kind: str) -> tuple[Method[Any], Batch]:
    return started(kind), block_batch(FEW, 3)


def with_text_adapters(kind: str) -> tuple[Method[Any], Batch]:
    return started(kind, finetuning_task(text="bottleneck")), block_batch(FEW, 3)


def with_recomputing(kind: str) -> tuple[Method[Any], Batch]:
    method, batch = with_blocks(kind)
    method.checkpointing = True
    return method, batch


def with_pixels(kind: str) -> tuple[Method[Any], Batch]:
    record = {"name": "tiny", "tag": "", "pixels": "true", "precision": "fp32"}
    tuned = finetuned_blocks_factory(record, FinetuneOptions(2, augment=("crop", "flip")), "cpu")
    plain = small_context()
    inputs = {**plain.inputs, "block_inputs": (3, 64, 64)}
    torch.manual_seed(0)
    context = replace(plain, inputs=inputs, finetuned_blocks=tuned)
    method = make_method(kind, parse_options(kind, {}), context)
    pixels = torch.randint(256, (FEW, 3, 64, 64), dtype=torch.uint8)
    labelled = small_batch(FEW, 3)
    images = Batch({**labelled.inputs, "block_inputs": pixels}, labelled.compositions)
    method.eval().start(images)
    return method, images


MAKERS = {
    "features": (from_features, TRAINED),
    "blocks": (with_blocks, ["duplex", "prompts", "closed_form", "troika", "ade"]),
    "text adapters": (with_text_adapters, ["prompts", "duplex"]),
    "augmented pixels": (with_pixels, ["duplex"]),
    "recomputing": (with_recomputing, ["duplex"]),
}
CASES = [(name, kind) for name, (_, kinds) in MAKERS.items() for kind in kinds]
Taken = dict[str, torch.Tensor] | str  # losses and tensors, or why the method was refused


def three_steps(name: str, kind: str, team: Team) -> Taken:
    """The losses of three steps of plain gradient descent and the tensors after them."""
    method, batch = MAKERS[name][0](kind)
    try:
        divide(method, TrainingOptions(0.1, 1, 1, devices=team.size), team)
    except UsageError as error:
        return str(error)
    torch.manual_seed(5)
    method.train()
    optimiser = SGD(method.groups(), lr=SETTINGS.learning_rate)
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        losses = optimiser_step(method, batch, torch.arange(FEW), SETTINGS, optimiser, team)
        found |= {f"loss {step} {term}": value for term, value in losses.items()}
    require_equal(method, team)
    return found | {name: tensor.detach().clone() for name, tensor in method.state_dict().items()}


def every_case(team: Team) -> dict[tuple[str, str], Taken]:
    torch.set_num_threads(1)
    return {case: three_steps(*case, team) for case in CASES}


@pytest.fixture(scope="module")
def together() -> dict[tuple[str, str], Taken]:
    return in_team(every_case, 2, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_processes_take_the_steps_of_one(case: tuple[str, str], together) -> None:
    """Dropout, batch norms, local graphs and prototypes included, whatever the method's losses compare."""
    found = together[case]
    if isinstance(found, str):
        assert case[0] == "features" and "training.devices is 2, but" in found
        return
    alone = three_steps(*case, ALONE)
    assert isinstance(alone, dict) and any(name.startswith("loss") for name in alone)
    assert found.keys() == alone.keys()
    for name, value in found.items():
        allowed = 1e-5 if name.startswith("loss") else 1e-4  # rounding decides where a relu is zero
        torch.testing.assert_close(value, alone[name], atol=allowed, rtol=allowed)


def last_words(team: Team) -> str:
    """End in a process as the test below wants, while the others wait in a step."""
    if team.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    team.add_gradients([with_gradient(1.0)])
    return "not reached"


def with_gradient(value: float) -> torch.Tensor:
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.tensor([value])
    return parameter


def different_numbers(team: Team) -> None:
    method = make_method("prompts", parse_options("prompts", {}), small_context())
    require_equal(method, team)
    torch.rand(1 + team.rank)
    require_equal(method, team)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "message"),
    [
        (last_words, r"a process of training.devices \(2\) was killed by signal 9, .* run the same command again"),
        (different_numbers, "no longer hold the same numbers, .*; set training.devices to 1"),
    ],
)
def test_one_failed_process_ends_all_with_its_reason(work: Callable[[Team], Any], message: str) -> None:
    with pytest.raises(DuplexError, match=message):
        in_team(work, 2, "cpu")


@pytest.mark.parametrize(("total", "size"), [(1, 1), (7, 3), (8, 4), (5, 5), (64, 2)])
def test_parts_are_disjoint_and_cover_all(total: int, size: int) -> None:
    parts = [list(range(total))[Team(rank, size).part(total)] for rank in range(size)]
    assert list(chain(*parts)) == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert Team(0, size).divides(total) == (size > 1) and not Team(0, size).divides(size - 1)


def test_more_devices_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"training.devices is 99999, but .* CPU cores; lower it"):
        require_devices(99999, "cpu")
    with pytest.raises(UsageError, match=r"training.devices is 2, but device is cuda:1; set device to auto"):
        require_devices(2, "cuda:1")
    names = ["H200", "H200", "T4"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5")
    require_devices(2, "cuda")
    with pytest.raises(
        UsageError, match=r"is 4, but torch sees 3 GPU\(s\) \(CUDA_VISIBLE_DEVICES is 0,1,5\); lower it"
    ):
        require_devices(4, "cuda")
    with pytest.raises(UsageError, match="is 3, but GPUs of one kind are needed, and there are H200 and T4; set it to"):
        require_devices(3, "cuda")


def test_what_no_device_could_divide_is_refused() -> None:
    fixed = make_method("closed_form", parse_options("closed_form", {"losses": []}), small_context())
    for method in (fixed, from_features("compcos")[0]):
        with pytest.raises(UsageError, match=r"training.devices is 2, but .* trains neither blocks .* nor prompts"):
            divide(method, SETTINGS.changed({"devices": 2}), Team(0, 2))


def test_a_call_in_one_process_refuses_more_devices() -> None:
    method, batch = from_features("prompts")
    examples = Examples(np.arange(FEW), batch.inputs, batch.compositions)
    with pytest.raises(UsageError, match=r"training.devices is 2, but only `duplex train` .*; set it to 1"):
        train(method, examples, SETTINGS.changed({"devices": 2}), 0, None)
