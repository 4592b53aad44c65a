"""Train one method on a data set; used by the pipeline, searches and `duplex.fit`.

    spec = MethodSpec.of(params, dataset, method)          # the method with its options
    with reproducible(spec.training.threads):
        run = train_run(spec, inputs, seed, device, params.evaluation)
        run.write(RunPaths(folder))

After training, `tune_and_score` scores the validation images once per world: bias, feasibility
threshold, temperature and the validation AUC come from that pass. A second pass, over the
candidates of answers, measures what an estimate of the share of new pairs needs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from duplex.artifacts import RunPaths
from duplex.config.params import EvaluationParams, MethodEntry, Params
from duplex.errors import UsageError, require
from duplex.evaluation.curve import Margins
from duplex.features.tokens import Examples
from duplex.labels import WORLDS, World
from duplex.methods.base import Batch, Method, MethodContext
from duplex.methods.prompts import encoded_once
from duplex.methods.registry import find_method, make_method, method_entry_point, parse_options, plugin_code_hash
from duplex.methods.team import ALONE, Team
from duplex.options import FinetuneOptions, Options, TrainingOptions
from duplex.system.files import sha256, write_json, write_text
from duplex.system.plugins import provider
from duplex.system.threads import Threads, in_initial_modes, require_precision, threads
from duplex.training.checkpoint import TrainingRecord, save_checkpoint
from duplex.training.inputs import InputRequest, RunInputs
from duplex.training.logs import TrainingHooks
from duplex.training.loop import ResumePoint, TrainingResult, train
from duplex.training.novelty import NoveltyDetector
from duplex.training.scoring import (
    FEWEST_PAIRS,
    Calibration,
    ChooseBy,
    Validation,
    calibrate,
    checked_auc,
    choose_options,
    count_unseen_pairs,
    feasible_compositions,
    fit_confidence,
    fit_new_share,
    metric_name,
)

_one_thread = threading.RLock()  # PyTorch's settings and its random generators are those of the process


@dataclass(frozen=True)
class MethodSpec:
    """A method to train: name, kind, options, training options, and worlds."""

    name: str  # for messages
    kind: str
    options: Options
    training: TrainingOptions
    worlds: tuple[World, ...]  # in which it is calibrated and evaluated
    trained_for: World  # the world whose candidates are used in training
    finetune: FinetuneOptions | None = None
    encoder: str | None = None  # the one that it reads of a data set's joined encoders; None: all

    @classmethod
    def of(cls, params: Params, dataset: str, method: str) -> MethodSpec:
        """A method of params.yaml with its options on a data set; without `finetune: auto`."""
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
            params.encoder_of(method, dataset),
        )

    def with_settings(self, settings: Mapping[str, Any]) -> MethodSpec:
        """A copy with changed options, of training or of the kind; else `UsageError`."""
        training = {field.name for field in fields(TrainingOptions)}
        known = dict.fromkeys([*sorted(training), *(field.name for field in fields(self.options))])
        for key in settings:
            require(key, known, f"setting of training or of {self.name}")
        changed = {key: value for key, value in settings.items() if key in training}
        options = {key: value for key, value in settings.items() if key not in training}
        return replace(
            self,
            options=parse_options(self.kind, {**self.options.to_dict(), **options}),
            training=self.training.changed(changed),
        )

    @property
    def request(self) -> InputRequest:
        """What the method needs from a data set."""
        needs = find_method(self.kind).needs(self.options)
        return InputRequest(needs, self.training.precision, self.finetune, self.training.memory, self.encoder)


@dataclass(frozen=True)
class TrainedMethod:
    """A trained method with its metadata and training history."""

    name: str
    method: Method[Any]  # holds the tensors of its best epoch
    record: TrainingRecord  # metadata for the checkpoint
    training: TrainingOptions
    result: TrainingResult
    margins: Margins | None = field(default=None, repr=False)  # of the validation images, closed world

    @property
    def val_auc_all(self) -> float | None:
        """Validation AUC with every pair a candidate, in percent; None without the open world."""
        return None if self.record.val_auc_all is None else 100 * self.record.val_auc_all

    @property
    def history(self) -> pd.DataFrame:
        """One row per epoch: mean losses, validation AUC (a fraction), the metric that chose."""
        return pd.DataFrame(self.result.history)

    def write(self, files: RunPaths) -> None:
        """Write the run's `files`, and remove results that belong to another checkpoint."""
        before = sha256(files.checkpoint) if files.checkpoint.is_file() else None
        save_checkpoint(files.checkpoint, self.method, self.record)
        write_text(files.history, self.history.to_csv(index=False, lineterminator="\n"))
        write_json(files.timing, self.result.timing)
        if sha256(files.checkpoint) != before:
            for outdated in (files.metrics, files.curve, files.predictions):
                outdated.unlink(missing_ok=True)


@contextmanager
def reproducible(wanted: Threads = "auto") -> Iterator[None]:
    """Context manager for training and evaluation: inside it, the seed determines every bit.

    PyTorch uses deterministic algorithms, its initial modes and `wanted` CPU threads. At the end,
    settings and random generators are restored. Other threads wait for their turn.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    fill: Any = torch.utils.deterministic
    with _one_thread, in_initial_modes(), torch.random.fork_rng(gpus), threads(wanted):
        before = torch.get_deterministic_debug_mode(), fill.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        fill.fill_uninitialized_memory = False  # only costs time
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before[0])
            fill.fill_uninitialized_memory = before[1]


def train_run(
    spec: MethodSpec,
    inputs: RunInputs,
    seed: int,
    device: torch.device,
    settings: EvaluationParams,
    resume: ResumePoint = ResumePoint(),
    hooks: TrainingHooks = TrainingHooks(),
    choose_by: ChooseBy | None = None,
    team: Team = ALONE,
) -> TrainedMethod:
    """Train a method, keep the epoch that validation chooses, and choose bias and threshold.

    Call this inside `reproducible`. `choose_by`: the caller's own metric instead of `select`.
    """
    require_precision(spec.training.precision, device, "training.precision")
    code = plugin_code_hash(spec.kind)  # before training: the file may be edited while it runs
    images = inputs.examples["train"].to(device)
    val = inputs.examples["val"].to(device)
    on_device = replace(inputs, examples={**inputs.examples, "train": images, "val": val})
    method, result = trained_method(spec, on_device, seed, device, resume, hooks, choose_by, team)
    with encoded_once(method):
        margins, chosen = tune_and_score(spec, method, inputs, val, settings)
    record = TrainingRecord(
        kind=spec.kind,
        provider=provider(method_entry_point(spec.kind)),
        options=spec.options,
        labels=inputs.labels,
        encoder=inputs.encoder,
        seed=seed,
        epoch=result.best_epoch,
        selected_by=result.selected_by,
        world=spec.trained_for,
        inspectable=method.inspectable().present_fields,
        finetune=spec.finetune,
        novelty=NoveltyDetector.fit(images, val, inputs.labels, inputs.negatives) if "cls" in images.inputs else None,
        training=spec.training.result_settings()
        | {
            "manifest": inputs.identity.get("manifest"),
            "features": inputs.identity.get("features"),
            "calibration": {"feasibility": settings.feasibility, "thresholds": settings.thresholds},
            "plugin": code,
        },
        **chosen,
    )
    return TrainedMethod(spec.name, method, record, spec.training, result, margins)


def trained_method(
    spec: MethodSpec,
    inputs: RunInputs,
    seed: int,
    device: torch.device,
    resume: ResumePoint = ResumePoint(),
    hooks: TrainingHooks = TrainingHooks(),
    choose_by: ChooseBy | None = None,
    team: Team = ALONE,
) -> tuple[Method[Any], TrainingResult]:
    """Build and train a method without choosing anything else; all of a `team` but its first process call this."""
    images = inputs.examples["train"].to(device)
    val = inputs.examples["val"].to(device)
    method = initialised_method(spec.kind, spec.options, inputs.context(spec.trained_for), inputs, seed, device)
    selecting = spec.training.select if choose_by is None else metric_name(choose_by)
    validate = Validation(val, inputs.labels, selecting, choose_by, spec.training.select_world)
    return method, train(method, images, spec.training, seed, validate, resume, hooks, team)


def train_on_all_images(
    spec: MethodSpec,
    chosen: TrainingRecord,
    tuned: Mapping[str, Any],
    inputs: RunInputs,
    device: torch.device,
    resume: ResumePoint = ResumePoint(),
) -> TrainedMethod:
    """Train on all labelled images, without validation, as an earlier run chose.

    tuned: values of options that the earlier run chose on validation images.
    """
    options = replace(spec.options, **tuned)
    training = replace(spec.training, epochs=max(1, chosen.epoch), patience=None)
    context = inputs.context(spec.trained_for)
    method = initialised_method(spec.kind, options, context, inputs, chosen.seed, device)
    images = inputs.examples["train"].to(device)
    if chosen.epoch:
        result = train(method, images, training, chosen.seed, None, resume)
    else:  # the untrained method was the best
        result = TrainingResult(0, chosen.val_auc, [], {})
    bias = next(iter((chosen.calibration or {}).values())).bias
    novelty = chosen.novelty
    if novelty is not None:
        kept = {name: getattr(novelty, name) for name in ("threshold", "scale", "refused")}  # by validation
        novelty = replace(NoveltyDetector.fit(images, images, inputs.labels, inputs.negatives), **kept)
    record = replace(
        chosen,
        options=options,
        provider=provider(method_entry_point(spec.kind)),
        labels=inputs.labels,
        encoder=inputs.encoder,
        calibration={world: Calibration(bias) for world in WORLDS},
        novelty=novelty,
    )
    return TrainedMethod(spec.name, method.eval(), record, training, result)


def initialised_method(
    kind: str, options: Options, context: MethodContext, inputs: RunInputs, seed: int, device: torch.device
) -> Method[Any]:
    """Build an untrained method and initialise it from the training images (`Method.start`)."""
    labels = context.labels
    images = inputs.examples["train"].to(device)
    known = np.concatenate(labels.trained_words)
    alone = images.compositions[images.compositions < 0]
    known[-1 - alone.cpu().numpy()] = True  # words of images with only a state or an object
    new = list(compress((*labels.states, *labels.objects), ~known))
    if new and not find_method(kind).scores_new_words(options):
        raise UsageError(
            f"{kind} with these options learns words from images alone, but there are no training "
            f"images of {', '.join(map(repr, new))}; choose a method with prompts or word "
            "vectors, or add such images to train"
        )
    if (partial := len(alone)) and not find_method(kind).accepts_partial_labels(options):
        raise UsageError(
            f"{kind} with these options needs pairs, but some training images ({partial}) have "
            "only a state or object; complete their labels, leave these images out, or choose a "
            "method such as kg_sp or linear"
        )
    torch.manual_seed(seed)
    method = make_method(kind, options, context).to(device)
    method.eval().start(Batch(images.inputs, images.compositions.clone()))  # others read the labels too
    return method


def tune_and_score(
    spec: MethodSpec, method: Method[Any], inputs: RunInputs, val: Examples, settings: EvaluationParams
) -> tuple[Margins, dict[str, Any]]:
    """Choose settings; returns closed-world margins on validation images, fields of the record."""
    labels = inputs.labels
    rule = settings.feasibility
    choose_options(method, val, labels)
    kept: list[Tensor] = []

    def keep(scores: Tensor, rows: slice) -> None:
        if len(scores) == len(val):
            kept.append(scores)

    by_world = {"closed": calibrate(method, val, labels, "closed", None, settings.thresholds, rule, keep)}
    auc_all = None
    if "open" in spec.worlds:
        if rule == "auto" and (pairs := count_unseen_pairs(val, labels)) < FEWEST_PAIRS:
            few = f"the validation images show {pairs} unseen pair{'' if pairs == 1 else 's'}"
            needed = f"a feasibility threshold needs {FEWEST_PAIRS} or more"
            print(f"{few}, but {needed}, so all pairs stay candidates", file=sys.stderr)
        by_world["open"] = calibrate(method, val, labels, "open", inputs.words, settings.thresholds, rule)
        choice, margins_all = by_world["open"]
        measured = [each.val_auc_all_feasible for each in (choice, *choice.alternatives)]
        found = [auc / 100 for auc in measured if auc is not None]
        auc_all = found[0] if found else checked_auc(margins_all)
    margins = by_world["closed"][1]
    confidence = fit_confidence(method, val, labels, *kept)
    for world in reversed(spec.worlds):  # the share that stays is the first world's, in which answers are by default
        feasible = feasible_compositions(method, inputs.words, by_world[world][0])
        confidence = fit_new_share(method, val, labels, confidence, world, feasible)
    return margins, {
        "val_auc": checked_auc(margins),
        "val_auc_all": auc_all,
        "calibration": {world: by_world[world][0] for world in spec.worlds},
        "confidence": confidence,
    }
