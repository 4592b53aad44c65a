"""Train one method on a data set: the code that `duplex.fit` and the pipeline stage `train` share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from duplex.artifacts import RunPaths
from duplex.config.method_entries import MethodEntry
from duplex.config.params import EvaluationParams, Params
from duplex.errors import UsageError, require
from duplex.features.examples import Examples
from duplex.labels import World
from duplex.library.inputs import InputRequest, RunInputs
from duplex.methods.base import Batch, Method, MethodContext
from duplex.methods.registry import find_method, make_method, method_code, method_source, parse_options
from duplex.options import FinetuneOptions, Options, TrainingOptions
from duplex.system.files import checked_path, refuse_existing, sha256, write_json, write_text
from duplex.system.plugins import provider
from duplex.training.calibration import FEWEST_PAIRS, Calibration, calibrate, fit_confidence, unseen_pairs
from duplex.training.checkpoint import Record, save_checkpoint
from duplex.training.hooks import TrainingHooks
from duplex.training.known_images import KnownImages
from duplex.training.loop import ResumePoint, TrainingResult, train
from duplex.training.scoring import tune, validation_auc
from duplex.training.selection import ChooseBy, Validation, metric_name

EXPORTED_MODEL = "config.json"  # a folder with this file is read as an exported model


@dataclass(frozen=True)
class MethodSpec:
    """A method to train on one data set: kind (class), options, training options, and worlds (closed, open or both)."""

    name: str  # for messages
    kind: str
    options: Options
    training: TrainingOptions
    worlds: tuple[World, ...]  # in which it is calibrated and evaluated
    trained_for: World  # the world whose candidates are used in training
    finetune: FinetuneOptions | None = None

    @classmethod
    def of(cls, params: Params, dataset: str, method: str) -> MethodSpec:
        """Return a method of params.yaml with its options on a data set, including the entry `per_dataset`.

        With `finetune: auto`, the result's `finetune` is None: training chooses the number of fine-tuned blocks.
        """
        entry: MethodEntry = params.entry(method)
        finetune = params.finetune(method, dataset)
        return cls(
            method,
            entry.kind,
            params.method(method, dataset),
            params.training(dataset, method),
            entry.worlds,
            entry.trained_for,
            finetune if isinstance(finetune, FinetuneOptions) else None,
        )

    def with_settings(self, settings: Mapping[str, Any]) -> MethodSpec:
        """Return a method to train with some options changed by name: training options, or options of its kind (class).

        Raises `UsageError` for an unknown name.
        """
        training = {field.name for field in fields(TrainingOptions)}
        known = dict.fromkeys([*sorted(training), *(field.name for field in fields(self.options))])
        for key in settings:
            require(key, known, f"setting of training or of {self.name}")
        changed = {key: value for key, value in settings.items() if key in training}
        options = {key: value for key, value in settings.items() if key not in training}
        return replace(
            self,
            options=parse_options(self.kind, {**self.options.to_dict(), **options}),
            training=TrainingOptions.from_dict({**self.training.to_dict(), **changed}),
        )

    @property
    def request(self) -> InputRequest:
        """Request for the method's training inputs: kinds of features, precision of the text tower, memory limit."""
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
        """Validation AUC in percent, of the best epoch."""
        return 100 * self.record.val_auc

    @property
    def val_auc_all(self) -> float | None:
        """Validation AUC in percent with every pair a candidate; None for a run that is not for the open world."""
        return None if self.record.val_auc_all is None else 100 * self.record.val_auc_all

    @property
    def selected_by(self) -> str:
        """Validation metric that chose the epoch: auc, hm or the name of the caller's function."""
        return self.result.selected_by

    @property
    def history(self) -> pd.DataFrame:
        """Training history, one row per epoch: means of the loss terms, the validation AUC (a fraction), and the metric
        that chose the epoch if it is another."""
        return pd.DataFrame(self.result.history)

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write checkpoint, history and timing into a folder that `Recognizer.load` reads; return the folder.

        Raises `UsageError` if the folder holds an exported model, which would hide the run, or one of these files.

        folder: made if it does not exist.
        force: replace an earlier run. Its metrics are removed if the checkpoint changes.
        """
        files = RunPaths(checked_path(folder, "folder"))
        if (files.root / EXPORTED_MODEL).is_file():
            raise UsageError(f"{files.root} holds an exported model, which would hide the run; choose another folder")
        for file in (files.checkpoint, files.history, files.timing):
            refuse_existing(file, force=force)
        self.write(files)
        return files.root

    def write(self, files: RunPaths) -> None:
        """Write a run's checkpoint, history and timing, over any files that are there.

        Metrics, curve and predictions of an earlier run are removed if the checkpoint changes.
        """
        before = sha256(files.checkpoint) if files.checkpoint.is_file() else None
        save_checkpoint(files.checkpoint, self.method, self.record)
        write_text(files.history, self.history.to_csv(index=False, lineterminator="\n"))
        write_json(files.timing, self.result.timing)
        if sha256(files.checkpoint) != before:
            for outdated in (files.metrics, files.curve, files.predictions):
                outdated.unlink(missing_ok=True)

    def __repr__(self) -> str:
        chosen = "" if self.selected_by == "auc" else f" by {self.selected_by}"
        epoch = f"epoch {self.record.epoch}{chosen}"
        return f"Run({self.name}, seed {self.record.seed}, {epoch}, val AUC {self.val_auc:.2f})"


def train_method(
    spec: MethodSpec,
    inputs: RunInputs,
    seed: int,
    device: torch.device,
    settings: EvaluationParams,
    resume: ResumePoint = ResumePoint(),
    hooks: TrainingHooks = TrainingHooks(),
    choose_by: ChooseBy | None = None,
) -> Run:
    """Train a method and keep its best epoch by validation; choose bias and feasibility threshold on validation images.

    spec: the method and its options. inputs: features, labels and text tower. settings: `evaluation:` of params.yaml.
    resume: file from which a killed training continues. hooks: the caller's functions, optimiser and log.
    choose_by: the caller's own validation metric, which chooses the epoch instead of the option `select`.
    """
    code = method_code(spec.kind)  # before training: the file may be edited while it runs
    images, val = (inputs.examples[split].to(device) for split in ("train", "val"))
    on_device = replace(inputs, examples={**inputs.examples, "train": images})
    method = initialised_method(spec.kind, spec.options, inputs.context(spec.trained_for), on_device, seed, device)
    selecting = spec.training.select if choose_by is None else metric_name(choose_by)
    validate = Validation(val, inputs.labels, selecting, choose_by)
    result = train(method, images, spec.training, seed, validate, resume, hooks)
    tune(method, val, inputs.labels)
    calibration = _calibrate(spec, settings, method, inputs, val)
    source = method_source(spec.kind)
    record = Record(
        kind=spec.kind,
        provider=provider(source),
        options=spec.options,
        labels=inputs.labels,
        encoder=inputs.encoder,
        seed=seed,
        epoch=result.best_epoch,
        val_auc=validation_auc(method, val, inputs.labels),
        selected_by=result.selected_by,
        world=spec.trained_for,
        val_auc_all=_auc_all_pairs(calibration, method, inputs, val),
        calibration=calibration,
        inspectable=method.inspectable().present_fields,
        finetune=spec.finetune,
        confidence=fit_confidence(method, val, inputs.labels),
        known_images=KnownImages.fit(images, val, inputs.labels) if "cls" in images.inputs else None,
        training=spec.training.result_settings()
        | {
            "manifest": inputs.identity.get("manifest"),
            "features": inputs.identity.get("features"),
            "calibration": calibration_settings(settings),
            "plugin": code,
        },
    )
    return Run(spec.name, method, record, spec.training, result)


def calibration_settings(settings: EvaluationParams) -> dict[str, Any]:
    """Return the evaluation settings that a run's feasibility threshold depends on; checkpoints store them."""
    return {"feasibility": settings.feasibility, "thresholds": settings.thresholds}


def initialised_method(
    kind: str, options: Options, context: MethodContext, inputs: RunInputs, seed: int, device: torch.device
) -> Method[Any]:
    """Return an untrained method, initialised from the training images."""
    torch.manual_seed(seed)
    method = make_method(kind, options, context).to(device)
    images = inputs.examples["train"].to(device)
    method.start(Batch(images.inputs, images.compositions.clone()))  # other runs read the labels too
    return method


def _calibrate(
    spec: MethodSpec, settings: EvaluationParams, method: Method[Any], inputs: RunInputs, val: Examples
) -> dict[str, Calibration]:
    """Choose the bias on unseen pairs and the feasibility threshold on validation data, per world (closed, open)."""
    rule = settings.feasibility
    if rule == "likelihood" and "open" in spec.worlds and method.likelihood() is None:
        print(f"{spec.name} has no likelihood of compositions; feasibility is from word vectors", file=sys.stderr)
    if rule == "auto" and "open" in spec.worlds and (pairs := unseen_pairs(val, inputs.labels)) < FEWEST_PAIRS:
        few = f"validation images are of {pairs} unseen pair{'' if pairs == 1 else 's'}"
        needed = f"a feasibility threshold needs {FEWEST_PAIRS} or more"
        print(f"{few}, {needed}: all pairs stay candidates", file=sys.stderr)
    return {
        world: calibrate(
            method, val, inputs.labels, world, inputs.words if world == "open" else None, settings.thresholds, rule
        )
        for world in spec.worlds
    }


def _auc_all_pairs(
    calibration: Mapping[str, Calibration], method: Method[Any], inputs: RunInputs, val: Examples
) -> float | None:
    """Return the validation AUC (fraction) with every composition a candidate; None for a run of the closed world."""
    if "open" not in calibration:
        return None
    choices = calibration["open"], *calibration["open"].alternatives
    known = [choice.val_auc_all_feasible for choice in choices if choice.val_auc_all_feasible is not None]
    return known[0] / 100 if known else validation_auc(method, val, inputs.labels, "open")
