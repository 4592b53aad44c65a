"""Manifest, feature cache and what the method asks for -> checkpoint and history."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import pandas as pd
import torch

from duplex.config.artifacts import ArtifactPaths, RunPaths
from duplex.config.code_hash import code_of_run
from duplex.config.params import Params
from duplex.encoders import resolve_device
from duplex.methods.base import Batch, Method, Setting
from duplex.methods.registry import find, make, source_of
from duplex.options import Options
from duplex.stages.inputs import Inputs, LoadInputs, load_inputs, make_deterministic
from duplex.system.files import write_text
from duplex.system.lock import sole_writer
from duplex.system.threads import threads
from duplex.training.calibration import calibrate
from duplex.training.checkpoint import WORDS, Record, save_checkpoint
from duplex.training.loop import Outcome, Run, train
from duplex.training.scoring import tune, validation_auc


def run(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    paths: ArtifactPaths | None = None,
    out: RunPaths | None = None,
    load: LoadInputs = load_inputs,
) -> Outcome:
    """Train one method on one data set with one seed, and keep its best epoch by validation AUC."""
    paths = paths or ArtifactPaths()
    make_deterministic()
    row, options, settings = params.row(method), params.method(method, dataset), params.training(dataset, method)
    tail = params.tail(method, dataset)
    out = out or paths.run(dataset, method, seed)
    with threads(settings.threads):
        needs = find(row.kind).needs(options)
        inputs = load(params, dataset, paths, needs, settings.precision, tail, settings.memory, views=True)
        with sole_writer(out.checkpoint, "training"):
            return _run(params, dataset, method, seed, inputs, out)


def _run(params: Params, dataset: str, method: str, seed: int, inputs: Inputs, out: RunPaths) -> Outcome:
    row, options, settings = params.row(method), params.method(method, dataset), params.training(dataset, method)
    device, tail = torch.device(resolve_device(params.device)), params.tail(method, dataset)
    trained = begin(row.kind, options, inputs.setting(row.trained_for), inputs, seed, device)
    val, partial = inputs.examples["val"].to(device), out.root / "training.partial"
    key: dict[str, object] = {
        "kind": row.kind,
        "options": options.to_dict(),
        "world": row.world,
        "settings": settings.to_dict(),
        "tail": None if tail is None else tail.to_dict(),
        "seed": seed,
        "inputs": inputs.identity,
        "words": inputs.encoder.get(WORDS),
        "labels": inputs.labels.to_dict(),
        "where": [*_where(device), torch.__version__, code_of_run("duplex.stages.train", row.kind)],
    }
    outcome = train(
        trained,
        inputs.examples["train"].to(device),
        settings,
        seed,
        lambda current: validation_auc(current, val, inputs.labels),
        Run(f"{dataset} {method} seed {seed}", partial, _digest(key)),
    )
    tune(trained, val, inputs.labels)
    points, judge = params.evaluation.thresholds, params.evaluation.feasibility
    if judge == "likelihood" and "open" in row.worlds and trained.likelihood() is None:
        print(f"{method} has no likelihood of compositions; words say which are feasible", file=sys.stderr)
    record = Record(
        kind=row.kind,
        provider=source_of(row.kind).provider,
        options=options,
        labels=inputs.labels,
        encoder=inputs.encoder,
        seed=seed,
        epoch=outcome.best_epoch,
        val_auc=validation_auc(trained, val, inputs.labels),
        world=row.trained_for,
        calibration={
            world: calibrate(
                trained, val, inputs.labels, world, inputs.words if world == "open" else None, points, judge
            )
            for world in row.worlds
        },
        exhibits=trained.exhibits().names,
        tail=tail,
    )
    save_checkpoint(out.checkpoint, trained, record)
    write_text(out.history, pd.DataFrame(outcome.history).to_csv(index=False, lineterminator="\n"))
    write_text(out.timing, json.dumps(outcome.timing, indent=2) + "\n")
    partial.unlink(missing_ok=True)
    return outcome


def begin(
    kind: str, options: Options, setting: Setting, inputs: Inputs, seed: int, device: torch.device
) -> Method[Any]:
    """A fresh method with its start from the training images."""
    torch.manual_seed(seed)
    fresh = make(kind, options, setting).to(device)
    images = inputs.examples["train"].to(device)
    fresh.start(Batch(images.inputs, images.compositions))
    return fresh


def _where(device: torch.device) -> list[object]:
    """What decides the last bits: the GPU's model, or the CPU's threads."""
    return ["cuda", torch.cuda.get_device_name(device)] if device.type == "cuda" else ["cpu", torch.get_num_threads()]


def _digest(key: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
