"""Cells of the grid data set x method x seed: what each stands on, which are made already, and whoever makes them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import traceback
from collections.abc import Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from duplex.config.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.errors import DuplexError
from duplex.stages import evaluate, train
from duplex.stages.inputs import Loaded
from duplex.system.files import sha256, write_text

STAGES = ("train", "evaluate")
OUTS = {"train": ("checkpoint", "history"), "evaluate": ("metrics", "curve", "predictions")}


@dataclass(frozen=True)
class Cell:
    dataset: str
    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.dataset} {self.method} {self.seed}"

    def stage(self, name: str) -> str:
        """As dvc.yaml calls it."""
        return f"{name}@{self.dataset}-{self.method}-{self.seed}"


@dataclass(frozen=True)
class Task:
    """A cell to be made: where its files go, and what they stand on, as one digest a stage."""

    cell: Cell
    out: Path
    keys: dict[str, str]
    train: bool = True  # False: its checkpoint is there, evaluation alone is missing


@dataclass(frozen=True)
class Made:
    """A cell that was tried. `failed` is the sentence that says why it could not be made."""

    task: Task
    seconds: float
    said: str = ""
    failed: str | None = None


def keys_of(record: dict[str, Any], inputs: dict[str, Any], params: Params, dataset: str) -> dict[str, str]:
    """What the stages of a run depend on, as in dvc.yaml: `record` is the run's plan, `inputs` the data set's files."""
    settings = params.evaluation.model_dump(mode="json")
    known = {"inputs": inputs, "encoder": params.dataset(dataset).encoder.model_dump(), "torch": torch.__version__}
    chosen = {key: settings[key] for key in ("thresholds", "feasibility", "word_vectors")}
    augmentation = params.augmentation(dataset)
    shown = {} if augmentation is None else augmentation.identity
    trained = {**known, "plan": record["train"], "views": shown, **chosen}
    evaluated = {**trained, "evaluate": record["evaluate"], "evaluation": settings}
    return {"train": _digest(trained), "evaluate": _digest(evaluated)}


def inputs_of(dataset: str, paths: ArtifactPaths) -> dict[str, Any]:
    """The files that all runs of a data set read. Features are large: their size and time stand for them."""
    for path, stage in ((paths.manifest, "prepare"), (paths.labels, "prepare"), (paths.features, "extract")):
        if not path(dataset).exists():
            raise DuplexError(f"{path(dataset)} does not exist; `duplex {stage} --dataset {dataset}` writes it")
    large = [place.stat() for place in (paths.features(dataset), paths.views(dataset)) if place.exists()]
    small = {path.name: sha256(path) for path in (paths.manifest(dataset), paths.labels(dataset))}
    return {**small, "features": [number for file in large for number in (file.st_size, file.st_mtime_ns)]}


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def mark_of(out: Path) -> Path:
    """Beside a cell's files, until DVC has them: the keys that they were made with, and their hashes."""
    return out / "swept.partial"


def missing_stages(task: Task) -> tuple[str, ...]:
    """The stages that an earlier sweep did not make, or made of something else."""
    try:
        mark = json.loads(mark_of(task.out).read_text(encoding="utf-8"))
        made = [name for name in STAGES if mark[name] == [task.keys[name], _hashes(task.out, name)]]
    except (OSError, ValueError, KeyError, TypeError):
        made = []
    return () if len(made) == 2 else ("evaluate",) if made == ["train"] else STAGES


def _hashes(out: Path, stage: str) -> list[str]:
    return [sha256(getattr(RunPaths(out), name)) for name in OUTS[stage]]


@dataclass
class Maker:
    """Makes cells one after another, in one process; what they read is loaded once a data set."""

    params: Params
    paths: ArtifactPaths
    threads: int  # what `threads: auto` means: the number that a stage's own process would take
    inputs: Loaded = field(default_factory=Loaded)

    def make(self, task: Task) -> Made:
        began, said = time.perf_counter(), io.StringIO()
        with redirect_stderr(said):  # no bar of its own: others are at work beside it
            failed = self._tried(task)
        return Made(task, time.perf_counter() - began, said.getvalue(), failed)

    def _tried(self, task: Task) -> str | None:
        torch.set_num_threads(self.threads)
        try:
            self._make(task)
        except DuplexError as error:
            return str(error)
        except Exception as error:
            if os.environ.get("DUPLEX_DEBUG"):
                traceback.print_exc()
            first = next(iter(str(error).splitlines()), "")
            alone = f"duplex train -d {task.cell.dataset} -m {task.cell.method} -s {task.cell.seed}"
            return f"{type(error).__name__}: {first}; `{alone}` shows more"
        return None

    def _make(self, task: Task) -> None:
        cell, mark = task.cell, mark_of(task.out)
        where = (self.params, cell.dataset, cell.method, cell.seed, self.paths, RunPaths(task.out), self.inputs)
        record = {}
        if task.train:
            mark.unlink(missing_ok=True)
            train.run(*where)
        record["train"] = [task.keys["train"], _hashes(task.out, "train")]
        _write(mark, record)
        evaluate.run(*where)
        record["evaluate"] = [task.keys["evaluate"], _hashes(task.out, "evaluate")]
        _write(mark, record)


def _write(mark: Path, record: dict[str, Any]) -> None:
    write_text(mark, json.dumps(record) + "\n")


def forget(tasks: Iterable[Task]) -> None:
    """DVC has them: it knows from here on whether they are as they should be."""
    for task in tasks:
        mark_of(task.out).unlink(missing_ok=True)
