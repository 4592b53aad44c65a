"""Find the stages (train, evaluate) that each run of a sweep (data set, method, seed) still lacks, and execute them."""

from __future__ import annotations

import io
import json
import os
import traceback
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.errors import DuplexError
from duplex.project import stages
from duplex.project import stages as train
from duplex.project.stamps import run_records
from duplex.system.files import json_digest, sha256, write_text
from duplex.training.inputs import InputsCache

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
        """Return the name in dvc.yaml of this run's stage `name`, "train" or "evaluate".

        A run that multiplies the probabilities of finished runs has a single stage, `product`, in place of both.
        """
        return f"{'product' if self.combines else name}@{self.dataset}-{self.method}-{self.seed}"


@dataclass(frozen=True)
class RunTask:
    """A run to train or evaluate, with digests of its inputs and options, by which finished stages are recognised."""

    run: RunId
    out: Path  # folder of its files
    keys: dict[str, str]  # stage -> digest of everything that the stage depends on
    train: bool = True  # False: its checkpoint is up to date, only evaluation is missing


@dataclass(frozen=True)
class RunResult:
    """Result of executing a run (one method, data set and seed): what it printed on stderr, and its error."""

    task: RunTask
    output: str = ""  # what it printed to stderr
    error: str | None = None  # why it failed; None: it succeeded


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


@dataclass
class RunExecutor:
    """Trains and evaluates runs one after another in one process; inputs are loaded once per data set."""

    params: Params
    paths: ArtifactPaths
    threads: int  # number of CPU threads for `threads: auto`: the number that a process of its own would use
    inputs: InputsCache = field(default_factory=InputsCache)

    def execute(self, task: RunTask) -> RunResult:
        """Train (if `task.train`) and evaluate a run; return its `RunResult`. Errors are returned in it, not raised."""
        output, error = io.StringIO(), None
        torch.set_num_threads(self.threads)
        with redirect_stderr(output):  # several processes share a terminal: none shows its own progress bar
            try:
                self._execute(task)
            except DuplexError as failure:
                error = str(failure)
            except Exception as failure:
                if os.environ.get("DUPLEX_DEBUG"):
                    traceback.print_exc()
                first = next(iter(str(failure).splitlines()), "")
                reason = f"{type(failure).__name__}: {first}"
                command = f"duplex train -d {task.run.dataset} -m {task.run.method} -s {task.run.seed}"
                error = f"{reason}; `{command}` shows more"
        if error is not None:  # a method's code may have written into them
            self.inputs = InputsCache()
        return RunResult(task, output.getvalue(), error)

    @staticmethod
    def lost(task: RunTask, reason: str) -> RunResult:
        """Return a result that reports a run as failed because the process that executed it died."""
        return RunResult(task, error=reason)

    def _execute(self, task: RunTask) -> None:
        run, files = task.run, RunPaths(task.out)
        mark: dict[str, object] = {"run": str(task.run)}
        arguments = (self.params, run.dataset, run.method, run.seed, self.paths, files, self.inputs)
        if task.train:
            files.sweep_mark.unlink(missing_ok=True)
            train.train_stage(*arguments)
        for stage in STAGES:
            if stage == "evaluate":
                stages.evaluate_stage(*arguments)
            mark[stage] = [task.keys[stage], _hashes(task.out, stage)]
            write_text(files.sweep_mark, json.dumps(mark) + "\n")


def _hashes(out: Path, stage: str) -> list[str]:
    return [sha256(getattr(RunPaths(out), name)) for name in OUTPUTS[stage]]
