"""Trials: trainings that validation compares, each in a folder named by a digest and never done twice."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from duplex.artifacts import RunPaths
from duplex.config.params import EvaluationParams
from duplex.evaluation.curve import AucComponents, Margins
from duplex.features.tokens import Examples
from duplex.methods.base import Method
from duplex.system.files import json_digest, write_text
from duplex.training.checkpoint import TrainingRecord, load_checkpoint, read_checkpoint_header, read_novelty
from duplex.training.inputs import InputRequest, RunInputs
from duplex.training.logs import TrainingHooks
from duplex.training.loop import ResumePoint, TrainingResult
from duplex.training.run import MethodSpec, TrainedMethod, train_run


@dataclass(frozen=True)
class Trial:
    """A method with options and a seed, to be trained on the data set of a `Trials` store."""

    name: str  # for messages, such as `2 blocks, rate 0.0003`
    spec: MethodSpec
    seed: int = 0
    seconds: float | None = None  # that training may take; None: however long its epochs take

    @property
    def blocks(self) -> int:
        """How many of the image tower's last blocks are fine-tuned; 0: none."""
        return 0 if self.spec.finetune is None else self.spec.finetune.depth

    @property
    def slug(self) -> str:
        """The trial's name with hyphens instead of spaces and commas, for the name of a folder."""
        return re.sub(r"[^\w.]+", "-", self.name)

    @property
    def rate(self) -> float | None:
        """Learning rate of the fine-tuned blocks; None without any, or if it is the method's."""
        return None if self.spec.finetune is None else self.spec.finetune.learning_rate


@dataclass(frozen=True)
class TrialResult:
    """The outcome of a trial: its best epoch, and its results on validation images."""

    name: str
    margins: Margins  # of the validation images, closed world
    epoch: int  # the best one
    auc_all: float | None = None  # percent, all pairs are candidates; None: not for the open world
    accuracy: float | None = None  # percent, of the most probable answers
    # percent, of the images of seen and of unseen pairs
    accuracy_seen: float | None = None
    accuracy_unseen: float | None = None
    seconds: float = 0.0  # of training and validation
    seconds_per_epoch: float = 0.0

    @property
    def components(self) -> AucComponents:
        return AucComponents.of(self.margins)

    @property
    def mean_accuracy(self) -> float:
        """Mean of the accuracies on seen and on unseen pairs, in percent; 0 if they are not measured."""
        return ((self.accuracy_seen or 0.0) + (self.accuracy_unseen or 0.0)) / 2

    @property
    def auc(self) -> float:
        """Validation AUC, in percent."""
        return 100 * (self.components.auc or 0.0)


@dataclass(frozen=True)
class Trials:
    """Store of the trials on one data set, each with a folder of its own inside `folder`.

    Results and tensors are always read from files, so that an interrupted search chooses equally.
    """

    folder: Path
    read: Callable[[InputRequest], RunInputs]  # returns the data set's inputs for a request
    device: torch.device
    settings: EvaluationParams
    label: str = ""  # name of what is trained, for the progress
    key: str = ""  # hash of what the trials depend on besides their methods and seeds
    # the accuracies of a result, on validation images
    accuracies: Callable[[TrainedMethod, Examples], dict[str, float]] | None = None
    hooks: Callable[[Trial], TrainingHooks] = lambda trial: TrainingHooks()
    clock: Callable[[], float] = time.perf_counter

    def files(self, trial: Trial) -> RunPaths:
        """Paths of a trial's checkpoint and results."""
        spec = trial.spec
        options = spec.options.to_dict()
        finetune = None if spec.finetune is None else spec.finetune.to_dict()
        key = [self.key, spec.kind, options, spec.training.to_dict(), finetune, trial.seed, trial.seconds]
        return RunPaths(self.folder / json_digest(key)[:12])

    def result(self, trial: Trial) -> TrialResult:
        """A trial's result; trains it if files are missing."""
        files = self.files(trial)
        result = files.root / "result.json"
        margins = files.root / "margins.npz"
        if not result.is_file():
            self._train(trial, files, result, margins)
        with np.load(margins) as arrays:
            return TrialResult(trial.name, Margins(**arrays), **json.loads(result.read_text("utf-8")))

    def _train(self, trial: Trial, files: RunPaths, result: Path, margins: Path) -> None:
        start = self.clock()
        spec = trial.spec
        inputs = self.read(spec.request)
        label = f"{self.label}, {trial.name}" if self.label else trial.name
        resume = ResumePoint(label, files.unfinished_training, files.root.name, trial.seconds, self.clock)
        hooks = self.hooks(trial)
        run = train_run(spec, inputs, trial.seed, self.device, self.settings, resume, hooks)
        accuracies = {}
        if self.accuracies is not None:
            accuracies = self.accuracies(run, inputs.examples["val"].to(self.device))
        run.write(files)
        assert run.margins is not None
        np.savez(margins, **asdict(run.margins))
        record = {
            "epoch": run.record.epoch,
            "auc_all": run.val_auc_all,
            **accuracies,
            "seconds": self.clock() - start,
            "seconds_per_epoch": run.result.timing["seconds_per_epoch"],
        }
        write_text(result, json.dumps(record) + "\n")
        files.unfinished_training.unlink(missing_ok=True)

    def load(self, trial: Trial) -> tuple[TrainingRecord, Method[Any], RunInputs]:
        """Load a finished trial: its metadata, the trained method and the inputs of its training."""
        files = self.files(trial)
        inputs = self.read(trial.spec.request)
        header = read_checkpoint_header(files.checkpoint)
        method = load_checkpoint(header, inputs.context(), inputs.encoder).to(self.device)
        record = replace(header.record, novelty=read_novelty(header, self.device))
        return record, method, inputs

    def run(self, trial: Trial) -> TrainedMethod:
        """The run of a finished trial, restored from files."""
        record, method, _ = self.load(trial)
        files = self.files(trial)
        history: list[dict[str, float]] = []
        for row in pd.read_csv(files.history).to_dict("records"):
            history.append({str(name): float(value) for name, value in row.items()})
            history[-1]["epoch"] = int(row["epoch"])
        timing = json.loads(files.timing.read_text(encoding="utf-8"))
        result = TrainingResult(record.epoch, record.val_auc, history, timing, record.selected_by)
        return TrainedMethod(trial.spec.name, method, record, trial.spec.training, result)
