"""Train and evaluate of many cells in warm processes, with the very files that the two stages write.

What is missing is found, made, and handed to DVC: `dvc repro` runs none of it again. A killed sweep goes on where it
was: marks beside the files tell the cells that are made, and unfinished training has a state of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from duplex.artifacts import ArtifactPaths
from duplex.errors import DuplexError, UsageError, pick
from duplex.params import Params
from duplex.progress import Live
from duplex.stages import plan
from duplex.stages.cells import Cell, Made, Maker, Task, forget, inputs_of, keys_of, missing_stages
from duplex.stages.crew import on_processes
from duplex.stages.handover import Project
from duplex.stages.inputs import pick_device

Engine = Literal["local", "ray"]
Crew = Callable[[Sequence[Task]], Iterator[Made]]


@dataclass
class Swept:
    """What came of a sweep."""

    cells: int
    there: int = 0  # nothing was missing
    made: int = 0
    handed: int = 0  # to DVC, of this sweep and of those that were killed before
    apart: int = 0  # no part of `run:`, and no affair of DVC
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)  # cell -> why


def grid(
    params: Params, datasets: Sequence[str] | None, methods: Sequence[str] | None, seeds: Sequence[int] | None
) -> list[Cell]:
    """The cells asked for; `run:` says what nobody names. One data set after another, so that each is loaded once."""
    run = params.run
    names, rows, numbers = datasets or run.datasets, methods or run.methods, seeds or run.seeds
    for what, values in (("data set", names), ("method", rows), ("seed", numbers)):
        twice = [value for value in values if list(values).count(value) > 1]
        if twice:
            raise UsageError(f"the {what} {twice[0]} is named twice")
    for name in names:
        params.dataset(name)
    for row in rows:
        pick(row, params.methods, "method")
    return [Cell(name, row, seed) for name in names for row in rows for seed in numbers]


def sweep(
    params: Params, cells: Sequence[Cell], jobs: int | None, engine: Engine, paths: ArtifactPaths | None = None
) -> Swept:
    """Make every cell that is missing."""
    paths = paths or ArtifactPaths()
    began, report = time.perf_counter(), Swept(len(cells))
    crew = crew_of(params, cells, jobs, engine, paths)
    project = Project.at(paths.root.parent)
    ours = [cell for cell in cells if project and _in_run(params, cell)]
    changed = _changed(project, params, ours, paths) if project and ours else None
    tasks = _tasks(params, cells, paths)
    todo, unhanded = [], []
    for task in tasks:
        state = _missing(task, changed if task.cell in ours else None)
        if state:
            todo.append(Task(task.cell, task.out, task.keys, "train" in state))
        elif changed and _is_changed(task.cell, changed):
            unhanded.append(task)  # made by a sweep that was killed before it could hand them over
    report.there = len(tasks) - len(todo)
    for made in _shown(crew(todo), len(todo)):
        if made.failed is None:
            report.made += 1
            unhanded.append(made.task)
        else:
            report.failed[str(made.task.cell)] = made.failed
    handed = [task for task in unhanded if task.cell in ours]
    report.apart = len(cells) - len(ours) if project else 0
    if project and handed:
        project.commit(targets_of(handed, changed or {}))
        forget(handed)
        report.handed = len(handed)
    report.seconds = time.perf_counter() - began
    return report


def _tasks(params: Params, cells: Sequence[Cell], paths: ArtifactPaths) -> list[Task]:
    inputs = {name: inputs_of(name, paths) for name in dict.fromkeys(cell.dataset for cell in cells)}
    rows = dict.fromkeys((cell.dataset, cell.method) for cell in cells)
    keys = {(name, row): keys_of(plan.planned(params, name, row), inputs[name], params, name) for name, row in rows}
    return [
        Task(cell, paths.run(cell.dataset, cell.method, cell.seed).root, keys[cell.dataset, cell.method])
        for cell in cells
    ]


def _in_run(params: Params, cell: Cell) -> bool:
    """Only these are stages of DVC."""
    run = params.run
    return cell.dataset in run.datasets and cell.method in run.methods and cell.seed in run.seeds


def _changed(project: Project, params: Params, cells: Sequence[Cell], paths: ArtifactPaths) -> dict[str, object]:
    """The stages that DVC would run, once what cells stand on is there: features that are absent, and the plan. Cells
    made of features that DVC does not know it would make again."""
    datasets = dict.fromkeys(cell.dataset for cell in cells)
    absent = [name for name in datasets if not paths.features(name).exists()]
    if absent:
        project.make(f"extract@{name}" for name in absent)
    plan.run(params, paths)
    before = [f"{stage}@{name}" for name in datasets for stage in ("prepare", "extract")]
    changed = project.changed(["plan", *before, "train", "evaluate"])
    stale = [name for name in before if name in changed]
    if stale:
        raise DuplexError(
            f"{stale[0]} is not what dvc.lock knows: `dvc repro {stale[0]}` makes it anew, "
            f"`dvc commit {stale[0]}` keeps what is there"
        )
    return changed


def _is_changed(cell: Cell, changed: dict[str, object]) -> bool:
    return cell.stage("train") in changed or cell.stage("evaluate") in changed


def _missing(task: Task, changed: dict[str, object] | None) -> tuple[str, ...]:
    """The stages to run: DVC knows those that it has, marks tell of the others."""
    by_mark = missing_stages(task)
    if changed is None or not by_mark:
        return by_mark
    if task.cell.stage("train") in changed:
        return by_mark
    return ("evaluate",) if task.cell.stage("evaluate") in changed else ()


def targets_of(tasks: Sequence[Task], changed: dict[str, object]) -> list[str]:
    """The stages of these cells; by the name of their group where nothing else of it has changed. DVC then writes its
    lock once, not once a stage."""
    names = {stage: [task.cell.stage(stage) for task in tasks] for stage in ("train", "evaluate")}
    rest = {name for name in changed if name.startswith(("train@", "evaluate@"))} - {
        *names["train"],
        *names["evaluate"],
    }
    return ["plan", *(names if not rest else (*names["train"], *names["evaluate"]))]


def crew_of(params: Params, cells: Sequence[Cell], jobs: int | None, engine: Engine, paths: ArtifactPaths) -> Crew:
    """Who makes the cells: as many processes as have a GPU each, or the threads that training asks for."""
    automatic, cores = torch.get_num_threads(), _cores()
    wanted = {params.training(cell.dataset, cell.method).threads for cell in cells}
    widest = max((automatic if count == "auto" else count for count in wanted), default=1)
    maker = Maker(params, paths, automatic)
    if engine == "ray":
        from duplex.stages.ray_crew import on_ray

        return partial(on_ray, maker=maker, jobs=jobs, cpus=widest)
    gpus = _gpus() if pick_device(params.device).type == "cuda" else []
    return partial(on_processes, maker=maker, jobs=jobs or len(gpus) or max(1, cores // widest), gpus=gpus)


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]


def _shown(made: Iterator[Made], total: int) -> Iterator[Made]:
    """What warnings were said of a cell is said above the bar."""
    failed = 0
    with Live("cells", total) as live:
        for done, one in enumerate(made, 1):
            failed += one.failed is not None
            if one.said:
                print(one.said, end="", file=sys.stderr)
            live.show(done, {"failed": failed} if failed else {})
            yield one
