"""Train one method on the inputs of a data set: the core that `duplex.fit` and the stage `train` share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from duplex.artifacts import RunPaths
from duplex.config.method_entries import MethodEntry
from duplex.config.params import EvaluationParams, Params
from duplex.features.examples import Examples
from duplex.labels import World
from duplex.library.inputs import InputRequest, RunInputs
from duplex.methods.base import Batch, Inspectable, Method, TaskContext
from duplex.methods.registry import find_method, make_method, method_source
from duplex.options import FinetuneOptions, Options, TrainingOptions
from duplex.system.files import write_json, write_text
from duplex.system.plugins import provider
from duplex.training.calibration import Calibration, calibrate
from duplex.training.checkpoint import Record, save_checkpoint
from duplex.training.confidence import fit_confidence
from duplex.training.known_images import KnownImages
from duplex.training.loop import ResumePoint, TrainingResult, train
from duplex.training.method_checks import checked, read_only
from duplex.training.scoring import tune, validation_auc


@dataclass(frozen=True)
class MethodSpec:
    """A method with everything that decides how it is trained on one data set."""

    name: str  # for messages
    kind: str
    options: Options
    training: TrainingOptions
    worlds: tuple[World, ...]  # in which it is calibrated and evaluated
    trained_for: World  # the world whose candidates are used in training
    finetune: FinetuneOptions | None = None

    @classmethod
    def of(cls, params: Params, dataset: str, method: str) -> MethodSpec:
        """Return the specification of a method of params.yaml on a data set of params.yaml."""
        entry: MethodEntry = params.entry(method)
        return cls(
            method,
            entry.kind,
            params.method(method, dataset),
            params.training(dataset, method),
            entry.worlds,
            entry.trained_for,
            params.finetune(method, dataset),
        )

    @property
    def request(self) -> InputRequest:
        """Request for the inputs that the method's training reads."""
        needs = find_method(self.kind).needs(self.options)
        return InputRequest(needs, self.training.precision, self.finetune, self.training.memory)


@dataclass(frozen=True)
class Run:
    """A trained method with its checkpoint metadata and history; `duplex.fit` returns it."""

    name: str
    method: Method[Any]  # holds the tensors of its best epoch
    record: Record
    training: TrainingOptions
    result: TrainingResult

    @property
    def val_auc(self) -> float:
        """Validation AUC in percent, by which the epoch was chosen."""
        return 100 * self.record.val_auc

    @property
    def history(self) -> pd.DataFrame:
        """Training history, one row per epoch: means of the loss terms and the validation AUC (a fraction)."""
        return pd.DataFrame(self.result.history)

    def save(self, folder: str | Path) -> Path:
        """Write checkpoint, history and timing into a folder that `Recognizer.load` reads; return the folder.

        folder: made if it does not exist; files of an earlier run are replaced.
        """
        files = RunPaths(Path(folder))
        save_checkpoint(files.checkpoint, self.method, self.record)
        write_text(files.history, self.history.to_csv(index=False, lineterminator="\n"))
        write_json(files.timing, self.result.timing)
        return files.root

    def __repr__(self) -> str:
        return f"Run({self.name}, seed {self.record.seed}, epoch {self.record.epoch}, val AUC {self.val_auc:.2f})"


def train_method(
    spec: MethodSpec,
    inputs: RunInputs,
    seed: int,
    device: torch.device,
    settings: EvaluationParams,
    resume: ResumePoint = ResumePoint(),
) -> Run:
    """Train a method, keep the epoch with the best validation AUC, and calibrate on validation images."""
    method = start_method(spec.kind, spec.options, inputs.task(spec.trained_for), inputs, seed, device)
    images, val = (inputs.examples[split].to(device) for split in ("train", "val"))
    result = train(method, images, spec.training, seed, lambda m: validation_auc(m, val, inputs.labels), resume)
    tune(method, val, inputs.labels)
    record = Record(
        kind=spec.kind,
        provider=provider(method_source(spec.kind)),
        options=spec.options,
        labels=inputs.labels,
        encoder=inputs.encoder,
        seed=seed,
        epoch=result.best_epoch,
        val_auc=validation_auc(method, val, inputs.labels),
        world=spec.trained_for,
        calibration=_calibrate(spec, settings, method, inputs, val),
        inspectable=checked(f"{method.class_name}.inspectable()", method.inspectable(), Inspectable).names,
        finetune=spec.finetune,
        confidence=fit_confidence(method, val, inputs.labels),
        known_images=KnownImages.fit(images, val, inputs.labels) if "cls" in images.inputs else None,
    )
    return Run(spec.name, method, record, spec.training, result)


def start_method(
    kind: str, options: Options, task: TaskContext, inputs: RunInputs, seed: int, device: torch.device
) -> Method[Any]:
    """Return an untrained method, initialised from the training images."""
    torch.manual_seed(seed)
    method = make_method(kind, options, task).to(device)
    images = inputs.examples["train"].to(device)
    with read_only(f"{method.class_name}.start()", images.inputs):
        method.start(Batch(images.inputs, images.compositions))
    return method


def _calibrate(
    spec: MethodSpec, settings: EvaluationParams, method: Method[Any], inputs: RunInputs, val: Examples
) -> dict[str, Calibration]:
    """Choose bias and feasibility threshold on validation data, for every world of the method."""
    thresholds, feasibility = settings.thresholds, settings.feasibility
    if feasibility == "likelihood" and "open" in spec.worlds and method.likelihood() is None:
        print(f"{spec.name} has no likelihood of compositions; feasibility is by words", file=sys.stderr)
    return {
        world: calibrate(
            method, val, inputs.labels, world, inputs.words if world == "open" else None, thresholds, feasibility
        )
        for world in spec.worlds
    }
