"""Evaluate one run on the test split: write metrics, the seen-unseen curve, and predictions per image."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.encoders import resolve_device
from duplex.errors import DuplexError
from duplex.features.store import read_contents_digest
from duplex.library.inputs import InputRequest, LoadInputs, load_inputs, make_deterministic
from duplex.library.members import find_members
from duplex.library.run_evaluation import calibration_for, evaluate_world, group_accuracies, term_metrics
from duplex.library.run_training import MethodSpec, calibration_settings
from duplex.methods.registry import find_method, report_exits
from duplex.options import AutoFinetune, CombinedOptions
from duplex.system.files import sha256, sha256_once, write_json, write_text
from duplex.system.threads import threads
from duplex.training.checkpoint import WORD_VECTORS, Record, load_checkpoint, read_record


def run(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    paths: ArtifactPaths = ArtifactPaths(),
    out: RunPaths | None = None,
    load: LoadInputs = load_inputs,
) -> dict[str, Any]:
    """Evaluate a trained run in every world of the method and of `evaluation.worlds`; return the metrics.

    out: paths of the checkpoint and of the results, by default the run's own folder. load: function that loads the
    inputs.
    """
    out = out or paths.run(dataset, method, seed)
    training, settings, worlds = params.training(dataset, method), params.evaluation, params.worlds(method)
    record = read_record(out.checkpoint)
    if difference := run_difference(record, params, dataset, method, seed, paths):
        raise DuplexError(
            f"{out.checkpoint} is not of {method} with seed {seed} as params.yaml has it: {difference}; "
            f"`duplex train --dataset {dataset} --method {method} --seed {seed}` writes it again"
        )
    make_deterministic()
    device = torch.device(resolve_device(params.device))
    needs = find_method(record.kind).needs(record.options)
    with threads(training.threads), report_exits(record.kind):
        inputs = load(params, dataset, paths, InputRequest(needs, training.precision, record.finetune, training.memory))
        inputs.examples["test"] = inputs.examples["test"].to(device)
        model = load_checkpoint(out.checkpoint, inputs.task(), inputs.encoder).to(device)
        start = time.perf_counter()
        results = {
            world: evaluate_world(model, inputs, settings, world, calibration_for(record, world, out.checkpoint))
            for world in worlds
        }
        timing = {"test_seconds": time.perf_counter() - start, "images": len(inputs.examples["test"])}
        metrics: dict[str, Any] = {world: result.metrics for world, result in results.items()}
        if "closed" in results:
            metrics["groups"] = group_accuracies(results["closed"], inputs)
            if settings.terms and settings.protocol == "exact":
                metrics |= term_metrics(model, inputs)
    if record.val_auc_all is not None:
        metrics["val_auc_all"] = 100 * record.val_auc_all
    metrics |= {f"recipe_{place}": dict(recipe) for place, recipe in enumerate(record.recipes)}
    metrics |= {"val_auc": 100 * record.val_auc, "epoch": record.epoch, "bad_images": inputs.bad}
    write_json(out.metrics, metrics)
    write_json(out.evaluation_timing, timing)
    _write(pd.concat([result.curve for result in results.values()]), out.curve)
    _write(pd.concat([result.predictions for result in results.values()]), out.predictions)
    return metrics


def run_difference(record: Record, params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths) -> str:
    """Return the first setting of a checkpoint that differs from a run of params.yaml, as text; "" if none does.

    The members of a product and the blocks of `finetune: auto` are chosen in training. params.yaml has no values for
    them, so they are not compared.
    """
    entry, options, finetune = params.entry(method), params.method(method, dataset), params.finetune(method, dataset)
    stored = {"kind": record.kind, "seed": record.seed, "world": record.world, **vars(record.options)}
    wanted = {"kind": entry.kind, "seed": seed, "world": entry.trained_for, **vars(options)}
    if isinstance(options, CombinedOptions):
        wanted.pop("members")
        if _other_members(record, params, dataset, method, seed, paths):
            return "a run that it combines was trained again"
    elif isinstance(finetune, AutoFinetune):
        stored["finetune"], wanted["finetune"] = "auto" if record.recipes else record.finetune, "auto"
    else:
        stored["finetune"], wanted["finetune"] = record.finetune, finetune
        training = params.training(dataset, method).result_settings()
        wanted |= {name: training[name] for name in record.training.keys() & training.keys()}
        stored |= record.training
    manifest, trained_on = paths.manifest(dataset), record.training.get("manifest")
    if trained_on is not None and manifest.is_file() and trained_on != sha256(manifest):
        return "its images, labels or splits were others"
    features, trained_on = paths.features(dataset), record.training.get("features")
    if trained_on is not None and features.is_file() and trained_on != read_contents_digest(features):
        return "its features were others"
    if difference := _encoder_difference(record, params, dataset):
        return difference
    chosen_by = record.training.get("calibration")
    if chosen_by is not None and "open" in (record.calibration or {}):
        stored["calibration"], wanted["calibration"] = chosen_by, calibration_settings(params.evaluation)
    for name, value in wanted.items():
        if stored.get(name) != value:
            return f"{name} is {stored.get(name)!r} instead of {value!r}"
    return ""


def _encoder_difference(record: Record, params: Params, dataset: str) -> str:
    """Return how the encoder or the word vectors of a checkpoint differ from those in params.yaml, as text, or ""."""
    entry, words = params.dataset(dataset).encoder, params.evaluation.word_vectors
    wanted = {"name": entry.name, "tag": entry.weights or "", "precision": entry.precision}
    for name, value in wanted.items():
        if record.encoder.get(name) != value:
            return f"its encoder's {name} is {record.encoder.get(name)!r} instead of {value!r}"
    digest = sha256_once(words) if words is not None and words.is_file() else None
    return "" if record.encoder.get(WORD_VECTORS) == digest else "its word vectors were others"


def metrics_difference(record: Record, metrics: Mapping[str, Any]) -> str:
    """Return a sentence if a run's metrics were measured on another checkpoint than `record`'s; else ""."""
    measured, of_record = (metrics.get("epoch"), metrics.get("val_auc")), (record.epoch, 100 * record.val_auc)
    return "" if measured == of_record else "its metrics.json is of another checkpoint"


def _other_members(record: Record, params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths) -> bool:
    """Return whether a run that combines others was made from other checkpoints than those on disk.

    Runs that are not on disk are ignored: the checkpoint contains what it needs of them.
    """
    spec = MethodSpec.of(params, dataset, method)
    try:
        _, members = find_members(spec, dataset, seed, params.run.seeds, paths)
    except DuplexError:
        return False
    return record.training.get("members") not in (None, members.fingerprints)


def _write(table: pd.DataFrame, path: Path) -> None:
    write_text(path, table.to_csv(index=False, lineterminator="\n", float_format="%.9g"))
