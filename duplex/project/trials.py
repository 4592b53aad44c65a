"""Tasks that worker processes execute, and the stages (train, evaluate) that a run of a sweep still lacks."""

from __future__ import annotations

import io
import json
import os
import traceback
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.errors import DuplexError
from duplex.project import stages
from duplex.project.stamps import run_records
from duplex.project.train import train_stage
from duplex.system.files import json_digest, sha256, write_text
from duplex.training.inputs import InputsCache, LoadInputs

STAGES = ("train", "evaluate")
OUTPUTS = {"train": ("checkpoint", "history"), "evaluate": ("metrics", "curve", "predictions")}


@dataclass(frozen=True)
class RunId:
    """A run, identified by data set, method and seed."""

    dataset: str
    method: str
    seed: int
    combines: bool = False  # whether its method combines other runs, which are executed first

    def __str__(self) -> str:
        return f"{self.dataset} {self.method} {self.seed}"

    def stage(self, name: str) -> str:
        """The name in dvc.yaml of this run's stage `name`, "train" or "evaluate".

        A run that multiplies the probabilities of finished runs has a single stage, `product`, in place of both.
        """
        return f"{'product' if self.combines else name}@{self.dataset}-{self.method}-{self.seed}"


@dataclass(frozen=True)
class RunTask:
    """A run of the pipeline to train or evaluate, with digests by which finished stages are recognised."""

    run: RunId
    out: Path  # folder of its files
    keys: dict[str, str]  # stage -> digest of everything that the stage depends on
    train: bool = True  # False: its checkpoint is up to date, only evaluation is missing

    def execute(self, params: Params, paths: ArtifactPaths, load: LoadInputs) -> None:
        run, files = self.run, RunPaths(self.out)
        mark: dict[str, object] = {"run": str(run)}
        if self.train:
            files.sweep_mark.unlink(missing_ok=True)
            train_stage(params, run.dataset, run.method, run.seed, paths, files, load)
        for stage in STAGES:
            if stage == "evaluate":
                stages.evaluate_stage(params, run.dataset, run.method, run.seed, paths, files, load)
            mark[stage] = [self.keys[stage], _hashes(self.out, stage)]
            write_text(files.sweep_mark, json.dumps(mark) + "\n")


def stage_keys(params: Params, dataset: str, method: str, files: dict[str, Any]) -> dict[str, str]:
    """Return stage -> digest of everything that the stages `train` and `evaluate` of a run depend on.

    files: hashes of the data set's files, the result of `file_identity`.
    """
    records = run_records(params, dataset, method)
    train = {"record": records["train"], "files": files, "torch": torch.__version__}
    evaluate = {**train, "evaluate": records["evaluate"]}
    return {"train": json_digest(train), "evaluate": json_digest(evaluate)}


def file_identity(dataset: str, paths: ArtifactPaths) -> dict[str, Any]:
    """Return file -> hash of its content, for the files that all runs of a data set read.

    For the feature cache, size and modification time replace the hash. Raises `DuplexError` if a file is missing.
    """
    for path, stage in ((paths.manifest, "prepare"), (paths.labels, "prepare"), (paths.features, "extract")):
        if not path(dataset).exists():
            raise DuplexError(f"{path(dataset)} does not exist; `duplex {stage} --dataset {dataset}` writes it")
    cache = paths.features(dataset).stat()
    small = {path.name: sha256(path) for path in (paths.manifest(dataset), paths.labels(dataset))}
    return {**small, "cache": [cache.st_size, cache.st_mtime_ns]}


def missing_stages(task: RunTask) -> tuple[str, ...]:
    """Return the stages ("train", "evaluate") that a run still needs: never executed in a sweep, or inputs changed."""
    try:
        mark = json.loads(RunPaths(task.out).sweep_mark.read_text(encoding="utf-8"))
        if mark["run"] != str(task.run):  # copied from another run
            return STAGES
        complete = [name for name in STAGES if mark[name] == [task.keys[name], _hashes(task.out, name)]]
    except (OSError, ValueError, KeyError, TypeError):
        complete = []
    return () if len(complete) == len(STAGES) else ("evaluate",) if complete == ["train"] else STAGES


class Task(Protocol):
    """What a worker executes: a run of the pipeline, or a trial of `duplex tune`."""

    def execute(self, params: Params, paths: ArtifactPaths, load: LoadInputs) -> Any:
        """Train and return what the task's `Outcome` tells."""


@dataclass(frozen=True)
class Outcome:
    """What became of a task: what it returned, what it printed on stderr, and why it failed."""

    task: Any
    value: Any = None
    output: str = ""
    error: str | None = None  # None: it succeeded


@dataclass
class Executor:
    """Executes tasks one after another in one process; inputs are loaded once per data set."""

    params: Params
    paths: ArtifactPaths
    threads: int  # number of CPU threads for `threads: auto`: the number that a process of its own would use
    load: LoadInputs = field(default_factory=InputsCache)

    def execute(self, task: Task) -> Outcome:
        """Execute a task. An error becomes part of the outcome."""
        output = io.StringIO()
        torch.set_num_threads(self.threads)
        try:
            with redirect_stderr(output):  # several processes share a terminal: none shows its own progress bar
                return Outcome(task, task.execute(self.params, self.paths, self.load), output.getvalue())
        except Exception as failure:
            self.load = InputsCache()  # a method's code may have written into the inputs
            error = str(failure)
            if not isinstance(failure, DuplexError):
                first = next(iter(error.splitlines()), "")
                error = f"{type(failure).__name__}: {first}; with DUPLEX_DEBUG=1 its traceback is shown"
                if os.environ.get("DUPLEX_DEBUG"):
                    output.write(traceback.format_exc())
            return Outcome(task, None, output.getvalue(), error)


def _hashes(out: Path, stage: str) -> list[str]:
    return [sha256(getattr(RunPaths(out), name)) for name in OUTPUTS[stage]]
