"""The stage `evaluate`: a checkpoint -> exact metrics, curve, predictions of test images."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from duplex.encoders.base import resolve_device
from duplex.labels import SPLITS
from duplex.methods.base import UnsuitableMethod
from duplex.methods.prompts import encoded_once
from duplex.project.run import LoadInputs, ProjectRun, load_inputs
from duplex.project.stream import AdaptableRun, evaluate_stream
from duplex.recognition.worlds import calibration_for, evaluate_world, frequency_accuracies, term_metrics
from duplex.report.retrieval import Retrieval, retrieval_numbers
from duplex.system.files import write_json, write_text
from duplex.training.checkpoint import load_checkpoint
from duplex.training.inputs import InputRequest
from duplex.training.run import reproducible


def evaluate_stage(run: ProjectRun, load: LoadInputs = load_inputs) -> dict[str, Any]:
    """Evaluate a run on the test split in each of its worlds; writes and returns metrics."""
    out = run.files
    training = run.params.training(run.dataset, run.method)
    settings = run.params.evaluation
    checkpoint = run.checkpoint()
    record = checkpoint.record
    device = torch.device(resolve_device(run.params.device))
    with reproducible(training.threads):
        inputs = load(run.data, InputRequest.of(record, training))
        stamp = run.stamp("evaluate", inputs.read)
        for split in ["test"] if settings.stream is None else SPLITS:
            inputs.examples[split] = inputs.examples[split].to(device)
        model = load_checkpoint(checkpoint, inputs.context(), inputs.encoder).to(device)
        with encoded_once(model):
            start = time.perf_counter()
            results = {
                world: evaluate_world(model, inputs, settings, world, calibration_for(record, world, out.checkpoint))
                for world in run.params.worlds(run.method)
            }
            timing = {"test_seconds": time.perf_counter() - start, "images": len(inputs.examples["test"])}
            metrics: dict[str, Any] = {world: result.metrics for world, result in results.items()}
            if "closed" in results:
                metrics["groups"] = frequency_accuracies(results["closed"], inputs)
                metrics |= {"terms": settings.terms, **(term_metrics(model, inputs) if settings.terms else {})}
                numbers = retrieval_numbers(Retrieval(model.inspectable(), inputs.labels, inputs.examples["test"]))
                metrics |= {"retrieval": numbers} if numbers else {}
        predictions = [result.predictions for result in results.values()]
        if settings.stream is not None:
            stream = AdaptableRun(model, inputs, settings, settings.stream)
            try:
                metrics["stream"], streamed = evaluate_stream(stream, results, record.calibration or {})
                predictions += streamed
            except UnsuitableMethod as error:
                print(
                    f"duplex: {run.dataset} {run.method} seed {run.seed} is not adapted to the stream: {error}",
                    file=sys.stderr,
                )
        if inputs.glove_vectors is not None:
            metrics["word_vectors"] = inputs.glove_vectors.to_dict()
    metrics["bootstrap"] = settings.bootstrap
    if record.val_auc_all is not None:
        metrics["val_auc_all"] = 100 * record.val_auc_all
    metrics |= {f"recipe_{place}": dict(recipe) for place, recipe in enumerate(record.recipes)}
    metrics |= {"val_auc": 100 * record.val_auc, "epoch": record.epoch, "bad_images": inputs.bad}
    write_json(out.metrics, metrics)
    write_json(out.evaluation_timing, timing)
    write_table(pd.concat([result.curve for result in results.values()]), out.curve)
    write_table(pd.concat(predictions), out.predictions)
    run.write_stamp("evaluate", stamp, [out.metrics, out.curve, out.predictions])
    return metrics


def write_table(table: pd.DataFrame, path: Path) -> None:
    write_text(path, table.to_csv(index=False, lineterminator="\n", float_format="%.9g"))
