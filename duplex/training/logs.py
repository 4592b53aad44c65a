"""What callers can pass to training besides options: functions called after steps and epochs, and logs.

A package registers a log as an entry point of the group `duplex.training_logs`: a function that
gets a folder and returns a `TrainingLog`. A built-in log imports its package when it is opened.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import torch

from duplex.errors import DuplexError, install_command, require
from duplex.methods.base import Method
from duplex.system.files import write_text


@dataclass(frozen=True)
class StepReport:
    """What the hook `on_step` receives after an optimiser step: its losses and learning rates."""

    method: Method[Any]
    epoch: int  # from 1
    step: int  # from 1, counted over all epochs
    losses: Mapping[str, float]  # mean of each loss term over the step's images
    rates: tuple[float, ...]  # learning rate of each parameter group


@dataclass(frozen=True)
class EpochReport:
    """What the hook `on_epoch` receives after an epoch's validation: losses, rates and metrics."""

    method: Method[Any]
    epoch: int  # 0: before training
    losses: Mapping[str, float]  # mean of each loss term over the epoch's images; empty in epoch 0
    rates: tuple[float, ...]  # learning rate of each parameter group
    validation: Mapping[str, float]  # metrics of the validation images, as fractions
    is_best: bool  # whether it is the best epoch so far


class TrainingLog(Protocol):
    """The interface of training logs, which receive losses, learning rates and validation metrics."""

    def step(self, report: StepReport) -> None:
        """Write an optimiser step's `report`: its losses and learning rates."""

    def epoch(self, report: EpochReport) -> None:
        """Write an epoch's `report`: mean losses and validation metrics."""

    def close(self) -> None:
        """Write what is not yet written; called once, even if training fails."""


@dataclass(frozen=True)
class TrainingHooks:
    """Callbacks, optimiser, learning-rate schedule and log that a caller may set for training."""

    on_step: Callable[[StepReport], object] | None = None
    on_epoch: Callable[[EpochReport], object] | None = None
    # Called with parameter groups
    optimiser: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    schedule: Callable[[int], float] | None = None  # epoch, from 0 -> factor of the learning rates
    log: TrainingLog | None = None

    @property
    def reads_steps(self) -> bool:
        """Whether a hook or log reads each step's losses; the CPU then waits for the GPU at each."""
        return self.on_step is not None or self.log is not None

    def step(self, report: StepReport) -> None:
        """Pass the report of an optimiser step to the function `on_step` and to the log."""
        if self.on_step is not None:
            with torch.random.fork_rng([]):  # the caller's random numbers do not change training
                self.on_step(report)
        if self.log is not None:
            self.log.step(report)

    def epoch(self, report: EpochReport) -> None:
        """Pass the report of an epoch to the function `on_epoch` and to the log."""
        if self.on_epoch is not None:
            with torch.random.fork_rng([]):
                self.on_epoch(report)
        if self.log is not None:
            self.log.epoch(report)


GROUP = "duplex.training_logs"
NONE = "none"
# Shows DVCLive's files to DVC
DVC_FILE = "metrics:\n- metrics.json\nplots:\n- plots/metrics:\n    x: step\n"


class NumberLog(ABC):
    """Base class of the built-in logs: turns reports into named numbers; subclasses write them."""

    @abstractmethod
    def write(self, group: str, place: int, values: Mapping[str, float]) -> None:
        """Write `values` by name, of step (group `train`) or epoch (group `epoch`) number `place`."""

    def step(self, report: StepReport) -> None:
        rates = {f"learning_rate_{n}": rate for n, rate in enumerate(report.rates)}
        if len(report.rates) == 1:
            rates = {"learning_rate": report.rates[0]}
        self.write("train", report.step, {**_loss_values(report), **rates})

    def epoch(self, report: EpochReport) -> None:
        validation = {f"val_{name}": value for name, value in report.validation.items()}
        self.write("epoch", report.epoch, {**_loss_values(report), **validation})


def _loss_values(report: StepReport | EpochReport) -> dict[str, float]:
    return {f"loss_{name}": value for name, value in report.losses.items()}


class DvcliveLog(NumberLog):
    """Training log in DVCLive's files: tables for `dvc plots`, latest values for `dvc exp show`."""

    def __init__(self, folder: Path) -> None:
        """Start a log in `folder`; an earlier log there is replaced."""
        live = import_module("dvclive").Live
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._live: Any = live(str(folder), save_dvc_exp=False, dvcyaml=None)
        except import_module("scmrepo.exceptions").SCMError as error:
            raise DuplexError(f"training.log is dvclive, which needs a commit ({error}); run `git commit`") from None
        write_text(folder / "dvc.yaml", DVC_FILE)  # beside the files, not the pipeline's dvc.yaml

    def write(self, group: str, place: int, values: Mapping[str, float]) -> None:
        self._live.step = place
        for name, value in values.items():
            self._live.log_metric(f"{group}/{name}", value)
        if group == "epoch":
            self._live.sync()

    def close(self) -> None:
        self._live.end()


class TensorboardLog(NumberLog):
    """Training log in TensorBoard's event files."""

    def __init__(self, folder: Path) -> None:
        """Start a log in `folder`; logs of earlier runs there are kept."""
        self._writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(self, group: str, place: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, place)
        if group == "epoch":
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLog(NumberLog):
    """Training log as a run of Weights & Biases, in the project WANDB_PROJECT, by default `duplex`."""

    def __init__(self, folder: Path) -> None:
        """Start a run named by the last three parts of `folder`; WANDB_MODE=offline sends nothing."""
        wandb: Any = import_module("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", "duplex")
        name = "/".join(folder.parts[-3:])
        self._run = wandb.init(project=project, name=name, dir=str(folder), settings=wandb.Settings(silent=True))
        for group in ("train", "epoch"):
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/number")

    def write(self, group: str, place: int, values: Mapping[str, float]) -> None:
        named = {f"{group}/{name}": value for name, value in values.items()}
        self._run.log({f"{group}/number": place, **named})

    def close(self) -> None:
        self._run.finish()


class MlflowLog(NumberLog):
    """Training log as a run of MLflow, on the server or in the folder MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path) -> None:
        """Start a run in the data set's experiment; `folder` ends in data set, method and seed."""
        self._mlflow: Any = import_module("mlflow")
        if not self._mlflow.tracking.is_tracking_uri_set():
            raise DuplexError(
                "`log: mlflow` needs the environment variable MLFLOW_TRACKING_URI; set it to, say, http://127.0.0.1:5000"
            )
        dataset, *names = folder.parts[-3:]
        client = self._mlflow.MlflowClient()
        known = client.get_experiment_by_name(dataset)
        experiment = client.create_experiment(dataset) if known is None else known.experiment_id
        self._run: str = client.create_run(experiment, run_name="/".join(names)).info.run_id

    def write(self, group: str, place: int, values: Mapping[str, float]) -> None:
        named = {f"{group}/{name}": value for name, value in values.items()}
        self._mlflow.log_metrics(named, step=place, run_id=self._run)

    def close(self) -> None:
        self._mlflow.MlflowClient().set_terminated(self._run)


BUILT_IN: dict[str, Callable[[Path], TrainingLog]] = {
    "dvclive": DvcliveLog,
    "tensorboard": TensorboardLog,
    "wandb": WandbLog,
    "mlflow": MlflowLog,
}


def open_log(name: str, folder: Path) -> TrainingLog | None:
    """Open the training log `name`, built-in or of a package, in a folder; None for `none`."""
    registered = {point.name: point for point in entry_points(group=GROUP)}
    require(name, dict.fromkeys([*BUILT_IN, *registered, NONE]), "training.log")
    if name == NONE:
        return None
    try:
        create = BUILT_IN[name] if name in BUILT_IN else registered[name].load()
        log: TrainingLog = create(folder)
    except ImportError as error:
        remedy = f"run `{install_command(name)}`" if name in BUILT_IN else "reinstall it, or set training.log to none"
        raise DuplexError(f"training.log is {name}, which cannot be imported ({error}); {remedy}") from None
    return log
