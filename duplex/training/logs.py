"""Training logs by name: DVCLive, TensorBoard, and those that other packages register.

A package registers a log with an entry point of the group `duplex.training_logs`, a function from a folder to a
`TrainingLog`. Built-in logs import their packages when they are opened.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from duplex.errors import DuplexError, install_command, require
from duplex.system.files import write_text
from duplex.training.hooks import EpochReport, StepReport, TrainingLog

GROUP = "duplex.training_logs"
NONE = "none"
DVC_FILE = "metrics:\n- metrics.json\nplots:\n- plots/metrics:\n    x: step\n"  # shows DVCLive's files to DVC


class DvcliveLog:
    """Training log in DVCLive's files: tables for `dvc plots`, and last values for `dvc exp show`."""

    def __init__(self, folder: Path) -> None:
        """Start a log in `folder`; an earlier log there is replaced."""
        live = import_module("dvclive").Live
        folder.mkdir(parents=True, exist_ok=True)
        self._live: Any = live(str(folder), save_dvc_exp=False, dvcyaml=None)
        write_text(folder / "dvc.yaml", DVC_FILE)  # beside the files: the pipeline's dvc.yaml stays as it is

    def step(self, report: StepReport) -> None:
        self._live.step = report.step
        for name, value in {**_losses(report), **_rates(report)}.items():
            self._live.log_metric(f"train/{name}", value)

    def epoch(self, report: EpochReport) -> None:
        self._live.step = report.epoch
        for name, value in {**_losses(report), **_validation(report)}.items():
            self._live.log_metric(f"epoch/{name}", value)
        self._live.sync()

    def close(self) -> None:
        self._live.end()


class TensorboardLog:
    """Training log in TensorBoard's event files."""

    def __init__(self, folder: Path) -> None:
        """Start a log in `folder`; logs of earlier runs there are kept."""
        self._writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def step(self, report: StepReport) -> None:
        for name, value in {**_losses(report), **_rates(report)}.items():
            self._writer.add_scalar(f"train/{name}", value, report.step)

    def epoch(self, report: EpochReport) -> None:
        for name, value in {**_losses(report), **_validation(report)}.items():
            self._writer.add_scalar(f"epoch/{name}", value, report.epoch)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


BUILT_IN: dict[str, Callable[[Path], TrainingLog]] = {"dvclive": DvcliveLog, "tensorboard": TensorboardLog}


def open_log(name: str, folder: Path) -> TrainingLog | None:
    """Return a new training log that writes into a folder; None for the name `none`.

    name: `dvclive`, `tensorboard`, `none` or the name of a package's entry point in the group `duplex.training_logs`.

    Raises `UsageError` for an unknown name, and `DuplexError` with the install command for a package that is missing.
    """
    registered = {point.name: point for point in entry_points(group=GROUP)}
    require(name, dict.fromkeys([*BUILT_IN, *registered, NONE]), "training.log")
    if name == NONE:
        return None
    try:
        create = BUILT_IN[name] if name in BUILT_IN else registered[name].load()
        log: TrainingLog = create(folder)
    except ImportError as error:
        remedy = install_command(name) if name in BUILT_IN else "install its package again, or set it to none"
        raise DuplexError(f"training.log is {name}, which cannot be imported ({error}); `{remedy}`") from None
    return log


def _losses(report: StepReport | EpochReport) -> dict[str, float]:
    return {f"loss_{name}": value for name, value in report.losses.items()}


def _rates(report: StepReport) -> dict[str, float]:
    single = len(report.rates) == 1
    return {"learning_rate" if single else f"learning_rate_{n}": rate for n, rate in enumerate(report.rates)}


def _validation(report: EpochReport) -> dict[str, float]:
    return {f"val_{name}": value for name, value in report.validation.items()}
