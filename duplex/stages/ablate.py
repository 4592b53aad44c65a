"""Rows of the ablation tables: each is a method with some options changed, over several seeds."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from duplex.config.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.errors import require
from duplex.features.store import open_features
from duplex.labels import LabelSpace
from duplex.report.aggregate import aggregate, read_metrics, write_json
from duplex.stages import evaluate, train
from duplex.stages.plan import planned
from duplex.system.files import replaced_folder

KEPT = ("metrics", "predictions")  # of every run: what tables and comparisons read


def plan(params: Params, paths: ArtifactPaths | None = None) -> None:
    """Write what every row depends on: its options on each data set, and its code."""
    paths = paths or ArtifactPaths()
    with replaced_folder(paths.ablations / "plan") as folder:
        for name in params.ablations:
            record = {dataset: planned(params, dataset, name) for dataset in params.ablation_run.datasets}
            write_json({"seeds": list(params.ablation_run.seeds), **record}, folder / f"{name}.json")


def run(params: Params, name: str, paths: ArtifactPaths | None = None) -> None:
    """Train and evaluate one row on every data set and seed of `ablation_run`; keep metrics and predictions."""
    paths = paths or ArtifactPaths()
    require(name, params.ablations, "ablation")
    found: dict[str, dict[str, Any]] = {}
    for dataset in params.ablation_run.datasets:
        for seed in params.ablation_run.seeds:
            with tempfile.TemporaryDirectory() as scratch:
                out, kept = RunPaths(Path(scratch)), paths.ablation_run(name, dataset, seed)
                train.run(params, dataset, name, seed, paths, out)
                found.setdefault(dataset, {})[str(seed)] = evaluate.run(params, dataset, name, seed, paths, out)
                keep(out, kept)
    write_row(found, name, paths)


def keep(out: RunPaths, kept: RunPaths) -> None:
    """Of a run, what tables and comparisons read."""
    kept.root.mkdir(parents=True, exist_ok=True)
    for part in KEPT:
        shutil.copyfile(getattr(out, part), getattr(kept, part))


def write_row(found: Mapping[str, Mapping[str, Any]], name: str, paths: ArtifactPaths) -> None:
    """`{data set: {seed: metrics}}` of a row."""
    write_json(found, paths.ablation(name))


def note_inputs(params: Params, dataset: str, paths: ArtifactPaths | None = None) -> None:
    """What every row of a data set depends on, as one small file."""
    paths = paths or ArtifactPaths()
    found = open_features(paths.features(dataset))
    record = {
        "features": found.identity,
        "bad": np.flatnonzero(found.bad).tolist(),
        "labels": LabelSpace.load(paths.labels(dataset)).to_dict(),
        "encoder": params.dataset(dataset).encoder.model_dump(),
    }
    if params.augmentation(dataset) is not None:
        record["views"] = open_features(paths.views(dataset)).identity
    write_json(record, paths.ablations / "inputs" / f"{dataset}.json")


def tabulate(params: Params, paths: ArtifactPaths | None = None) -> None:
    """`{data set: {row: {world: means}}}` of all rows."""
    paths = paths or ArtifactPaths()
    records = {name: read_metrics(paths.ablation(name), "make ablations") for name in params.ablations}
    runs = {
        (dataset, name): list(found[dataset].values())
        for dataset in params.ablation_run.datasets
        for name, found in records.items()
    }
    write_json(aggregate(runs), paths.ablations / "metrics.json")
