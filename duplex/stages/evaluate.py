"""Evaluate one run on the test split: write metrics, the seen-unseen curve, and predictions per image."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.encoders import resolve_device
from duplex.library.inputs import InputRequest, LoadInputs, load_inputs, make_deterministic
from duplex.library.run_evaluation import calibration_for, evaluate_world, frequency_accuracies, term_metrics
from duplex.methods.registry import find_method
from duplex.stages.outdated_runs import require_current_run
from duplex.system.files import write_json, write_text
from duplex.system.threads import threads
from duplex.training.checkpoint import load_checkpoint, read_checkpoint


def run(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    paths: ArtifactPaths = ArtifactPaths(),
    out: RunPaths | None = None,
    load: LoadInputs = load_inputs,
) -> dict[str, Any]:
    """Evaluate a trained run on the test split, in the closed and open world; write the results, return the metrics.

    Worlds that the method's option `world` or `evaluation.worlds` in params.yaml excludes are skipped.

    out: paths of the checkpoint and of the results, by default the run's own folder.
    load: function that loads features and labels, by default from disk.
    """
    out = out or paths.run(dataset, method, seed)
    training, settings, worlds = params.training(dataset, method), params.evaluation, params.worlds(method)
    checkpoint = read_checkpoint(out.checkpoint)
    record = checkpoint.record
    require_current_run(checkpoint, params, dataset, method, seed, paths)
    make_deterministic()
    device = torch.device(resolve_device(params.device))
    needs = find_method(record.kind).needs(record.options)
    with threads(training.threads):
        inputs = load(params, dataset, paths, InputRequest(needs, training.precision, record.finetune, training.memory))
        inputs.examples["test"] = inputs.examples["test"].to(device)
        model = load_checkpoint(checkpoint, inputs.context(), inputs.encoder).to(
            device
        )  # refuses a file replaced since
        start = time.perf_counter()
        results = {
            world: evaluate_world(model, inputs, settings, world, calibration_for(record, world, out.checkpoint))
            for world in worlds
        }
        timing = {"test_seconds": time.perf_counter() - start, "images": len(inputs.examples["test"])}
        metrics: dict[str, Any] = {world: result.metrics for world, result in results.items()}
        if "closed" in results:
            metrics["groups"] = frequency_accuracies(results["closed"], inputs)
            if settings.protocol == "exact":
                metrics |= {"terms": settings.terms, **(term_metrics(model, inputs) if settings.terms else {})}
    if settings.protocol == "exact":
        metrics["bootstrap"] = settings.bootstrap
    if record.val_auc_all is not None:
        metrics["val_auc_all"] = 100 * record.val_auc_all
    metrics |= {f"recipe_{place}": dict(recipe) for place, recipe in enumerate(record.recipes)}
    metrics |= {"val_auc": 100 * record.val_auc, "epoch": record.epoch, "bad_images": inputs.bad}
    write_json(out.metrics, metrics)
    write_json(out.evaluation_timing, timing)
    _write(pd.concat([result.curve for result in results.values()]), out.curve)
    _write(pd.concat([result.predictions for result in results.values()]), out.predictions)
    return metrics


def _write(table: pd.DataFrame, path: Path) -> None:
    write_text(path, table.to_csv(index=False, lineterminator="\n", float_format="%.9g"))
