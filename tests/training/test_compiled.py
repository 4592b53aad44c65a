"""`training.compile`: compiled encoders take the steps of uncompiled ones, or training does without them."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duplex.encoders.base import load_encoder
from duplex.errors import UsageError
from duplex.features.tokens import Examples
from duplex.methods.base import Batch, Method
from duplex.methods.blocks import finetuned_blocks_factory
from duplex.methods.layers import Bottleneck
from duplex.methods.registry import make_method, parse_options
from duplex.options import FinetuneOptions, OptionError, TrainingOptions
from duplex.testing import small_batch, small_context
from duplex.training.compiled import CompiledBlocks
from duplex.training.loop import ResumePoint, TrainingResult, train
from duplex.training.run import reproducible
from tests.encoders.small import write_folder
from tests.projects import interrupt

# a large eps: biases of keys have a gradient of zero, whose rounding Adam would enlarge to whole steps
SETTINGS = TrainingOptions(learning_rate=1e-3, batch_size=8, epochs=2, threads=1, eps=1e-3)
COMPILED = SETTINGS.changed({"compile": True})
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    small_context()  # the first one draws its towers
    return write_folder(tmp_path_factory.mktemp("encoder") / "small")


def built(encoder: str, precision: str = "fp32", kind: str = "duplex", **finetune: Any) -> Method[Any]:
    """A method with random image blocks, one of two tuned, and prompts of a random text tower."""
    record = {"name": encoder, "tag": "", "block_inputs": "2", "precision": "fp32", "text_precision": precision}
    text = load_encoder(encoder, None, towers="text", precision=precision).text
    tuned = finetuned_blocks_factory(record, FinetuneOptions(1, **finetune), "cpu")
    inputs: dict[str, tuple[int, ...]] = {"cls": (16,), "block_inputs": (5, 32)}
    torch.manual_seed(0)
    context = replace(small_context(), inputs=inputs, text=text, finetuned_blocks=tuned)
    return make_method(kind, parse_options(kind, {}), context)


def images(count: int) -> Examples:
    labels = small_batch(count, 3).compositions
    random = torch.Generator().manual_seed(1)
    inputs = {name: torch.randn(count, *shape, generator=random) for name, shape in {"cls": (16,)}.items()}
    return Examples(np.arange(count), {**inputs, "block_inputs": torch.randn(count, 5, 32, generator=random)}, labels)


def result_of(
    method: Method[Any], count: int, settings: TrainingOptions, resume: ResumePoint = ResumePoint()
) -> TrainingResult:
    own = images(count)
    with reproducible(1):
        method.eval().start(Batch(own.inputs, own.compositions.clone()))
        return train(method, own, settings, 0, None, resume)


def trained(
    method: Method[Any], count: int, settings: TrainingOptions, resume: ResumePoint = ResumePoint()
) -> tuple[list[dict[str, float]], Tensors]:
    """The mean losses of each epoch and the tensors after the last."""
    history = result_of(method, count, settings, resume).history
    return history, {name: tensor.clone() for name, tensor in method.state_dict().items()}


def assert_equal(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


TWINS = [
    pytest.param("fp32", 16, {"adapter": "parallel", "dropout": 0.1}, 1e-5, marks=pytest.mark.long),
    ("fp32", 21, {"adapter": "full"}, 1e-5),  # the last batch has 5 images
    # features of uncompiled bf16 are 7e-3 from those in fp32
    pytest.param("bf16", 21, {"adapter": "full"}, 5e-3, marks=pytest.mark.long),
]


@pytest.mark.slow
@compiles
@pytest.mark.parametrize(("precision", "count", "finetune", "allowed"), TWINS)
def test_compiled_encoders_take_the_same_steps(
    encoder: str, capsys: pytest.CaptureFixture[str], precision: Any, count: int, finetune: Any, allowed: float
) -> None:
    found = []
    for chosen in (SETTINGS, COMPILED):
        settings = chosen.changed({"precision": precision, "learning_rate": 1e-3 if precision == "fp32" else 1e-5})
        found.append(trained(built(encoder, precision, **finetune), count, settings))
    assert "training.compile" not in capsys.readouterr().err
    (history, expected), (compiled_history, compiled) = found
    for row, own in zip(history, compiled_history, strict=True):
        assert own == pytest.approx(row, abs=allowed, rel=allowed)
    for name, tensor in expected.items():
        torch.testing.assert_close(compiled[name], tensor, atol=allowed, rtol=0)
    assert any(not torch.equal(compiled[name], tensor) for name, tensor in expected.items()), "nothing was compiled"


@pytest.mark.slow
@compiles
def test_compiled_training_repeats_and_resumes_to_the_same_bytes(
    encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [trained(built(encoder, adapter="parallel"), 21, COMPILED) for _ in range(2)]
    assert whole[0][0] == whole[1][0]
    assert_equal(whole[0][1], whole[1][1])
    resume = ResumePoint("small", tmp_path / "training.partial", "key")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, 2)
        trained(built(encoder, adapter="parallel"), 21, COMPILED, resume)
    torch.compiler.reset()
    history, tensors = trained(built(encoder, adapter="parallel"), 21, COMPILED, resume)
    assert history == whole[0][0]
    assert_equal(tensors, whole[0][1])


def reads_values(self: Bottleneck, y: Tensor) -> Tensor:
    return self.up(self.down(y)) if float(y.sum()) < 1e9 else y  # a branch that no graph can hold


def no_compiler(patch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as settings

    patch.setattr(settings, "force_disable_caches", True)
    patch.setattr(settings.cpp, "cxx", ("no-such-compiler",))


def no_graph(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bottleneck, "forward", reads_values)


def other_numbers(patch: pytest.MonkeyPatch) -> None:
    def changed(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found = function(*arguments)
            return found.roll(1, -1) if isinstance(found, Tensor) else found

        return call

    patch.setattr(torch, "compile", changed)


def no_backward(patch: pytest.MonkeyPatch) -> None:
    def failing(_: Any) -> None:
        raise RuntimeError("\nno backward\nTraceback")

    def changed(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found = function(*arguments)
            for value in [found] if isinstance(found, Tensor) else found.values():
                value.register_hook(failing)
            return found

        return call

    patch.setattr(torch, "compile", changed)


FAILURES = [
    pytest.param(no_compiler, "no-such-compiler", marks=pytest.mark.slow),
    pytest.param(no_graph, "torch cannot compile the encoders", marks=pytest.mark.slow),
    (no_backward, r"torch cannot compile the encoders \(RuntimeError: no backward\)"),
    (other_numbers, r"compiled encoders change features by 0\.\d+ of their norm"),
]


@pytest.mark.parametrize(("break_it", "reason"), FAILURES)
def test_where_compiling_fails_training_is_that_without(
    encoder: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    """One line says so; losses and tensors are the same to the last bit, dropout included."""
    if break_it is no_graph:
        break_it(monkeypatch)
    history, tensors = trained(built(encoder, adapter="parallel", dropout=0.1), 21, SETTINGS)
    break_it(monkeypatch)
    capfd.readouterr()
    method = built(encoder, adapter="parallel", dropout=0.1)
    compiled_history, compiled = trained(method, 21, COMPILED, ResumePoint("own"))
    lines = [line for line in capfd.readouterr().err.splitlines() if "steps" not in line]
    assert len(lines) == 1 and lines[0].startswith("own: training.compile is true, but ")
    assert re.search(reason, lines[0]) and lines[0].endswith("; training runs uncompiled")
    assert compiled_history == history
    assert_equal(compiled, tensors)


def test_the_timing_says_whether_steps_were_compiled(encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "compiled" not in result_of(built(encoder), 16, SETTINGS).timing
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert result_of(built(encoder), 16, COMPILED).timing["compiled"] is True
    other_numbers(monkeypatch)
    assert result_of(built(encoder), 16, COMPILED).timing["compiled"] is False


def test_filled_up_batches_and_fixed_trees_change_nothing(encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that returns its function: sizes of batches are equal, and losses of real images."""
    sizes = list[int]()

    def identity(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            sizes.extend(len(each) for each in arguments[:1] if isinstance(each, Tensor))
            return function(*arguments)

        return call

    history, tensors = trained(built(encoder, adapter="full"), 21, SETTINGS)
    monkeypatch.setattr(torch, "compile", identity)
    method = built(encoder, adapter="full")
    own_history, own = trained(method, 21, COMPILED)
    assert set(sizes) == {8} and len(sizes) == 3 + 2 * 3
    for row, found in zip(history, own_history, strict=True):
        assert found == pytest.approx(row, abs=1e-5)
    for name, tensor in tensors.items():
        torch.testing.assert_close(own[name], tensor, atol=1e-5, rtol=0)
    assert method.blocks.compiled is None and method.method.paths.prompts.tower.compiled is None


def test_larger_batches_run_uncompiled() -> None:
    blocks = CompiledBlocks(lambda x: {"cls": 2 * x}, 2)
    blocks.run = lambda x: {"cls": 3 * x}
    assert blocks(torch.ones(3))["cls"].tolist() == [2, 2, 2]
    assert blocks(torch.ones(1))["cls"].tolist() == [3]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("compcos", {}, "trains neither blocks of the image tower .* set it to false"),
        ("prompts", {"vocabulary": "fixed", "context": "fixed"}, "trains neither"),
    ],
)
def test_what_cannot_be_compiled_is_refused(kind: str, options: Any, message: str) -> None:
    context = small_context()
    method, batch = make_method(kind, parse_options(kind, options), context), small_batch(48, 0)
    method.eval().start(batch)
    with pytest.raises(UsageError, match=f"training.compile is true, but .*{message}"):
        train(method, Examples(np.arange(48), batch.inputs, batch.compositions), COMPILED, 0, None)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"devices": 2}, "compile works on one device, and devices is 2; set compile to false or devices to 1"),
        ({"checkpointing": True}, "checkpointing .* leave out one of them"),
        ({"compile": "yes"}, r"compile: input should be a valid boolean \(it is 'yes'\)"),
    ],
)
def test_options_that_exclude_each_other(others: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        COMPILED.changed(others)
