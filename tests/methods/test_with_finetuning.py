"""Methods whose features move: every kind over a tail is that kind over the features that the tail makes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from inspect import isfunction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duplex.errors import DuplexError, UsageError
from duplex.features.examples import Examples
from duplex.layers.factors import unit
from duplex.layers.finetuned_blocks import tail_maker
from duplex.layers.statistics import Statistics
from duplex.methods.base import Batch, Method, Setting
from duplex.methods.prompts import PromptMethod, PromptOptions
from duplex.methods.registry import make, parse, sources
from duplex.methods.with_finetuning import FinetunedInputs, WithFinetuning
from duplex.options import TailOptions, TrainingOptions
from duplex.testing import small_batch, small_setting
from duplex.training.loop import Run, make_optimiser, optimiser_step, train
from duplex.training.resume import State

KINDS = [kind for kind, source in sources().items() if source.module.startswith("duplex.") and kind != "lde"]
SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=16, epochs=3)
ROW = (192, 3, 3)


@cache
def deep_setting(adapter: Any = "tail", **options: Any) -> Setting:
    record = {"name": "tiny", "tag": "", "depth": "1", "precision": "fp32"}
    tail = tail_maker(record, TailOptions(1, adapter, **options), "cpu")  # type: ignore[arg-type]
    plain = small_setting()
    return replace(plain, inputs={**plain.inputs, "deep": ROW}, image_tail=tail)


def deep_batch(count: int = 48, seed: int = 0) -> Batch:
    """The same maps for images of one pair, but for noise."""
    plain, random = small_batch(count, seed), torch.Generator().manual_seed(seed + 7)
    own = torch.rand(12, *ROW, generator=torch.Generator().manual_seed(1))
    deep = own[plain.compositions] + 0.1 * torch.rand(count, *ROW, generator=random)
    return Batch({**plain.inputs, "deep": deep.half()}, plain.compositions)


def begun(kind: str = "prompts", setting: Setting | None = None, stirred: bool = True, **options: Any) -> Any:
    setting = setting or deep_setting()
    torch.manual_seed(0)
    method = make(kind, parse(kind, options), setting)
    assert isinstance(method, WithFinetuning)
    if stirred:
        with torch.no_grad():
            for weight in method.tail.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
    method.eval()
    method.start(deep_batch())
    return method


def moved(method: WithFinetuning, batch: Batch) -> Batch:
    """As a method without a tail would be given it."""
    return Batch({**batch.inputs, "cls": method.tail(batch.inputs["deep"])}, batch.compositions)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_reads_what_the_tail_makes(kind: str) -> None:
    method, batch = begun(kind), deep_batch(24, seed=3)
    columns = method.labels.target("open", "test")
    with torch.no_grad():
        own = moved(method, batch)
        assert not torch.allclose(own.z, batch.z, atol=1e-2)
        torch.testing.assert_close(
            method.scorer(columns)(batch.inputs), method.method.scorer(columns)(own.inputs), atol=1e-6, rtol=1e-5
        )
        for name in ("features", "spoken"):
            shown = getattr(method.exhibits(), name)
            if shown is not None:
                torch.testing.assert_close(shown(batch.inputs), getattr(method.method.exhibits(), name)(own.inputs))
    torch.manual_seed(5)
    found = torch.stack(list(method.losses(batch, method.shared()).values())).sum()
    found.backward()
    through = [parameter.grad.clone() for parameter in method.tail.parameters()]
    method.zero_grad()
    torch.manual_seed(5)
    twin = torch.stack(list(method.method.losses(moved(method, batch), method.method.shared()).values())).sum()
    twin.backward()
    torch.testing.assert_close(found, twin)
    assert any(grad.abs().max() > 0 for grad in through)
    for grad, parameter in zip(through, method.tail.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, atol=1e-6, rtol=1e-4)


def test_nothing_that_a_method_may_offer_stops_at_the_tail() -> None:
    """A part of the protocol that is not passed on would be the default of every method with a tail."""
    offered = {name for name, value in vars(Method).items() if isfunction(value) and not name.startswith("_")}
    assert {"scorer", "likelihood"} < offered <= vars(WithFinetuning).keys()


class Told(PromptMethod):
    """What the loop says reaches it by name, with what was said of epochs and of features."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.heard: dict[str, Any] = {}

    def start(self, train: Batch) -> None:
        self.heard["start"] = train.z

    def follow(self, train: Batch) -> None:
        self.heard["follow"] = train.z

    def tune(self, images: Any, columns: Any, auc: Any) -> None:
        self.heard["tune"] = images["cls"]

    def after_batch(self) -> None:
        self.heard["after_batch"] = True

    def after_step(self) -> None:
        self.heard["after_step"] = True

    def after_epoch(self, epoch: int) -> None:
        self.heard["after_epoch"] = epoch

    def batches(self, train: Batch, size: int, order: torch.Generator) -> Any:
        self.heard["batches"] = size
        return super().batches(train, size, order)


def test_all_that_the_loop_says_is_passed_on() -> None:
    method, batch = make(f"{__name__}:Told", PromptOptions(), deep_setting()), deep_batch(6)
    assert isinstance(method, WithFinetuning)
    own, heard = moved(method, batch).z, method.method.heard  # type: ignore[union-attr]
    for name in ("start", "follow", "tune"):
        getattr(method, name)(*((batch.inputs, np.arange(2), float) if name == "tune" else (batch,)))
        torch.testing.assert_close(heard[name], own)  # type: ignore[index]
        assert not heard[name].requires_grad  # type: ignore[index]
    method.after_batch(), method.after_step(), method.after_epoch(7)
    assert len(list(method.batches(batch, 4, torch.Generator()))) == 2
    told = {name: said for name, said in heard.items() if not isinstance(said, torch.Tensor)}  # type: ignore[union-attr]
    assert told == {"after_batch": True, "after_step": True, "after_epoch": 7, "batches": 4}


def test_a_sweep_is_the_scorers() -> None:
    method, batch = begun("duplex", inference=("ch", "so")), deep_batch(6, seed=3)
    sweep = method.sweep(2)
    assert sweep is not None and begun("prompts").sweep(2) is None
    with torch.no_grad():
        whole = method.scorer(method.labels.target("open", "test"))(batch.inputs)
        parts = [part.clone() for _, part in sweep(batch.inputs)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-6, rtol=1e-5)


def test_a_likelihood_is_that_of_the_moved_features() -> None:
    method = begun("closed_form")
    torch.testing.assert_close(method.likelihood(), method.method.fitted().support().flatten())
    assert begun("prompts").likelihood() is None


def test_an_export_is_the_methods_own_and_what_was_trained_of_the_tail() -> None:
    method, columns = begun("prompts", width=5), np.arange(4)
    found, own = method.portable(columns), method.method.portable(columns)
    state = {f"tail.{name}": value for name, value in method.tail.state_dict().items()}
    assert state and found.keys() == {*own, *state}
    assert all(torch.equal(value, {**own, **state}[name]) for name, value in found.items())
    assert not any(value.requires_grad for value in found.values())
    assert begun("kg_sp").portable(columns) is None
    assert begun("kg_sp").evidence(columns) is None


def test_what_a_tail_adds_is_counted() -> None:
    method = begun("prompts", width=5)
    parts = sum(parameter.numel() for parameter in method.parameters() if parameter.requires_grad)
    assert method.summary() == {"parameters": parts, "tail_blocks": 1}
    assert method.method.summary()["parameters"] < parts


def test_moved_inputs_are_those_that_are_there_and_are_made_once() -> None:
    method, batch = begun("prompts", width=5), deep_batch(3)
    moved = FinetunedInputs(batch.inputs, method.tail)
    assert list(moved) == list(batch.inputs) and len(moved) == len(batch.inputs)
    assert moved["patch"] is batch.inputs["patch"] and moved["cls"] is moved["cls"]


@pytest.mark.parametrize("adapter", ["tail", "lora", "trained"])
def test_a_step_moves_the_tail_at_its_own_rate(adapter: str) -> None:
    method = begun(setting=deep_setting(adapter, learning_rate=1e-6), stirred=False)
    batch, before = deep_batch(), [parameter.detach().clone() for parameter in method.parameters()]
    optimiser_step(
        method.train(), batch, torch.arange(48), replace(SETTINGS, accumulate=3), make_optimiser(method, SETTINGS)
    )
    tail = {id(parameter) for parameter in method.tail.parameters()}
    steps = {True: 0.0, False: 0.0}
    for parameter, old in zip(method.parameters(), before, strict=True):
        inside = id(parameter) in tail
        steps[inside] = max(steps[inside], float((parameter.detach() - old).abs().max()))
    assert steps[False] == pytest.approx(0.01, rel=0.1)
    assert 0.5e-6 < steps[True] < 2e-6  # float32 rounds a weight's sum


def test_accumulated_batches_are_one_step_of_the_whole() -> None:
    """Text is encoded once, the tail runs batch by batch; without dropout the gradients are those of one pass."""
    grads = []
    for size in (16, 48):
        method = begun(setting=deep_setting(dropout=0.0), adapter="none")
        settings = replace(SETTINGS, batch_size=size, accumulate=48 // size)
        optimiser = torch.optim.SGD(method.parameters(), lr=0.0)
        optimiser_step(method.train(), deep_batch(), torch.arange(48), settings, optimiser)
        grads.append(torch.cat([parameter.grad.flatten() for parameter in method.tail.parameters()]))
    torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-4)


class Killed(Exception):
    pass


def test_a_resumed_run_ends_in_the_same_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = deep_batch()
    examples = Examples(torch.arange(len(batch)).numpy(), batch.inputs, batch.compositions)
    partial, save = tmp_path / "training.partial", State.save

    def run(**more: Any) -> dict[str, torch.Tensor]:
        method = begun("closed_form", stirred=False)
        train(method, examples, SETTINGS, 0, lambda current: float(current.method.sums.abs().sum()), **more)
        return method.state_dict()

    def dying(state: State, path: Path) -> None:
        save(state, path)
        if state.epoch == 2:
            raise Killed

    whole = run()
    monkeypatch.setattr(State, "save", dying)
    with pytest.raises(Killed):
        run(run=Run(partial=partial, key="k"))
    monkeypatch.undo()
    again = run(run=Run(partial=partial, key="k"))
    assert whole.keys() == again.keys() and any(name.startswith("tail.") for name in whole)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_statistics_follow_the_features() -> None:
    method, batch = begun("closed_form"), deep_batch()
    with torch.no_grad():
        for weight in method.tail.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        own = moved(method, batch)
        wanted = Statistics.of(unit(own.z), own.compositions, 4, 3)
        assert not torch.allclose(method.method.sums, wanted.sums, atol=1e-3)  # type: ignore[arg-type]
        method.follow(batch)
    torch.testing.assert_close(method.method.sums, wanted.sums, atol=1e-5, rtol=0)
    torch.testing.assert_close(method.method.moment, wanted.moment, atol=1e-5, rtol=0)


def test_rows_of_the_codebook_follow_the_features() -> None:
    for rows in ("recomputed", "ema"):
        method = begun("duplex", stirred=False, graph=False, rows=rows, momentum=0.0)
        batch = deep_batch()
        fresh = begun("duplex", stirred=False, graph=False)
        with torch.no_grad():
            for weight in (*method.tail.parameters(), *fresh.tail.parameters()):
                weight.fill_(0.02)
        if rows == "ema":  # rows of one batch alone are its means
            method.losses(batch, method.shared())
            method.after_batch()
        seen = method.labels.pairs["train"]
        stale = fresh.method.codebook.rows_of(seen)
        method.follow(batch)
        fresh.start(batch)
        expected = fresh.method.codebook.rows_of(seen)
        assert not torch.allclose(stale, expected, atol=1e-2)
        torch.testing.assert_close(method.method.codebook.rows_of(seen), expected, atol=1e-5, rtol=0)


def test_a_tail_that_nothing_would_move_is_refused() -> None:
    with pytest.raises(UsageError, match="kind 'lde' trains nothing"):
        make("lde", parse("lde", {}), deep_setting())
    with pytest.raises(UsageError, match="kind 'prompts' trains nothing with these options, so a tail"):
        make("prompts", parse("prompts", {"losses": [], "context": "fixed", "vocabulary": "fixed"}), deep_setting())


def test_a_tail_that_diverges_is_named() -> None:
    batch = deep_batch()
    examples = Examples(torch.arange(len(batch)).numpy(), batch.inputs, batch.compositions)
    method = begun(stirred=False)

    def broken(current: Any) -> None:
        with torch.no_grad():
            next(current.tail.parameters()).fill_(float("nan"))

    method.after_step = lambda: broken(method)  # type: ignore[method-assign]
    with pytest.raises(DuplexError, match=r"tail\.trained\.0\.down\.weight diverged"):
        train(method, examples, replace(SETTINGS, batch_size=48), 0, lambda _: 0.0)
