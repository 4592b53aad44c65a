"""Rows of the ablation tables by warm processes: the files of `ablate.run`, for the ablations' own DVC project."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from duplex.config.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.errors import require
from duplex.runs.dvc_repo import Project
from duplex.runs.run_tasks import Cell
from duplex.runs.sweep import Engine, Swept, crew_of, missing_of, refuse_twice, tasks_of, tried
from duplex.stages import ablate


def sweep_ablations(
    params: Params, rows: Sequence[str] | None, jobs: int | None, engine: Engine, paths: ArtifactPaths | None = None
) -> Swept:
    """Make every row that is missing, of those named. A row's runs wait beside the ablations until it is whole."""
    paths, began, run = paths or ArtifactPaths(), time.perf_counter(), params.ablation_run
    names = [require(name, params.ablations, "ablation") for name in rows or params.ablations]
    refuse_twice("ablation", names)
    report, project = Swept(len(names) * len(run.datasets) * len(run.seeds)), Project.at(paths.ablations)
    ablate.plan(params, paths)
    for dataset in run.datasets:
        ablate.note_inputs(params, dataset, paths)
    changed = project.changed(["plan", "inputs", "ablate"]) if project else {f"ablate@{name}": [] for name in names}
    missing = [name for name in names if f"ablate@{name}" in changed]
    cells = [Cell(dataset, name, seed) for dataset in run.datasets for name in missing for seed in run.seeds]
    todo = missing_of(tasks_of(params, cells, paths, lambda cell: _waiting(paths, cell.method, cell)))
    report.there = report.cells - len(todo)
    made = tried(crew_of(params, cells, jobs, engine, paths)(todo), len(todo), report)
    failed = {task.cell.method for task in todo if task.cell not in made}
    whole = [name for name in missing if name not in failed]
    for name in whole:
        _keep(params, name, paths)
    if project and whole:
        project.commit(["plan", "inputs", *(f"ablate@{name}" for name in whole)])
        for name in whole:
            shutil.rmtree(_waiting(paths, name))
        report.handed = sum(cell.method in whole for cell in cells)
    report.seconds = time.perf_counter() - began
    return report


def _waiting(paths: ArtifactPaths, name: str, cell: Cell | None = None) -> Path:
    """Where a row's runs wait, or one of them; neither git nor DVC looks there."""
    row = paths.ablations / "swept.partial" / name
    return row if cell is None else row / cell.dataset / str(cell.seed)


def _keep(params: Params, name: str, paths: ArtifactPaths) -> None:
    """What `ablate.run` leaves of a row."""
    found: dict[str, dict[str, object]] = {}
    for dataset in params.ablation_run.datasets:
        for seed in params.ablation_run.seeds:
            out = RunPaths(_waiting(paths, name, Cell(dataset, name, seed)))
            ablate.keep(out, paths.ablation_run(name, dataset, seed))
            found.setdefault(dataset, {})[str(seed)] = json.loads(out.metrics.read_text(encoding="utf-8"))
    ablate.write_row(found, name, paths)
