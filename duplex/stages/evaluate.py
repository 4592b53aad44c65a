"""Checkpoint and feature cache -> metrics of the test split, its curve, its predictions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd

from duplex.artifacts import ArtifactPaths
from duplex.assessment import Pass, assess
from duplex.checkpoint import load_checkpoint, read_record
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.evidence import Rivals
from duplex.evaluation.metrics import Metrics, measure
from duplex.features.examples import Examples
from duplex.labels import LabelSpace
from duplex.params import EvaluationParams, Params
from duplex.stages.inputs import load_inputs, pick_device


def run(params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths | None = None) -> dict[str, Any]:
    """Evaluate a trained run on the test split, in every world that params.yaml names."""
    paths = paths or ArtifactPaths()
    out, settings = paths.run(dataset, method, seed), params.evaluation
    inputs = load_inputs(params, dataset, paths)
    device = pick_device(params.device)
    network = load_checkpoint(out.checkpoint, inputs.tower, inputs.encoder, inputs.labels).to(device)
    test = inputs.examples["test"].to(device)
    metrics: dict[str, Any] = {}
    curves, predictions = [], []
    for world in settings.worlds:
        columns = inputs.labels.target(world, "test")
        found = assess(network, test, inputs.labels, columns, k=max(settings.k), top=3)
        rivals = found.evidence.rivals()
        metrics[world] = _metrics(rivals, inputs.labels, found, settings)
        curves.append(Curve.of(Margins.of(rivals)).table().assign(world=world))
        predictions.append(_predictions(found, rivals, test, inputs.labels, inputs.manifest).assign(world=world))
    record = read_record(out.checkpoint)
    whole: dict[str, Any] = {
        **metrics,
        "val_auc": 100 * record.val_auc,
        "epoch": record.epoch,
        "bad_images": inputs.bad,
    }
    out.metrics.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    pd.concat(curves).to_csv(out.curve, index=False, lineterminator="\n", float_format="%.6g")
    pd.concat(predictions).to_csv(out.predictions, index=False, lineterminator="\n", float_format="%.6g")
    return whole


def _metrics(rivals: Rivals, labels: LabelSpace, found: Pass, settings: EvaluationParams) -> dict[str, Any]:
    """S, U, HM, AUC and their ends for k = 1; the same under `top_k` for every further k."""
    states, objects = labels.state_of(found.columns), labels.object_of(found.columns)
    results = {k: measure(rivals, k, states=states, objects=objects, rounds=settings.bootstrap) for k in settings.k}
    return {**flat(results.pop(1)), **{f"top_{k}": flat(result) for k, result in results.items()}}


def flat(metrics: Metrics) -> dict[str, Any]:
    """Intervals as `auc_low`, `auc_high`: DVC drops lists."""
    record = {}
    for key, value in metrics.to_dict().items():
        if key.endswith("_interval"):
            name = key.removesuffix("_interval")
            record[f"{name}_low"], record[f"{name}_high"] = value if value is not None else (None, None)
        else:
            record[key] = value
    return record


def _predictions(
    found: Pass, rivals: Rivals, examples: Examples, labels: LabelSpace, manifest: pd.DataFrame
) -> pd.DataFrame:
    """One row an image: its label, the best three compositions at b = 0, and the bias at which it turns."""
    margins = Margins.of(rivals)
    margin = np.empty(len(examples))
    margin[margins.is_seen], margin[~margins.is_seen] = margins.seen, margins.unseen
    own = examples.compositions.cpu().numpy()
    top = {f"top{place + 1}": labels.names(found.top[:, place]) for place in range(found.top.shape[1])}
    return pd.DataFrame(
        {
            "row": examples.rows,
            "image": manifest["image"].to_numpy()[examples.rows],
            "label": labels.names(own),
            "seen": margins.is_seen.astype(int),
            "right": margins.right(0.0).astype(int),
            "margin": margin,
            **top,
        }
    )
