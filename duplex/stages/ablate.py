"""Train and evaluate ablations (methods with options changed) on data sets and seeds listed in params.yaml."""

from __future__ import annotations

import json
import shutil
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.config.run_key import Record, run_records
from duplex.errors import require
from duplex.features.store import open_features
from duplex.labels import LabelSpace
from duplex.report.aggregate import aggregate, read_metrics
from duplex.stages import evaluate, train
from duplex.stages.plan import check_options, write_json_folder
from duplex.system.code_hash import code_hash
from duplex.system.files import write_json


def plan(params: Params, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write the files that the ablations' DVC stages depend on: `plan/table.json` and `plan/rows/ABLATION.json`.

    They hold settings and hashes of code. Raise UsageError if an ablation has a wrong option or lacks a required input.
    """
    datasets, seeds = params.ablation_run.datasets, list(params.ablation_run.seeds)
    records: dict[str, Record] = {
        f"rows/{name}.json": {"seeds": seeds, **{dataset: run_records(params, dataset, name) for dataset in datasets}}
        for name in params.ablations
    }
    records["table.json"] = {"code": code_hash("ablations")}
    folder = paths.ablations / "plan"
    check_options(params, datasets, tuple(params.ablations), records, folder.with_suffix(".partial"))
    write_json_folder(records, folder)


def run(params: Params, name: str, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Train and evaluate a method with changed options on data sets and seeds of `ablation_run`; save the results."""
    require(name, params.ablations, "ablation")
    with tempfile.TemporaryDirectory() as scratch:
        for dataset, seed in product(params.ablation_run.datasets, params.ablation_run.seeds):
            out = run_paths(Path(scratch), dataset, seed)
            train.run(params, dataset, name, seed, paths, out)
            evaluate.run(params, dataset, name, seed, paths, out)
        copy_results(params, name, Path(scratch), paths)


def run_paths(folder: Path, dataset: str, seed: int) -> RunPaths:
    """Return the paths of the files of one run (data set and seed) of an ablation, in a folder of such runs."""
    return RunPaths(folder / dataset / str(seed))


def copy_results(params: Params, name: str, folder: Path, paths: ArtifactPaths) -> None:
    """Copy the metrics and predictions of an ablation's runs from a scratch folder to the folder of all ablations.

    All metrics are also written to one JSON file, as `{data set: {seed: metrics}}`.

    folder: the scratch folder.
    """
    metrics: dict[str, dict[str, Any]] = {}
    for dataset, seed in product(params.ablation_run.datasets, params.ablation_run.seeds):
        source, target = run_paths(folder, dataset, seed), paths.ablation_run(name, dataset, seed)
        target.root.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.metrics, target.metrics)
        shutil.copyfile(source.predictions, target.predictions)
        write_json(target.settings, _settings(params, name, dataset))
        metrics.setdefault(dataset, {})[str(seed)] = json.loads(source.metrics.read_text(encoding="utf-8"))
    write_json(paths.ablation(name), metrics)


def is_outdated(params: Params, name: str, dataset: str, run: RunPaths) -> bool:
    """Return whether a run of an ablation was made with other settings than those of params.yaml.

    False for a run without a record of its settings, as earlier versions wrote them.
    """
    if not run.settings.is_file():
        return False
    try:
        return bool(json.loads(run.settings.read_text(encoding="utf-8")) != _settings(params, name, dataset))
    except ValueError:
        return True


def _settings(params: Params, name: str, dataset: str) -> Record:
    """Return the settings of params.yaml that a run of an ablation depends on, as stage -> settings.

    Hashes of code are left out, and so are the files of earlier stages.
    """
    records = run_records(params, dataset, name)
    return {stage: {key: value for key, value in each.items() if key != "code"} for stage, each in records.items()}


def write_inputs(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write a small file that identifies a data set's labels and features; the ablations' DVC stages depend on it."""
    features = open_features(paths.features(dataset))
    record = {
        "features": {**features.identity, "features": features.contents},
        "bad": np.flatnonzero(features.bad).tolist(),
        "labels": LabelSpace.load(paths.labels(dataset)).to_dict(),
    }
    write_json(paths.ablations / "inputs" / f"{dataset}.json", record)


def tabulate(params: Params, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write the metrics of all ablations, averaged over seeds, as `{data set: {ablation: {world: means}}}`."""
    metrics = {name: read_metrics(paths.ablation(name), "make ablations") for name in params.ablations}
    runs = {
        (dataset, name): list(by_dataset[dataset].values())
        for dataset in params.ablation_run.datasets
        for name, by_dataset in metrics.items()
    }
    write_json(paths.ablations / "metrics.json", aggregate(runs))
