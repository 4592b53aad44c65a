"""Train one method on one data set with one seed: write the checkpoint of its best epoch and the training history."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import pandas as pd
import torch

from duplex.config.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.config.run_key import run_records
from duplex.encoders import resolve_device
from duplex.features.examples import Examples
from duplex.methods.base import Batch, Method, TaskContext
from duplex.methods.registry import find_method, make_method, method_source
from duplex.options import Options
from duplex.library.inputs import InputRequest, LoadInputs, RunInputs, load_inputs, make_deterministic
from duplex.system.files import write_text
from duplex.system.lock import sole_writer
from duplex.system.threads import threads
from duplex.training.calibration import Calibration, calibrate
from duplex.training.checkpoint import WORD_VECTORS, Record, save_checkpoint
from duplex.training.loop import ResumePoint, TrainingResult, train
from duplex.training.scoring import tune, validation_auc


def run(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    paths: ArtifactPaths | None = None,
    out: RunPaths | None = None,
    load: LoadInputs = load_inputs,
) -> TrainingResult:
    """Train, choose the best epoch by validation AUC, calibrate on validation data, and save.

    Interrupted training continues after its last whole epoch. `out`: where to write, by default the run's own folder.
    """
    paths = paths or ArtifactPaths()
    out = out or paths.run(dataset, method, seed)
    make_deterministic()
    entry, options, settings = params.entry(method), params.method(method, dataset), params.training(dataset, method)
    finetune = params.finetune(method, dataset)
    device = torch.device(resolve_device(params.device))
    needs = find_method(entry.kind).needs(options)
    with threads(settings.threads):
        inputs = load(params, dataset, paths, InputRequest(needs, settings.precision, finetune, settings.memory, True))
        with sole_writer(out.checkpoint, "training"):
            model = start_method(entry.kind, options, inputs.task(entry.trained_for), inputs, seed, device)
            images, val = (inputs.examples[split].to(device) for split in ("train", "val"))
            key = _resume_key(params, dataset, method, seed, inputs, device)
            resume = ResumePoint(f"{dataset} {method} seed {seed}", out.unfinished_training, key)
            result = train(model, images, settings, seed, lambda m: validation_auc(m, val, inputs.labels), resume)
            tune(model, val, inputs.labels)
            record = Record(
                kind=entry.kind,
                provider=method_source(entry.kind).provider,
                options=options,
                labels=inputs.labels,
                encoder=inputs.encoder,
                seed=seed,
                epoch=result.best_epoch,
                val_auc=validation_auc(model, val, inputs.labels),
                world=entry.trained_for,
                calibration=_calibrate(params, method, model, inputs, val),
                inspectable=model.inspectable().names,
                finetune=finetune,
            )
            save_checkpoint(out.checkpoint, model, record)
            write_text(out.history, pd.DataFrame(result.history).to_csv(index=False, lineterminator="\n"))
            write_text(out.timing, json.dumps(result.timing, indent=2) + "\n")
            out.unfinished_training.unlink(missing_ok=True)
            return result


def start_method(
    kind: str, options: Options, task: TaskContext, inputs: RunInputs, seed: int, device: torch.device
) -> Method[Any]:
    """Return an untrained method, initialised from the training images."""
    torch.manual_seed(seed)
    method = make_method(kind, options, task).to(device)
    images = inputs.examples["train"].to(device)
    method.start(Batch(images.inputs, images.compositions))
    return method


def _calibrate(
    params: Params, name: str, model: Method[Any], inputs: RunInputs, val: Examples
) -> dict[str, Calibration]:
    """Choose bias and feasibility threshold on validation data, for every world of the method."""
    thresholds, feasibility = params.evaluation.thresholds, params.evaluation.feasibility
    worlds = params.entry(name).worlds
    if feasibility == "likelihood" and "open" in worlds and model.likelihood() is None:
        print(f"{name} has no likelihood of compositions; feasibility is by words", file=sys.stderr)
    return {
        world: calibrate(
            model, val, inputs.labels, world, inputs.words if world == "open" else None, thresholds, feasibility
        )
        for world in worlds
    }


def _resume_key(params: Params, dataset: str, method: str, seed: int, inputs: RunInputs, device: torch.device) -> str:
    """Return the digest of all that training depends on: training continues only from a state with the same digest."""
    is_gpu = device.type == "cuda"
    key = {
        **run_records(params, dataset, method)["train"],
        "seed": seed,
        "inputs": inputs.identity,
        "words": inputs.encoder.get(WORD_VECTORS),
        "labels": inputs.labels.to_dict(),
        "device": torch.cuda.get_device_name(device) if is_gpu else torch.get_num_threads(),  # decide the last bits
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
