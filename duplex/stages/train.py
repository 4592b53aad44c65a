"""Manifest, feature cache and text tower -> checkpoint and history."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch

from duplex import assessment, encoders, evaluation, model, resume, training
from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.assessment import validation_auc
from duplex.checkpoint import Record, save_checkpoint
from duplex.features import examples
from duplex.model.codebook import initial_rows
from duplex.model.factors import unit
from duplex.model.network import Network
from duplex.model.options import Options
from duplex.params import Params
from duplex.stages.inputs import Inputs, load_inputs, make_deterministic, pick_device
from duplex.training import Outcome, Run, train


def run(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    paths: ArtifactPaths | None = None,
    out: RunPaths | None = None,
) -> Outcome:
    """Train one method on one data set with one seed, and keep its best epoch by validation AUC."""
    paths = paths or ArtifactPaths()
    options, settings = params.method(method), params.dataset(dataset).training
    device = pick_device(params.device)
    make_deterministic()
    inputs = load_inputs(params, dataset, paths)
    torch.manual_seed(seed)
    network = build(inputs, options).to(device)
    val = inputs.examples["val"].to(device)
    out = out or paths.run(dataset, method, seed)
    out.root.mkdir(parents=True, exist_ok=True)
    partial = out.root / "training.partial"
    key = {
        "options": options.to_dict(),
        "settings": asdict(settings),
        "seed": seed,
        "inputs": inputs.identity,
        "labels": inputs.labels.to_dict(),
        "where": [device.type, torch.get_num_threads(), torch.__version__, code_hash()],
    }
    outcome = train(
        network,
        inputs.examples["train"].to(device),
        settings,
        seed,
        lambda trained: validation_auc(trained, val, inputs.labels),
        Run(f"{dataset} {method} seed {seed}", partial, _digest(key)),
    )
    record = Record(options, inputs.labels, inputs.encoder, seed, outcome.best_epoch, outcome.best_auc)
    save_checkpoint(out.checkpoint, network, record)
    pd.DataFrame(outcome.history).to_csv(out.history, index=False, lineterminator="\n")
    out.timing.write_text(json.dumps(outcome.timing, indent=2) + "\n", encoding="utf-8")
    partial.unlink(missing_ok=True)
    return outcome


def build(inputs: Inputs, options: Options, kind: type[Network] = Network) -> Network:
    """A fresh network of some `kind`; its codebook starts from the training images' features."""
    rows = None
    if options.codebook != "none":
        images = inputs.examples["train"]
        rows = initial_rows(options, inputs.labels, unit(images.z), images.compositions)
    return kind(options, inputs.labels, inputs.tower, rows)


def code_hash() -> str:
    """sha256 of the code that an unfinished state depends on: no run is half one program and half another."""
    parts = (encoders, evaluation, model)
    files = [path for part in parts for path in sorted(Path(part.__path__[0]).glob("*.py"))]
    files += [Path(str(part.__file__)) for part in (assessment, examples, resume, training)] + [Path(__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _digest(key: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
