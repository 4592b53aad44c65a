"""Tasks that worker processes execute, and the stages (train, evaluate) that a run of a sweep still lacks."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.errors import DuplexError
from duplex.project.stages import evaluate_stage
from duplex.project.stamps import RUN_STAGES, run_difference
from duplex.project.train import train_stage
from duplex.training.inputs import InputsCache, LoadInputs


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
        """The name in dvc.yaml of this run's stage; a product of finished runs has a single one, `product`."""
        return f"{'product' if self.combines else name}@{self.dataset}-{self.method}-{self.seed}"


@dataclass(frozen=True)
class RunTask:
    """A run of the pipeline to train or evaluate."""

    run: RunId
    train: bool = True  # False: its checkpoint is up to date, only evaluation is missing

    def execute(self, params: Params, paths: ArtifactPaths, load: LoadInputs) -> None:
        run = self.run
        if self.train:
            train_stage(params, run.dataset, run.method, run.seed, paths, load=load)
        evaluate_stage(params, run.dataset, run.method, run.seed, paths, load=load)


def find_missing(params: Params, runs: Iterable[RunId], paths: ArtifactPaths) -> list[RunTask]:
    """A task for each run of which something is missing, or was made from anything else than it should be."""
    tasks = []
    for run in runs:
        for stage in RUN_STAGES:
            if run_difference(params, run.dataset, run.method, run.seed, paths, (stage,)):
                tasks.append(RunTask(run, train=stage == "train"))
                break
    return tasks


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
