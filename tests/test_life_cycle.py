"""The life cycle of every registered kind on a simulated device: started, trained, interrupted, resumed, tuned,
calibrated, saved, loaded, evaluated and exported, with the results of a CPU; and the number of operations and
synchronisations of its training steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duplex.evaluation.probabilities import Confidence
from duplex.features.tokens import Examples
from duplex.labels import World
from duplex.methods import portable
from duplex.methods.base import Batch, Method, MethodContext, PrimitiveVectors
from duplex.methods.prompts import encode_words
from duplex.methods.registry import find_method, installed_methods, make_method
from duplex.options import Options, TrainingOptions
from duplex.recognition.answers import Candidates
from duplex.testing import small_labels
from duplex.training.checkpoint import TrainingRecord, load_checkpoint, save_checkpoint
from duplex.training.loop import ResumePoint, TrainingState, make_optimiser, make_schedule, train, train_epoch
from duplex.training.scoring import (
    Calibration,
    SplitScorer,
    Validation,
    calibrate,
    choose_options,
    feasible_compositions,
    score_split,
)
from tests.conftest import AVAILABLE
from tests.methods.world import DIM, small_tower
from tests.pretended import Pretended

KINDS, LABELS, PATCH = sorted(set(installed_methods()) - {"product"}), small_labels(), (4, 7)  # a product needs runs
FAST = {"lde", "closed_form", "prompts", "duplex", "kg_sp", "compcos", "cge", "troika"}  # one of each family of code
READ_THE_WORLD = {
    "closed_form", "cge", "cge_visual", "co_cge", "compcos", "duplex", "gipcol", "lde", "prompts", "scen", "troika",
}  # fmt: skip
SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=8, epochs=2)
MOST_OPERATIONS = 750  # of a step of any kind over two layers of text
WORLDS: tuple[World, World] = ("closed", "open")


def of_kind(kind: str, *more: Any) -> Any:
    return pytest.param(kind, *more, marks=[] if kind in FAST else pytest.mark.slow)


def small_options(kind: str, changes: dict[str, Any]) -> Options:
    """The default options with narrow layers, as counts do not depend on widths, and with `changes`."""
    defaults = find_method(kind).Options().to_dict()
    narrow = {name: 16 for name, value in defaults.items() if type(value) is int and value > 64}
    return find_method(kind).Options.from_dict({**defaults, **narrow, **changes})


@cache
def context(device: str) -> MethodContext:
    tower = small_tower.__wrapped__(dtype=torch.float32, device=device)
    return MethodContext(LABELS, {"cls": (DIM,), "patch": PATCH}, tower, PrimitiveVectors(*encode_words(LABELS, tower)))


@dataclass(frozen=True)
class LifeCycle:
    kind: str
    device: torch.device
    context: MethodContext
    changes: dict[str, Any]  # of the kind's default options

    @classmethod
    def of(cls, kind: str, device: str, world: World = "closed", **changes: Any) -> LifeCycle:
        return cls(kind, torch.device(device), replace(context(device), world=world), changes)

    def examples(self, split: str, count: int) -> Examples:
        random = torch.Generator().manual_seed(count)
        patches = torch.randn(count, *PATCH, generator=random).half()
        inputs = {"cls": torch.randn(count, DIM, generator=random), "patch": patches}
        own = torch.as_tensor(np.resize(LABELS.pairs[split], count))
        return Examples(np.arange(count), inputs, own).to(self.device)

    def started(self) -> Method[Any]:
        torch.manual_seed(0)
        method = make_method(self.kind, small_options(self.kind, self.changes), self.context).to(self.device)
        images = self.examples("train", 24)
        method.start(Batch(images.inputs, images.compositions))
        return method

    def trained(self, epochs: int, partial: Path | None = None) -> tuple[Method[Any], list[dict[str, float]]]:
        method, val = self.started(), self.examples("val", 12)
        settings, run = replace(SETTINGS, epochs=epochs), ResumePoint(self.kind, partial, "key")
        images = self.examples("train", 24)
        outcome = train(method, images, settings, 3, lambda it: Validation(val, LABELS)(it).metrics["auc"], run)
        return method, outcome.history

    def saved(self, method: Method[Any], path: Path) -> TrainingRecord:
        val = self.examples("val", 12)
        choose_options(method, val, LABELS)
        chosen: dict[str, Calibration] = {
            world: calibrate(method, val, LABELS, world, self.context.words, 5)[0] for world in WORLDS
        }
        record = TrainingRecord(self.kind, "", method.options, LABELS, {}, 3, 2, 0.5, calibration=chosen)
        save_checkpoint(path, method, record)
        return record

    def results(self, path: Path, record: TrainingRecord, world: World = "open") -> dict[str, Any]:
        method = load_checkpoint(path, self.context, {}).to(self.device)
        test, columns, chosen = self.examples("test", 10), LABELS.candidates(world, "test"), record.calibration[world]
        live = feasible_compositions(method, self.context.words, chosen)
        live = np.ones(len(columns), dtype=bool) if live is None else live[columns]
        found = score_split(
            SplitScorer.of(method, columns), test, LABELS, k=2, feasible_mask=live, top=3, bias=chosen.bias
        )
        scorer, terms = method.scorer(columns), method.score_terms(columns)
        panel = Candidates.of(
            LABELS,
            columns,
            feasible=live,
            confidence=Confidence(),
            world=world,
            scorer=scorer,
            terms=terms,
            probabilities=method.probabilities,
        )
        guesses = [guess for answer in panel.answers(test.inputs, 2) for guess in answer.top]
        tensors = method.portable(columns)
        exported = (
            [] if tensors is None else [part.cpu() for _, part in portable.score_terms(tensors, test.inputs["cls"])]
        )
        return {
            "label": found.accumulator.competitors().label,
            "top": found.top,
            "pairs": [(guess.state, guess.object) for guess in guesses],
            "scores": np.array([guess.score for guess in guesses]),
            "exported": exported,
        }


def run_life_cycle(life: LifeCycle, folder: Path, killed: bool) -> dict[str, Any]:
    """Train two epochs, in a run that resumes after the first one if `killed`, and return all results."""
    folder.mkdir()
    if killed:
        life.trained(1, folder / "partial")
    method, history = life.trained(2, folder / "partial")
    record = life.saved(method, folder / "checkpoint")
    chosen = {world: calibration.to_dict() for world, calibration in (record.calibration or {}).items()}
    return {"history": history, "chosen": chosen, "answers": life.results(folder / "checkpoint", record)}


@pytest.mark.parametrize("kind", [of_kind(kind) for kind in KINDS])
def test_an_interrupted_run_on_a_device_equals_a_whole_run_on_a_cpu(kind: str, tmp_path: Path) -> None:
    if not AVAILABLE:
        pytest.skip(f"torch {torch.__version__} cannot simulate devices in Python")
    expected = run_life_cycle(LifeCycle.of(kind, "cpu"), tmp_path / "here", killed=False)
    with Pretended():
        found = run_life_cycle(LifeCycle.of(kind, Pretended.name), tmp_path / "there", killed=True)
    assert_alike(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_on_a_gpu_equals_a_whole_run(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        whole, broken = (
            run_life_cycle(LifeCycle.of(kind, "cuda"), tmp_path / str(killed), killed=killed)
            for killed in (False, True)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert_alike(broken, whole)
    saved = [(tmp_path / str(killed) / "checkpoint").read_bytes() for killed in (False, True)]
    assert saved[0] == saved[1]


CHANGES: list[Any] = [
    *(of_kind(kind, {"layers": 1} if kind == "clear" else {}) for kind in KINDS),  # of 6, with more operations
    ("duplex", {"refine_over": "open", "blend": "anchored"}),
    ("duplex", {"unseen_rows": "random", "seen_rows": "random", "fusion": "additive"}),
    ("duplex", {"graph": False}),
    *(pytest.param(kind, {"world": "open"}, marks=pytest.mark.slow) for kind in sorted(READ_THE_WORLD)),
]


@pytest.mark.parametrize(("kind", "changes"), CHANGES)
def test_steps_never_synchronise_and_their_operations_do_not_depend_on_the_batch(kind, changes, pretended):
    """An epoch synchronises once, for its losses; a step with half the images has the same number of operations."""
    life, operations = LifeCycle.of(kind, pretended.name, **changes), list[int]()
    method, images = life.started().train(), life.examples("train", 16)
    optimiser = make_optimiser(method, SETTINGS)
    state = TrainingState("", method, optimiser, make_schedule(optimiser, SETTINGS), torch.Generator(), life.device)
    batch = Batch(images.inputs, images.compositions, images.compositions.cpu().numpy())

    def show(step: int, losses: dict[str, float]) -> None:
        waits.append(pretended.synchronisations.total())
        operations.append(pretended.operations.total())
        pretended.operations.clear()

    trained = bool(method.groups())
    for size in (16, 16, 8) if trained else ():
        waits = list[int]()
        pretended.reset()
        train_epoch(state, batch, replace(SETTINGS, batch_size=size), show)
        if len(operations) > 1:  # the first step fills caches
            assert not any(waits)
            assert pretended.synchronisations.total() == 1
    assert len(set(operations[1:])) == trained
    assert all(count <= MOST_OPERATIONS for count in operations)


def assert_alike(found: Any, expected: Any) -> None:
    """Compare nested dicts and lists, numbers up to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_alike(found[key], value)
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict | Tensor):
        for ours, theirs in zip(found, expected, strict=True):
            assert_alike(ours, theirs)
    elif isinstance(expected, float | np.ndarray | Tensor):
        np.testing.assert_allclose(found, expected, rtol=5e-5, atol=1e-6)
    else:
        assert found == expected
