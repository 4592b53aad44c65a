"""Train one method on a data set, and evaluate it on one split; used by the pipeline, searches and `duplex.fit`.

    spec = MethodSpec.of(params, dataset, method)          # the method with its options
    with reproducible(spec.training.threads):
        run = train_run(spec, inputs, seed, device, params.evaluation)
        run.save(folder)
        result = evaluate_world(run.method, inputs, params.evaluation, world, calibration)

After training, the validation images are scored once per world: bias, feasibility threshold, confidence and the
validation AUC come from that pass (`tune_and_score`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import compress, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from duplex.artifacts import RunPaths
from duplex.config.params import EvaluationParams, MethodEntry, Params
from duplex.errors import UsageError, require
from duplex.evaluation.curve import Curve, Margins, harmonic_mean
from duplex.evaluation.metrics import (
    METRICS,
    Metrics,
    group_table,
    measure,
    sampled_from_margins,
    vocabulary_accuracies,
)
from duplex.features.tokens import Examples
from duplex.labels import WORLDS, Bools, LabelSpace, World, frequency_groups
from duplex.methods.base import Batch, Method, MethodContext
from duplex.methods.registry import find_method, make_method, method_entry_point, parse_options, plugin_code_hash
from duplex.options import FinetuneOptions, Options, TrainingOptions
from duplex.system.files import expanded_path, refuse_existing, sha256, write_json, write_text
from duplex.system.plugins import provider
from duplex.system.threads import Threads, in_initial_modes, threads
from duplex.training.checkpoint import TrainingRecord, save_checkpoint
from duplex.training.inputs import InputRequest, RunInputs
from duplex.training.logs import TrainingHooks
from duplex.training.loop import ResumePoint, TrainingResult, saved_epoch, train
from duplex.training.scoring import (
    FEWEST_PAIRS,
    Calibration,
    ChooseBy,
    NoveltyDetector,
    ScoringResult,
    SplitScorer,
    Validation,
    calibrate,
    checked_auc,
    choose_options,
    count_unseen_pairs,
    feasible_compositions,
    fit_confidence,
    metric_name,
    score_split,
    term_sum_statistics,
)

_one_thread = threading.RLock()  # PyTorch's settings and its random generators are those of the process


@dataclass(frozen=True)
class MethodSpec:
    """A method to train: name, kind, options, training options, and worlds (closed, open or both)."""

    name: str  # for messages
    kind: str
    options: Options
    training: TrainingOptions
    worlds: tuple[World, ...]  # in which it is calibrated and evaluated
    trained_for: World  # the world whose candidates are used in training
    finetune: FinetuneOptions | None = None

    @classmethod
    def of(cls, params: Params, dataset: str, method: str) -> MethodSpec:
        """Read a method of params.yaml with its options on a data set; `finetune: auto` is left to the caller."""
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
        """A copy with changed training options or options of the kind; `UsageError` for an unknown option."""
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
        """What the method needs from a data set: kinds of features, precision of the text tower, memory limit."""
        needs = find_method(self.kind).needs(self.options)
        return InputRequest(needs, self.training.precision, self.finetune, self.training.memory)


@dataclass(frozen=True)
class Run:
    """A trained method with its metadata and training history; `duplex.fit` returns it."""

    name: str
    method: Method[Any]  # holds the tensors of its best epoch
    record: TrainingRecord  # metadata for the checkpoint
    training: TrainingOptions
    result: TrainingResult
    margins: Margins | None = field(default=None, repr=False)  # of the validation images, closed world

    @property
    def val_auc(self) -> float:
        """Validation AUC of the best epoch, in percent."""
        return 100 * self.record.val_auc

    @property
    def val_auc_all(self) -> float | None:
        """Validation AUC with every pair a candidate, in percent; None if the run is not for the open world."""
        return None if self.record.val_auc_all is None else 100 * self.record.val_auc_all

    @property
    def selected_by(self) -> str:
        """The metric that chose the epoch: a value of the option `select`, or the name of the caller's function."""
        return self.result.selected_by

    @property
    def history(self) -> pd.DataFrame:
        """One row per epoch: mean losses, validation AUC (a fraction), and any other metric that chose the epoch."""
        return pd.DataFrame(self.result.history)

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write checkpoint, history and timing into a folder that `Recognizer.load` can read; returns the folder.

        Raises `UsageError` if the folder holds an exported model, which would be loaded instead, or one of these files.

        folder: made if it does not exist.
        force: replace an earlier run. Its metrics are removed if the checkpoint changes.
        """
        files = RunPaths(expanded_path(folder, "folder"))
        if (files.root / "model.safetensors").is_file():
            raise UsageError(f"{files.root} has an exported model, which would be loaded instead; use another folder")
        for file in (files.checkpoint, files.history, files.timing):
            refuse_existing(file, force=force)
        self.write(files)
        return files.root

    def export(self, out: str | Path, *, word_vectors: str | Path | None = None, **settings: Any) -> Path:
        """Write the model to a folder that works without this package, as `duplex export` does; return the folder.

        out: made if it does not exist.
        word_vectors: the GloVe-format file that training read, if it read one.
        settings: `world`, `licence` and `force` of `Recognizer.save_pretrained`.
        """
        from duplex import Recognizer

        with TemporaryDirectory() as scratch:
            recognizer = Recognizer.load(self.save(scratch), device="cpu", word_vectors=word_vectors)
            return recognizer.save_pretrained(out, **settings)

    def write(self, files: RunPaths) -> None:
        """Write the run's `files`, replacing earlier ones, and remove results that belong to another checkpoint."""
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


@contextmanager
def reproducible(wanted: Threads = "auto") -> Iterator[None]:
    """Context manager for training and evaluation: inside it, the seed determines every bit of the result.

    PyTorch uses deterministic algorithms, its initial modes (gradients on, autocast off, new tensors float32 on the
    CPU) and `wanted` CPU threads. At the end, the caller's settings and the states of PyTorch's random generators are
    restored. Other threads wait for their turn.
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
) -> Run:
    """Train a method and keep the epoch that validation chooses; also choose bias and feasibility threshold.

    Call this inside `reproducible`, so that the result can be compared with other runs.

    choose_by: the caller's own validation metric, which chooses the epoch instead of the option `select`.
    """
    code = plugin_code_hash(spec.kind)  # before training: the file may be edited while it runs
    images = inputs.examples["train"].to(device)
    val = inputs.examples["val"].to(device)
    on_device = replace(inputs, examples={**inputs.examples, "train": images})
    method = initialised_method(spec.kind, spec.options, inputs.context(spec.trained_for), on_device, seed, device)
    selecting = spec.training.select if choose_by is None else metric_name(choose_by)
    validate = Validation(val, inputs.labels, selecting, choose_by)
    result = train(method, images, spec.training, seed, validate, resume, hooks)
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
        novelty=NoveltyDetector.fit(images, val, inputs.labels) if "cls" in images.inputs else None,
        training=spec.training.result_settings()
        | {
            "manifest": inputs.identity.get("manifest"),
            "features": inputs.identity.get("features"),
            "calibration": {"feasibility": settings.feasibility, "thresholds": settings.thresholds},
            "plugin": code,
        },
        **chosen,
    )
    return Run(spec.name, method, record, spec.training, result, margins)


def train_on_all_images(
    spec: MethodSpec,
    chosen: TrainingRecord,
    tuned: Mapping[str, Any],
    inputs: RunInputs,
    device: torch.device,
    resume: ResumePoint = ResumePoint(),
) -> Run:
    """Train a method on all labelled images, without validation, for the number of epochs that an earlier run chose.

    chosen: metadata of the earlier run, which gives the number of epochs, bias and novelty threshold.
    tuned: values of options that the earlier run chose on validation images (`Method.chosen_options`).
    inputs: data set with every image in the training split.
    """
    options = replace(spec.options, **tuned)
    training = replace(spec.training, epochs=max(1, chosen.epoch), patience=None, warm_up=0)
    method = initialised_method(spec.kind, options, inputs.context(spec.trained_for), inputs, chosen.seed, device)
    images = inputs.examples["train"].to(device)
    if chosen.epoch:
        done = saved_epoch(resume.path) if resume.path is not None else 0
        numbers = count(done + 2 if done else 1)  # the untrained method is validated, too, unless training continues
        last_is_best = lambda _: {"auc": chosen.val_auc, "epoch": float(next(numbers))}  # noqa: E731
        result = train(method, images, training, chosen.seed, last_is_best, resume)
    else:  # the untrained method was the best
        result = TrainingResult(0, chosen.val_auc, [], {})
    bias = next(iter((chosen.calibration or {}).values())).bias
    novelty = chosen.novelty
    if novelty is not None:
        novelty = replace(NoveltyDetector.fit(images, images, inputs.labels), threshold=novelty.threshold)
    record = replace(
        chosen,
        options=options,
        provider=provider(method_entry_point(spec.kind)),
        labels=inputs.labels,
        encoder=inputs.encoder,
        calibration={world: Calibration(bias) for world in WORLDS},
        novelty=novelty,
    )
    return Run(spec.name, method.eval(), record, training, result)


def initialised_method(
    kind: str, options: Options, context: MethodContext, inputs: RunInputs, seed: int, device: torch.device
) -> Method[Any]:
    """Build an untrained method and initialise it from the training images (`Method.start`).

    Raises `UsageError` for states or objects without training images, and for training images without a state or an
    object, unless the method can use them.
    """
    labels, images = context.labels, inputs.examples["train"].to(device)
    known, alone = np.concatenate(labels.trained_words), images.compositions[images.compositions < 0]
    known[-1 - alone.cpu().numpy()] = True  # words of images with only a state or an object
    new = list(compress((*labels.states, *labels.objects), ~known))
    if new and not find_method(kind).scores_new_words(options):
        raise UsageError(
            f"{kind} with these options learns words from images alone, but there are no training images of "
            f"{', '.join(map(repr, new))}; choose a method with prompts or word vectors, or add such images to train"
        )
    if (partial := len(alone)) and not find_method(kind).accepts_partial_labels(options):
        raise UsageError(
            f"{kind} with these options needs pairs, but some training images ({partial}) have only a state or "
            "object; complete their labels, leave these images out, or choose a method such as kg_sp or linear"
        )
    torch.manual_seed(seed)
    method = make_method(kind, options, context).to(device)
    method.eval().start(Batch(images.inputs, images.compositions.clone()))  # other runs read the labels too
    return method


def tune_and_score(
    spec: MethodSpec, method: Method[Any], inputs: RunInputs, val: Examples, settings: EvaluationParams
) -> tuple[Margins, dict[str, Any]]:
    """Let a trained method choose its settings, then score the validation images once per world.

    Returns the images' closed-world margins, and the fields of `TrainingRecord` that follow from the scores.
    """
    labels, rule = inputs.labels, settings.feasibility
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
    return margins, {
        "val_auc": checked_auc(margins),
        "val_auc_all": auc_all,
        "calibration": {world: by_world[world][0] for world in spec.worlds},
        "confidence": fit_confidence(method, val, labels, *kept),
    }


FEASIBILITY_METRICS = ("unseen", "hm", "auc", "auc_low", "auc_high")  # seen accuracy does not depend on feasibility


@dataclass(frozen=True)
class WorldResult:
    """Result of evaluating a method in one world (closed or open): metrics, seen–unseen curve and predictions."""

    metrics: dict[str, Any]
    margins: Margins
    curve: pd.DataFrame
    predictions: pd.DataFrame
    right: Bools  # [test images] whether the best candidate is the label, at bias 0
    right_at_ends: Bools  # [test images] the same among seen candidates alone, or among unseen ones for unseen pairs


def calibration_for(record: TrainingRecord, world: World, place: object) -> Calibration:
    """The calibration that the run `place` chose for a world; raises `UsageError` if it has none for that world."""
    calibration = (record.calibration or {}).get(world)
    if calibration is None:
        raise UsageError(f'{place} was not trained for the {world} world; train it again with `world="{world}"`')
    return calibration


def evaluate_world(
    method: Method[Any],
    inputs: RunInputs,
    settings: EvaluationParams,
    world: World,
    calibration: Calibration,
    split: str = "test",
    task: SplitScorer | None = None,
) -> WorldResult:
    """Evaluate a method on one split in one world (closed or open).

    In the open world, compositions below the feasibility threshold score -inf; `auc_all` is the AUC with every
    composition a candidate.

    inputs: data set with the split's features on the method's device.
    task: scores the images for all candidates, such as a `StreamScorer`; None: the method itself.
    """
    labels, test = inputs.labels, inputs.examples[split]
    task = task or SplitScorer.of(method, labels.candidates(world, split))
    words = inputs.words if world == "open" else None
    feasible_mask = feasible_compositions(method, words, calibration)
    excluded: list[Bools] = []
    if world == "open":
        nothing = np.zeros(len(task.candidates), dtype=bool)
        masks = [feasible_compositions(method, words, other) for other in calibration.alternatives]
        excluded = [nothing, *(nothing if mask is None else ~mask for mask in masks)]
    result = score_split(
        task,
        test,
        labels,
        k=max(settings.k),
        feasible_mask=feasible_mask,
        top=3,
        bias=calibration.bias,
        further=excluded,
    )
    competitors = result.accumulator.competitors()
    margins = Margins.of(competitors)
    compositions = result.candidates.compositions
    states, objects = labels.state_of(compositions), labels.object_of(compositions)
    measured = partial(measure, competitors, states=states, objects=objects, rounds=settings.bootstrap)
    further = {f"top_{k}": flatten(measured(k)) for k in settings.k if k != 1}
    metrics: dict[str, Any] = {**flatten(measured(1)), **further}
    metrics["sampled"] = _sampled_headline(margins)
    metrics |= metrics_at_bias(margins, calibration.bias)
    if not all(mask.all() for mask in labels.trained_words) and "bias" in metrics:
        for name, bias in (("vocabulary", metrics["bias"]), ("vocabulary_at_val_bias", calibration.bias)):
            metrics[name] = vocabulary_accuracies(competitors, bias, states, objects, labels.trained_words)
    if feasible_mask is not None:
        metrics |= _feasibility(calibration, int(feasible_mask.sum()))
    if world == "open":
        everywhere = flatten(measure(result.further[0].competitors(), rounds=0))
        metrics |= {
            f"auc_all{end}": everywhere[f"auc{end}"] for end in ("", "_low", "_high") if f"auc{end}" in everywhere
        }
        metrics |= _with_alternatives(result, excluded, calibration)
    return WorldResult(
        metrics,
        margins,
        Curve.of(margins).table().assign(world=world),
        _predictions(result, margins, test, labels, inputs.manifest, calibration.bias).assign(world=world),
        margins.right(0.0),
        np.where(margins.is_seen, margins.right(-np.inf), margins.right(np.inf)),
    )


def _feasibility(calibration: Calibration, feasible: int) -> dict[str, Any]:
    validation = {key: value for key, value in calibration.to_dict().items() if key.startswith("val_")}
    return {"threshold": calibration.threshold, "feasible": feasible, **validation}


def _with_alternatives(result: ScoringResult, excluded: list[Bools], calibration: Calibration) -> dict[str, Any]:
    """Open-world metrics, under the key `words`, at the threshold by words that `auto` did not adopt, if any."""
    records: dict[str, Any] = {}
    for other, mask, accumulator in zip(calibration.alternatives, excluded[1:], result.further[1:], strict=True):
        competitors = accumulator.competitors(1)
        metrics = flatten(measure(competitors, rounds=0))
        records["words"] = {
            **{name: metrics[name] for name in FEASIBILITY_METRICS if name in metrics},
            "sampled": _sampled_headline(Margins.of(competitors)),
            **_feasibility(other, int((~mask).sum())),
        }
    return records


def metrics_at_bias(margins: Margins, bias: float) -> dict[str, float]:
    """Seen accuracy, unseen accuracy and their harmonic mean in percent, at the bias that validation chose."""
    ends = [float(np.mean(right)) for right in (bias < margins.seen, bias > margins.unseen) if right.size]
    record = {"val_bias": bias}
    if len(ends) == 2:
        seen, unseen = ends
        hm = float(harmonic_mean(np.array(seen), np.array(unseen)))
        record |= {"seen_at_val_bias": 100 * seen, "unseen_at_val_bias": 100 * unseen, "hm_at_val_bias": 100 * hm}
    return record


def _sampled_headline(margins: Margins) -> dict[str, float]:
    metrics = flatten(sampled_from_margins(margins))
    return {name: metrics[name] for name in METRICS if name in metrics}


def flatten(metrics: Metrics) -> dict[str, Any]:
    """Metrics as a flat dict; each 95 % interval becomes two numbers, such as `auc_low`, because DVC ignores lists."""
    record: dict[str, Any] = {}
    for key, value in metrics.to_dict().items():
        if value is not None and key.endswith("_interval"):
            name = key.removesuffix("_interval")
            record[f"{name}_low"], record[f"{name}_high"] = value
        elif value is not None:
            record[key] = value
    return record


def frequency_accuracies(result: WorldResult, inputs: RunInputs) -> dict[str, dict[str, float]]:
    """Closed-world accuracies in percent by group: head, medium and tail (by training frequency), unseen.

    `accuracy`: at bias 0 with all candidates; `accuracy_at_ends`: only seen candidates (for unseen pairs, only unseen).
    """
    train = inputs.examples["train"].compositions.cpu().numpy()
    train = train[train >= 0]
    test = inputs.examples["test"].compositions.cpu().numpy()
    groups = frequency_groups(train, inputs.labels.size)
    right = {"accuracy": result.right, "accuracy_at_ends": result.right_at_ends}
    table = group_table(groups, train, test, right).set_index("group")
    return {
        str(group): {str(key): float(value) for key, value in row.items() if not np.isnan(value)}
        for group, row in table.iterrows()
    }


def term_metrics(method: Method[Any], inputs: RunInputs) -> dict[str, dict[str, Any]]:
    """Closed-world test metrics of each score term and of sums of some terms; keys such as `terms_visual+semantic`."""
    labels, test = inputs.labels, inputs.examples["test"]
    sums = term_sum_statistics(method, labels.candidates("closed", "test"), test, labels)
    records = {}
    for names, accumulator in sums.items():
        metrics = flatten(measure(accumulator.competitors(), rounds=0))
        records[f"terms_{'+'.join(names)}"] = {key: metrics[key] for key in METRICS if key in metrics}
    return records


def _predictions(
    result: ScoringResult, margins: Margins, test: Examples, labels: LabelSpace, manifest: pd.DataFrame, bias: float
) -> pd.DataFrame:
    margin = np.empty(len(test))
    margin[margins.is_seen], margin[~margins.is_seen] = margins.seen, margins.unseen
    return pd.DataFrame(
        {
            "row": test.rows,
            "image": manifest["image"].to_numpy()[test.rows],
            "label": labels.names(test.compositions.cpu().numpy()),
            "seen": margins.is_seen.astype(int),
            "right": margins.right(bias).astype(int),
            "margin": margin,
            **{f"top{place + 1}": labels.names(result.top[:, place]) for place in range(result.top.shape[1])},
        }
    )
