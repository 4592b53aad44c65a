"""Rows of the ablation tables: each is a method with some options changed, over several seeds."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.errors import pick
from duplex.features.store import open_features
from duplex.labels import LabelSpace
from duplex.params import Params
from duplex.report.aggregate import aggregate, read_metrics, write_json
from duplex.stages import evaluate, train


def run(params: Params, name: str, paths: ArtifactPaths | None = None) -> None:
    """Train and evaluate one row on every data set and seed of `ablation_run`; keep the metrics."""
    paths = paths or ArtifactPaths()
    pick(name, params.ablations, "ablation")
    found: dict[str, dict[str, Any]] = {}
    for dataset in params.ablation_run.datasets:
        for seed in params.ablation_run.seeds:
            with tempfile.TemporaryDirectory() as scratch:
                out = RunPaths(Path(scratch))
                train.run(params, dataset, name, seed, paths, out)
                found.setdefault(dataset, {})[str(seed)] = evaluate.run(params, dataset, name, seed, paths, out)
    write_json(found, paths.ablation(name))


def note_inputs(params: Params, dataset: str, paths: ArtifactPaths | None = None) -> None:
    """What every row of a data set depends on, as one small file."""
    paths = paths or ArtifactPaths()
    found = open_features(paths.features(dataset))
    entry = params.dataset(dataset)
    record = {
        "features": found.identity,
        "bad": np.flatnonzero(found.bad).tolist(),
        "labels": LabelSpace.load(paths.labels(dataset)).to_dict(),
        "training": asdict(entry.training),
        "encoder": entry.encoder.model_dump(),
    }
    write_json(record, paths.ablations / "inputs" / f"{dataset}.json")


def tabulate(params: Params, paths: ArtifactPaths | None = None) -> None:
    """`{data set: {row: {world: means}}}` of all rows."""
    paths = paths or ArtifactPaths()
    records = {name: read_metrics(paths.ablation(name), "dvc repro ablations/dvc.yaml") for name in params.ablations}
    runs = {
        (dataset, name): list(found[dataset].values())
        for dataset in params.ablation_run.datasets
        for name, found in records.items()
    }
    write_json(aggregate(runs), paths.ablations / "metrics.json")
