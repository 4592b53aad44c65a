"""Every registered kind through its whole life on a pretended device: begun, trained, interrupted, gone on with, tuned,
calibrated, saved, loaded, evaluated and asked, with nothing of it on two devices at once, and as on a CPU; and what its
steps ask of the device: counts, not times."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.text import random_tower, read_pairs
from duplex.features.examples import Examples
from duplex.labels import SPLITS, LabelSpace, World
from duplex.layers import portable
from duplex.layers.word_vectors import word_vectors
from duplex.methods.base import Batch, Method, Setting, Words
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.methods.registry import find, make, sources
from duplex.options import Options, TrainingOptions
from duplex.recognition.candidates import Panel
from duplex.testing import small_labels
from duplex.training import loop
from duplex.training.calibration import Calibration, calibrate, passing
from duplex.training.checkpoint import Record, load_checkpoint, save_checkpoint
from duplex.training.loop import Run, make_optimiser, make_schedule, optimiser_step, train
from duplex.training.resume import State
from duplex.training.scoring import Field, assess, tune, validation_auc
from tests.conftest import AVAILABLE
from tests.methods.world import DIM, small_tower
from tests.pretended import Pretended

KINDS, LABELS, PATCH = sorted(sources()), small_labels(), (4, 7)
SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=8, epochs=2)
MOST = 750  # operations of a step of any kind over two layers of text
WORLDS: tuple[World, World] = ("closed", "open")
AUDITED = {"mit-states": (2781, 64), "cgqa": (4909, 32)}  # operations of a step ancestor by ancestor; images of one


def small_options(kind: str) -> Options:
    """The default row, its wide layers narrow: counts do not depend on widths."""
    row = find(kind).Options().to_dict()
    wide = {name: 16 for name, value in row.items() if type(value) is int and value > 64}
    return find(kind).Options.from_dict({**row, **wide})


@cache
def setting(device: str) -> Setting:
    tower = small_tower.__wrapped__(dtype=torch.float32, device=device)
    words = Words(*word_vectors(LABELS, tower))
    return Setting(LABELS, {"cls": (DIM,), "patch": PATCH}, tower, words)


@dataclass(frozen=True)
class Life:
    """A kind on a device."""

    kind: str
    device: torch.device
    setting: Setting

    @classmethod
    def of(cls, kind: str, device: str, world: World = "closed") -> Life:
        return cls(kind, torch.device(device), replace(setting(device), world=world))

    def examples(self, split: str, count: int) -> Examples:
        random = torch.Generator().manual_seed(count)
        patches = torch.randn(count, *PATCH, generator=random).half()
        inputs = {"cls": torch.randn(count, DIM, generator=random), "patch": patches}
        own = torch.as_tensor(np.resize(LABELS.pairs[split], count))
        return Examples(np.arange(count), inputs, own).to(self.device)

    def begun(self) -> Method[Any]:
        torch.manual_seed(0)
        method = make(self.kind, small_options(self.kind), self.setting).to(self.device)
        images = self.examples("train", 24)
        method.start(Batch(images.inputs, images.compositions))
        return method

    def trained(self, epochs: int, partial: Path | None = None) -> tuple[Method[Any], list[dict[str, float]]]:
        method, val = self.begun(), self.examples("val", 12)
        settings, run = replace(SETTINGS, epochs=epochs), Run(self.kind, partial, "key")
        images = self.examples("train", 24)
        outcome = train(method, images, settings, 3, lambda it: validation_auc(it, val, LABELS), run)
        return method, outcome.history

    def saved(self, method: Method[Any], path: Path) -> Record:
        """A checkpoint as training leaves it."""
        val = self.examples("val", 12)
        tune(method, val, LABELS)
        chosen: dict[str, Calibration] = {
            world: calibrate(method, val, LABELS, world, self.setting.words, 5) for world in WORLDS
        }
        record = Record(self.kind, "", method.options, LABELS, {}, 3, 2, 0.5, calibration=chosen)
        save_checkpoint(path, method, record)
        return record

    def asked(self, path: Path, record: Record, world: World = "open") -> dict[str, Any]:
        """What a loaded checkpoint says of test images: its evaluation, its answers, its export."""
        method = load_checkpoint(path, self.setting, {}).to(self.device)
        test, columns, chosen = self.examples("test", 10), LABELS.target(world, "test"), record.calibration[world]
        live = passing(method, self.setting.words, chosen)
        live = np.ones(len(columns), dtype=bool) if live is None else live[columns]
        found = assess(Field.of(method, columns), test, LABELS, k=2, feasible_mask=live, top=3, bias=chosen.bias)
        scorer, terms = method.scorer(columns), method.evidence(columns)
        panel = Panel.of(LABELS, columns, live, chosen.bias, scorer, terms, method.probabilities)
        guesses = [guess for answer in panel.answers(test.inputs, 2) for guess in answer.top]
        tensors = method.portable(columns)
        exported = [] if tensors is None else [part.cpu() for _, part in portable.terms(tensors, test.inputs["cls"])]
        return {
            "label": found.evidence.rivals().label,
            "top": found.top,
            "pairs": [(guess.state, guess.object) for guess in guesses],
            "scores": np.array([guess.score for guess in guesses]),
            "exported": exported,
        }


def lived(life: Life, folder: Path, killed: bool) -> dict[str, Any]:
    """`killed` after its first epoch and started again, or not."""
    folder.mkdir()
    if killed:
        life.trained(1, folder / "partial")
    method, history = life.trained(2, folder / "partial")
    record = life.saved(method, folder / "checkpoint")
    chosen = {world: calibration.to_dict() for world, calibration in (record.calibration or {}).items()}
    return {"history": history, "chosen": chosen, "answers": life.asked(folder / "checkpoint", record)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_life_on_one_device_with_a_break_is_that_on_a_cpu_without(kind: str, tmp_path: Path) -> None:
    if not AVAILABLE:
        pytest.skip(f"torch {torch.__version__} has no devices made in Python")
    expected = lived(Life.of(kind, "cpu"), tmp_path / "here", killed=False)
    with Pretended():
        found = lived(Life.of(kind, Pretended.name), tmp_path / "there", killed=True)
    assert_alike(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_life_on_a_gpu_is_the_same_with_a_break_and_without(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        whole, broken = (
            lived(Life.of(kind, "cuda"), tmp_path / str(killed), killed=killed) for killed in (False, True)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert_alike(broken, whole)
    saved = [(tmp_path / str(killed) / "checkpoint").read_bytes() for killed in (False, True)]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", ["closed", pytest.param("open", marks=pytest.mark.slow)])
def test_steps_never_wait_and_do_as_much_whatever_the_images(kind: str, world: World, pretended: Pretended) -> None:
    """An epoch asks once, for its losses; a step's operations are those of one with half its images."""
    life, operations = Life.of(kind, pretended.name, world), list[int]()
    method, images = life.begun().train(), life.examples("train", 16)
    optimiser = make_optimiser(method, SETTINGS)
    state = State("", method, optimiser, make_schedule(optimiser, SETTINGS), torch.Generator(), life.device)
    batch = Batch(images.inputs, images.compositions, images.compositions.cpu().numpy())

    def show(step: int, losses: dict[str, float]) -> None:
        waits.append(pretended.synchronisations.total())
        operations.append(pretended.operations.total())
        pretended.operations.clear()

    trained = bool(method.groups())
    for size in (16, 16, 8) if trained else ():
        waits = list[int]()
        pretended.reset()
        loop._epoch(state, batch, replace(SETTINGS, batch_size=size), show)
        if len(operations) > 1:  # the first step made what lasts
            assert not any(waits)
            assert pretended.synchronisations.total() == 1
    assert len(set(operations[1:])) == trained
    assert all(count <= MOST for count in operations)


@pytest.mark.parametrize("name", ["mit-states", pytest.param("cgqa", marks=pytest.mark.slow)])
def test_a_step_takes_a_third_of_the_operations_it_took(name: str, pretended: Pretended) -> None:
    """`duplex` over a benchmark's own pairs and CLIP's twelve layers."""
    operations, images = AUDITED[name]
    labels = listed(name)
    tower = random_tower("ViT-L-14-quickgelu", width=64, device=pretended.name)
    method = Duplex(Setting(labels, {"cls": (tower.dim,)}, tower), DuplexOptions(width=16)).to(pretended.name)
    own = np.resize(labels.pairs["train"], 3 * images)
    features = torch.randn(len(own), tower.dim).to(pretended.name)
    batch = Batch({"cls": features}, torch.as_tensor(own).to(pretended.name), own)
    method.train().start(batch)
    optimiser = make_optimiser(method, replace(SETTINGS, batch_size=images))
    for rows in torch.randperm(len(own)).split(images):
        pretended.reset()
        optimiser_step(method, batch, rows, replace(SETTINGS, batch_size=images), optimiser)
    assert pretended.synchronisations == {}
    assert pretended.operations.total() <= operations / 3


def listed(name: str) -> LabelSpace:
    """The pairs that a benchmark's lists name."""
    shared = os.environ.get("DUPLEX_SHARED")
    if not shared:
        pytest.skip("DUPLEX_SHARED does not name the folder with the real pair lists")
    lists = {split: Path(shared) / "splits" / name / f"{split}_pairs.txt" for split in SPLITS}
    return LabelSpace.from_pairs({split: read_pairs(path) for split, path in lists.items()})


def assert_alike(found: Any, expected: Any) -> None:
    """Tables, lists and numbers; numbers up to what the order of sums leaves."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_alike(found[key], value)
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict | Tensor):
        for ours, theirs in zip(found, expected, strict=True):
            assert_alike(ours, theirs)
    elif isinstance(expected, float | np.ndarray | Tensor):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert found == expected
