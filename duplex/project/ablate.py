"""Train and evaluate ablations (methods with options changed) on data sets and seeds listed in params.yaml.

Train and evaluate ablations (methods with some options changed) in parallel; commit their results to DVC.

The processes write the same files as `duplex.project.ablate.run`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.errors import require
from duplex.features.file import open_features
from duplex.labels import LabelSpace
from duplex.project import stages
from duplex.project.stamps import StageRecord, check_options, run_records, write_json_folder
from duplex.project.sweep import (
    CHANGED_PARAMS,
    DvcRepo,
    Engine,
    SweepReport,
    execute,
    is_unchanged,
    make_tasks,
    missing_tasks,
    refuse_duplicates,
    task_executor,
)
from duplex.project.train import train_stage
from duplex.project.trials import RunId
from duplex.report.aggregate import aggregate, read_metrics
from duplex.system.files import write_json
from duplex.system.plugins import code_hash


def plan(params: Params, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write the files that the ablations' DVC stages depend on: `plan/table.json` and `plan/rows/ABLATION.json`.

    They hold settings and hashes of code. Raise UsageError if an ablation has a wrong option or lacks a required input.
    """
    datasets, seeds = params.ablation_run.datasets, list(params.ablation_run.seeds)
    records: dict[str, StageRecord] = {
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
            train_stage(params, dataset, name, seed, paths, out)
            stages.evaluate_stage(params, dataset, name, seed, paths, out)
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


def _settings(params: Params, name: str, dataset: str) -> StageRecord:
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


def sweep_ablations(
    params: Params,
    ablations: Sequence[str] | None,
    jobs: int | None,
    engine: Engine,
    paths: ArtifactPaths = ArtifactPaths(),
) -> SweepReport:
    """Train and evaluate missing runs of `ablations` (methods with options changed; None: all); return a `SweepReport`.

    The report has counts and errors. Ablations whose runs are complete are committed to DVC.
    """
    start, settings = time.perf_counter(), params.ablation_run
    names = [require(name, params.ablations, "ablation") for name in ablations or params.ablations]
    refuse_duplicates("ablation", names)
    report = SweepReport(len(names) * len(settings.datasets) * len(settings.seeds))
    repo = DvcRepo.at(paths.ablations)
    if repo:
        repo.require_free(paths.ablations)
    plan(params, paths)
    for dataset in settings.datasets:
        write_inputs(params, dataset, paths)
    changed = repo.changed(["plan", "inputs", "ablate"]) if repo else {f"ablate@{name}": [] for name in names}
    outdated = [name for name in names if f"ablate@{name}" in changed]
    runs = [RunId(dataset, name, seed) for dataset in settings.datasets for name in outdated for seed in settings.seeds]
    unfinished = paths.ablations / "swept.partial"  # runs until all of their ablation are complete; git ignores it

    def out(run: RunId) -> Path:
        return run_paths(unfinished / run.method, run.dataset, run.seed).root

    missing = missing_tasks(make_tasks(params, runs, paths, out))
    report.complete = report.runs - len(missing)
    wanted = {params.training(run.dataset, run.method).threads for run in runs}
    succeeded = execute(task_executor(params, wanted, jobs, engine, paths), missing, report)
    failed = {task.run.method for task in missing if task.run not in succeeded}
    complete = [name for name in outdated if name not in failed]
    for name in complete:
        copy_results(params, name, unfinished / name, paths)
    if repo and complete and not is_unchanged(params, paths):
        report.not_committed = CHANGED_PARAMS
    elif repo and complete:
        repo.commit(["plan", "inputs", *(f"ablate@{name}" for name in complete)])
        for name in complete:
            shutil.rmtree(unfinished / name)
        report.committed = sum(run.method in complete for run in runs)
    report.seconds = time.perf_counter() - start
    return report
