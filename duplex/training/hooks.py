"""Functions and objects that a caller passes to training: called per step and epoch, or used in place of options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from duplex.methods.base import Method


@dataclass(frozen=True)
class StepReport:
    """Argument of the hook `on_step`: losses and learning rates of the optimiser step that was just taken."""

    method: Method[Any]
    epoch: int  # from 1
    step: int  # from 1, counted over all epochs
    losses: Mapping[str, float]  # mean of each loss term over the step's images
    rates: tuple[float, ...]  # learning rate of each parameter group


@dataclass(frozen=True)
class EpochReport:
    """Argument of the hook `on_epoch`: losses, learning rates and validation metrics of the epoch that just ended."""

    method: Method[Any]
    epoch: int  # 0: before training
    losses: Mapping[str, float]  # mean of each loss term over the epoch's images; empty in epoch 0
    rates: tuple[float, ...]  # learning rate of each parameter group
    validation: Mapping[str, float]  # metrics of the validation images, as fractions
    is_best: bool  # whether it is the best epoch so far


class TrainingLog(Protocol):
    """Protocol of training logs, which receive losses, learning rates and validation metrics while a run trains."""

    def step(self, report: StepReport) -> None:
        """Write the report of an optimiser step to the log.

        report: losses and learning rates of the step.
        """

    def epoch(self, report: EpochReport) -> None:
        """Write the report of an epoch to the log.

        report: mean losses and validation metrics of the epoch.
        """

    def close(self) -> None:
        """Write everything that is not yet written; called once, also if training fails."""


@dataclass(frozen=True)
class TrainingHooks:
    """Functions and objects that a caller passes to training: callbacks, an optimiser, a rate schedule, a log.

    A field that is None: no callback, no log, or the optimiser or schedule that the training options choose.
    """

    on_step: Callable[[StepReport], object] | None = None
    on_epoch: Callable[[EpochReport], object] | None = None
    optimiser: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None  # called with parameter groups
    schedule: Callable[[int], float] | None = None  # epoch (from 0) -> factor of the learning rates
    log: TrainingLog | None = None

    @property
    def reads_steps(self) -> bool:
        """Whether a hook or log reads the losses of each step; the CPU then waits for the GPU once per step."""
        return self.on_step is not None or self.log is not None

    def step(self, report: StepReport) -> None:
        """Call the function `on_step` and the training log with the report of an optimiser step."""
        if self.on_step is not None:
            with torch.random.fork_rng([]):  # random numbers that the caller draws do not change training
                self.on_step(report)
        if self.log is not None:
            self.log.step(report)

    def epoch(self, report: EpochReport) -> None:
        """Call the function `on_epoch` and the training log with the report of an epoch."""
        if self.on_epoch is not None:
            with torch.random.fork_rng([]):
                self.on_epoch(report)
        if self.log is not None:
            self.log.epoch(report)
