"""Execute ablations in parallel processes: the files are those of `ablate.run`, in the ablations' own DVC project."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duplex.config.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.errors import require
from duplex.runs.dvc_repo import DvcRepo
from duplex.runs.run_tasks import RunId
from duplex.runs.sweep import (
    Engine,
    SweepReport,
    choose_engine,
    execute,
    make_tasks,
    missing_tasks,
    refuse_duplicates,
)
from duplex.stages import ablate


def sweep_ablations(
    params: Params,
    ablations: Sequence[str] | None,
    jobs: int | None,
    engine: Engine,
    paths: ArtifactPaths | None = None,
) -> SweepReport:
    """Execute all missing runs of ablations, by default of all; commit those ablations whose runs are all complete."""
    paths, start, settings = paths or ArtifactPaths(), time.perf_counter(), params.ablation_run
    names = [require(name, params.ablations, "ablation") for name in ablations or params.ablations]
    refuse_duplicates("ablation", names)
    report = SweepReport(len(names) * len(settings.datasets) * len(settings.seeds))
    repo = DvcRepo.at(paths.ablations)
    ablate.plan(params, paths)
    for dataset in settings.datasets:
        ablate.write_inputs(params, dataset, paths)
    changed = repo.changed(["plan", "inputs", "ablate"]) if repo else {f"ablate@{name}": [] for name in names}
    outdated = [name for name in names if f"ablate@{name}" in changed]
    runs = [RunId(dataset, name, seed) for dataset in settings.datasets for name in outdated for seed in settings.seeds]
    missing = missing_tasks(make_tasks(params, runs, paths, lambda run: _run_folder(paths, run)))
    report.complete = report.runs - len(missing)
    succeeded = execute(choose_engine(params, runs, jobs, engine, paths), missing, report)
    failed = {task.run.method for task in missing if task.run not in succeeded}
    complete = [name for name in outdated if name not in failed]
    for name in complete:
        _write_ablation(params, name, paths)
    if repo and complete:
        repo.commit(["plan", "inputs", *(f"ablate@{name}" for name in complete)])
        for name in complete:
            shutil.rmtree(_ablation_folder(paths, name))
        report.committed = sum(run.method in complete for run in runs)
    report.seconds = time.perf_counter() - start
    return report


def _ablation_folder(paths: ArtifactPaths, name: str) -> Path:
    """Return where an ablation's runs are until all are complete; git and DVC ignore it."""
    return paths.ablations / "swept.partial" / name


def _run_folder(paths: ArtifactPaths, run: RunId) -> Path:
    return _ablation_folder(paths, run.method) / run.dataset / str(run.seed)


def _write_ablation(params: Params, name: str, paths: ArtifactPaths) -> None:
    """Write the files of `ablate.run` from those of the runs."""
    metrics: dict[str, dict[str, Any]] = {}
    for dataset in params.ablation_run.datasets:
        for seed in params.ablation_run.seeds:
            files = RunPaths(_run_folder(paths, RunId(dataset, name, seed)))
            ablate.copy_results(files, paths.ablation_run(name, dataset, seed))
            metrics.setdefault(dataset, {})[str(seed)] = json.loads(files.metrics.read_text(encoding="utf-8"))
    ablate.write_metrics(metrics, name, paths)
