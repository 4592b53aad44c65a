"""Fine-tuning: every kind behaves like that kind over the features that the blocks compute."""

from dataclasses import replace
from functools import cache, partialmethod
from inspect import isfunction
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from duplex.encoders.base import load_encoder
from duplex.encoders.image_blocks import capture_block_input
from duplex.errors import UsageError
from duplex.methods.base import Batch, Method, MethodContext
from duplex.methods.blocks import finetuned_blocks_factory
from duplex.methods.finetuned import WithFinetuning
from duplex.methods.prompt_method import PromptMethod, PromptOptions
from duplex.methods.registry import make_method, parse_options
from duplex.options import FinetuneOptions, TrainingOptions
from duplex.testing import small_batch, small_context
from duplex.training.loop import make_optimiser, optimiser_step
from tests.methods.test_kinds import TRAINED

SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=16, epochs=3)
ROW = (224, 4, 4)


@cache
def finetuning_task(adapter: Any = "bottleneck", **options: Any) -> MethodContext:
    record = {"name": "tiny", "tag": "", "block_inputs": "1", "precision": "fp32"}
    tail = finetuned_blocks_factory(record, FinetuneOptions(1, adapter, **options), "cpu")  # type: ignore[arg-type]
    plain = small_context()
    return replace(plain, inputs={**plain.inputs, "block_inputs": ROW}, finetuned_blocks=tail)


def block_batch(count: int = 48, seed: int = 0) -> Batch:
    """Images with block inputs: one feature map per composition, with noise."""
    plain, random = small_batch(count, seed), torch.Generator().manual_seed(seed + 7)
    own = torch.rand(12, *ROW, generator=torch.Generator().manual_seed(1))
    deep = own[plain.compositions] + 0.1 * torch.rand(count, *ROW, generator=random)
    return Batch({**plain.inputs, "block_inputs": deep.half()}, plain.compositions)


def started(
    kind: str = "prompts", context: MethodContext | None = None, random_blocks: bool = True, **options: Any
) -> Any:
    context = context or finetuning_task()
    torch.manual_seed(0)
    method = make_method(kind, parse_options(kind, options), context)
    assert isinstance(method, WithFinetuning)
    if random_blocks:
        with torch.no_grad():
            for weight in method.blocks.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
    method.eval()
    method.start(block_batch())
    return method


def with_features(method: WithFinetuning, batch: Batch) -> Batch:
    """The batch with the features that the blocks compute."""
    return Batch({**batch.inputs, **method.blocks.method_inputs(batch.inputs["block_inputs"])}, batch.compositions)


@pytest.mark.parametrize("kind", TRAINED)
def test_every_kind_scores_and_trains_on_features_of_the_blocks(kind: str) -> None:
    method, batch = started(kind), block_batch(24, seed=3)
    columns = method.labels.candidates("open", "test")
    with torch.no_grad():
        own = with_features(method, batch)
        assert not torch.allclose(own.cls, batch.cls, atol=1e-2)
        torch.testing.assert_close(
            method.scorer(columns)(batch.inputs), method.method.scorer(columns)(own.inputs), atol=1e-6, rtol=1e-5
        )
        for name in ("features", "text_space_features"):
            shown = getattr(method.inspectable(), name)
            if shown is not None:
                torch.testing.assert_close(shown(batch.inputs), getattr(method.method.inspectable(), name)(own.inputs))
    torch.manual_seed(5)
    found = torch.stack(list(method.losses(batch, method.shared()).values())).sum()
    found.backward()
    through = [parameter.grad.clone() for parameter in method.blocks.parameters()]
    method.zero_grad()
    torch.manual_seed(5)
    twin = torch.stack(list(method.method.losses(with_features(method, batch), method.method.shared()).values())).sum()
    twin.backward()
    torch.testing.assert_close(found, twin)
    assert any(grad.abs().max() > 0 for grad in through)
    for grad, parameter in zip(through, method.blocks.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["troika", "ade"])
def test_patch_tokens_of_the_tuned_blocks_reach_the_method(kind: str) -> None:
    tuned, tower = finetuning_task("full", tokens=True), load_encoder("tiny", towers="image")
    images = tower.image_transform(Image.new("RGB", (60, 60), "red"))[None]
    tuned = replace(tuned, inputs={**tuned.inputs, "patch": tower.patch_shape})
    method, batch = started(kind, tuned), block_batch(24, seed=3)
    with capture_block_input(tower, 1) as inputs:
        patches = tower.encode_patches(images)[1]
    frozen = tuned.finetuned_blocks().method_inputs(inputs[0].clone())
    torch.testing.assert_close(frozen["patch"], patches, atol=1e-5, rtol=0)
    tokens = []
    for x in batch.inputs["block_inputs"].float():
        cells = method.blocks._blocks[-1](x[None])[0]
        tokens.append(torch.stack([cells[:, row, column] for row in range(2) for column in range(2)]))
    own = Batch({"cls": method.blocks(batch.inputs["block_inputs"]), "patch": torch.stack(tokens)}, batch.compositions)
    weights = list(method.blocks.parameters())
    found, wanted = method.losses(batch, method.shared()), method.method.losses(own, method.shared())
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    slopes = [torch.autograd.grad(sum(each.values()), weights) for each in (found, wanted)]
    torch.testing.assert_close(*slopes, atol=1e-5, rtol=1e-3)
    columns = method.labels.candidates("open", "test")
    with torch.no_grad():
        scores = method.scorer(columns)(batch.inputs)
        torch.testing.assert_close(scores, method.method.scorer(columns)(own.inputs), atol=1e-5, rtol=1e-4)
        untuned = Batch({**own.inputs, "patch": torch.zeros_like(own.inputs["patch"])}, batch.compositions)
        assert not torch.allclose(scores, method.method.scorer(columns)(untuned.inputs), atol=1e-3)


def test_tokens_are_refused_for_methods_that_read_none() -> None:
    with pytest.raises(UsageError, match="reads no patch tokens"):
        started("prompts", finetuning_task(tokens=True))


def test_every_function_of_the_protocol_is_passed_on() -> None:
    functions = {name for name, value in vars(Method).items() if isfunction(value) and not name.startswith("_")}
    own = functions - {"primitives", "known_primitives", "grow"}
    assert {"scorer", "portable"} < own <= vars(WithFinetuning).keys()


class Recorder(PromptMethod):
    """A method that records what the training loop calls it with."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: dict[str, Any] = {}

    def record(self, *arguments: Any, name: str) -> None:
        self.calls[name] = arguments


for name in ("start", "on_features_changed", "choose_options", "after_batch", "after_step", "after_epoch"):
    setattr(Recorder, name, partialmethod(Recorder.record, name=name))


def test_calls_of_the_training_loop_are_passed_on() -> None:
    method: Any = make_method(f"{__name__}:Recorder", PromptOptions(), finetuning_task())
    batch = block_batch(6)
    features, calls = with_features(method, batch).cls, method.method.calls
    method.start(batch)
    method.on_features_changed(batch)
    method.choose_options(batch.inputs, np.arange(2), float)
    inputs = [calls.pop("choose_options")[0], *(calls.pop(name)[0].inputs for name in ("start", "on_features_changed"))]
    assert all(torch.equal(given["cls"], features) for given in inputs)
    method.after_batch()
    method.after_step()
    method.after_epoch(7)
    assert calls == {"after_batch": (), "after_step": (), "after_epoch": (7,)}


@pytest.mark.parametrize("adapter", ["bottleneck", "lora", "full"])
def test_a_step_moves_the_blocks_at_their_own_learning_rate(adapter: str) -> None:
    method = started(context=finetuning_task(adapter, learning_rate=1e-6), random_blocks=False)
    batch, before = block_batch(), [parameter.detach().clone() for parameter in method.parameters()]
    optimiser_step(
        method.train(), batch, torch.arange(48), replace(SETTINGS, accumulate=3), make_optimiser(method, SETTINGS)
    )
    of_blocks = {id(parameter) for parameter in method.blocks.parameters()}
    steps = {True: 0.0, False: 0.0}
    for parameter, old in zip(method.parameters(), before, strict=True):
        inside = id(parameter) in of_blocks
        steps[inside] = max(steps[inside], float((parameter.detach() - old).abs().max()))
    assert steps[False] == pytest.approx(0.01, rel=0.1)
    assert 0.5e-6 < steps[True] < 2e-6  # float32 rounds a weight's sum


def test_buffers_are_recomputed_when_features_change() -> None:
    method, fresh = (started("closed_form", random_blocks=False) for _ in range(2))
    before, batch = {name: value.clone() for name, value in method.method.state_dict().items()}, block_batch()
    with torch.no_grad():
        for weight in (*method.blocks.parameters(), *fresh.blocks.parameters()):
            weight.fill_(0.02)
    method.on_features_changed(batch)
    fresh.start(batch)
    after = method.method.state_dict()
    for name, value in fresh.method.state_dict().items():
        torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before["sums"], after["sums"], atol=1e-2)


VISUAL: dict[str, Any] = {"losses": ("state", "object", "composition"), "inference": ("gaussian_factors", "gaussian")}


def test_without_prompts_linear_heads_train_the_blocks_and_the_score_is_the_closed_form_of_their_features() -> None:
    context = replace(finetuning_task("full"), text=None, words=None)
    method, batch = started("closed_form", context, **VISUAL), block_batch(24, seed=3)
    heads, labels = method.method.heads, method.labels
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(0.1 * torch.randn_like(weight))
    x = 100 * normalize(method.blocks(batch.inputs["block_inputs"]), dim=1)
    f_s, f_o = heads.states(x), heads.objects(x)
    seen = labels.pairs["train"]
    expected = dict.fromkeys(VISUAL["losses"], torch.zeros(()))
    for place, own in enumerate(batch.compositions.tolist()):
        m, n = divmod(own, len(labels.objects))
        joint = torch.stack([f_s[place, c // len(labels.objects)] + f_o[place, c % len(labels.objects)] for c in seen])
        of_seen = joint.log_softmax(0)[list(seen).index(own)]
        parts = f_s[place].log_softmax(0)[m], f_o[place].log_softmax(0)[n], of_seen
        expected = {name: loss - part / 24 for (name, loss), part in zip(expected.items(), parts, strict=True)}
    losses = method.losses(batch, method.shared())
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    torch.stack(list(losses.values())).sum().backward()
    assert all(parameter.grad is not None for group in method.groups() for parameter in group["params"])
    columns = labels.candidates("open", "test")
    bare = make_method("closed_form", parse_options("closed_form", VISUAL), replace(context, finetuned_blocks=None))
    with torch.no_grad():
        bare.start(with_features(method, block_batch()))
        wanted = bare.scorer(columns)(with_features(method, batch).inputs)
        torch.testing.assert_close(method.scorer(columns)(batch.inputs), wanted, atol=1e-4, rtol=1e-4)
    assert bare.groups() == [] and bare.heads is None
