"""Train and evaluate of many cells in warm processes, with the very files that the two stages write.

What is missing is found, made, and handed to DVC: `dvc repro` runs none of it again. A killed sweep goes on where it
was: marks beside the files tell the cells that are made, and unfinished training has a state of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.encoders import resolve_device
from duplex.errors import DuplexError, UsageError, require
from duplex.runs.dvc_repo import Project
from duplex.runs.run_tasks import STAGES, Cell, Made, Maker, Task, forget, inputs_of, keys_of, missing_stages
from duplex.runs.worker_pool import on_processes
from duplex.stages import plan
from duplex.system.progress import Bar

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
        refuse_twice(what, values)
    for name in names:
        params.dataset(name)
    for row in rows:
        require(row, params.methods, "method")
    return [Cell(name, row, seed) for name in names for row in rows for seed in numbers]


def refuse_twice(what: str, values: Sequence[object]) -> None:
    twice = [value for value in values if list(values).count(value) > 1]
    if twice:
        raise UsageError(f"the {what} {twice[0]} is named twice")


def sweep(
    params: Params, cells: Sequence[Cell], jobs: int | None, engine: Engine, paths: ArtifactPaths | None = None
) -> Swept:
    """Make every cell that is missing."""
    paths = paths or ArtifactPaths()
    began, report = time.perf_counter(), Swept(len(cells))
    project = Project.at(paths.root.parent)
    ours = [cell for cell in cells if project and _in_run(params, cell)]
    changed = _changed(project, params, ours, paths) if project and ours else {}
    by_dvc = {cell: tuple(name for name in STAGES if cell.stage(name) in changed) for cell in ours}
    tasks = tasks_of(params, cells, paths, lambda cell: paths.run(cell.dataset, cell.method, cell.seed).root)
    todo = missing_of(tasks, by_dvc)
    report.there = len(tasks) - len(todo)
    report.apart = len(cells) - len(ours) if project else 0
    failed = {task.cell for task in todo} - tried(crew_of(params, cells, jobs, engine, paths)(todo), len(todo), report)
    handed = [task for task in tasks if by_dvc.get(task.cell) and task.cell not in failed]
    if project and handed:
        project.commit(targets_of(handed, changed))
        forget(handed)
        report.handed = len(handed)
    report.seconds = time.perf_counter() - began
    return report


def tasks_of(params: Params, cells: Sequence[Cell], paths: ArtifactPaths, out: Callable[[Cell], Path]) -> list[Task]:
    """What each cell stands on, and where its files go."""
    inputs = {name: inputs_of(name, paths) for name in dict.fromkeys(cell.dataset for cell in cells)}
    rows = dict.fromkeys((cell.dataset, cell.method) for cell in cells)
    keys = {(name, row): keys_of(plan.planned(params, name, row), inputs[name], params, name) for name, row in rows}
    return [Task(cell, out(cell), keys[cell.dataset, cell.method]) for cell in cells]


def missing_of(tasks: Sequence[Task], by_dvc: Mapping[Cell, Collection[str]] | None = None) -> list[Task]:
    """The cells to make. Marks tell what sweeps have made; `by_dvc` has the stages that DVC would run, of the cells
    that it knows: what it has is there."""
    found = []
    for task in tasks:
        stages, known = missing_stages(task), (by_dvc or {}).get(task.cell, STAGES)
        if "train" not in known:
            stages = tuple(name for name in stages if name in known)
        if stages:
            found.append(replace(task, train="train" in stages))
    return found


def tried(made: Iterator[Made], total: int, report: Swept) -> set[Cell]:
    """Let the cells be made, and count; those that were. What was said of a cell stands above the bar."""
    done: set[Cell] = set()
    with Bar("cells", total) as bar:
        for one in made:
            if one.said:
                print(one.said, end="", file=sys.stderr)
            if one.failed is None:
                done.add(one.task.cell)
            else:
                report.failed[str(one.task.cell)] = one.failed
            report.made = len(done)
            bar.show(len(done) + len(report.failed), {"failed": len(report.failed)} if report.failed else {})
    return done


def _in_run(params: Params, cell: Cell) -> bool:
    """Only these are stages of DVC."""
    run = params.run
    return cell.dataset in run.datasets and cell.method in run.methods and cell.seed in run.seeds


def _changed(project: Project, params: Params, cells: Sequence[Cell], paths: ArtifactPaths) -> dict[str, object]:
    """The stages that DVC would run, once what cells stand on is there: features that are absent, and the plan. Cells
    made of features that DVC does not know it would make again."""
    datasets = dict.fromkeys(cell.dataset for cell in cells)
    absent = [f"extract@{name}" for name in datasets if not paths.features(name).exists()]
    absent += [f"views@{name}" for name in datasets if not paths.views(name).parent.exists()]
    if absent:
        project.make(absent)
    plan.run(params, paths)
    before = [f"{stage}@{name}" for name in datasets for stage in ("prepare", "extract", "views")]
    changed = project.changed(["plan", *before, "train", "evaluate"])
    stale = [name for name in before if name in changed]
    if stale:
        raise DuplexError(
            f"{stale[0]} is not what dvc.lock knows: `dvc repro {stale[0]}` makes it anew, "
            f"`dvc commit {stale[0]}` keeps what is there"
        )
    return changed


def targets_of(tasks: Sequence[Task], changed: Collection[str]) -> list[str]:
    """The stages of these cells; by the name of their group where nothing else of it has changed. DVC then writes its
    lock once, not once a stage."""
    names = {stage: [task.cell.stage(stage) for task in tasks] for stage in STAGES}
    own = [name for stage in STAGES for name in names[stage]]
    rest = {name for name in changed if name.partition("@")[0] in STAGES} - set(own)
    return ["plan", *(own if rest else STAGES)]


def crew_of(params: Params, cells: Sequence[Cell], jobs: int | None, engine: Engine, paths: ArtifactPaths) -> Crew:
    """Who makes the cells: as many processes as have a GPU each, or the threads that training asks for."""
    automatic, cores = torch.get_num_threads(), _cores()
    wanted = {params.training(cell.dataset, cell.method).threads for cell in cells}
    widest = max((automatic if count == "auto" else count for count in wanted), default=1)
    maker = Maker(params, paths, automatic)
    if engine == "ray":
        from duplex.runs.ray_pool import on_ray

        return partial(on_ray, maker=maker, jobs=jobs, cpus=widest)
    gpus = _gpus() if resolve_device(params.device) == "cuda" else []
    return partial(on_processes, maker=maker, jobs=jobs or len(gpus) or max(1, cores // widest), gpus=gpus)


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]
