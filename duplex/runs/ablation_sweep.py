"""Train and evaluate ablations (methods with some options changed) in parallel; commit their results to DVC.

The processes write the same files as `duplex.stages.ablate.run`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.errors import require
from duplex.runs.dvc_repo import DvcRepo
from duplex.runs.run_tasks import RunId
from duplex.runs.sweep import (
    CHANGED_PARAMS,
    Engine,
    SweepReport,
    execute,
    is_unchanged,
    make_tasks,
    missing_tasks,
    refuse_duplicates,
    task_executor,
)
from duplex.stages import ablate


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
    ablate.plan(params, paths)
    for dataset in settings.datasets:
        ablate.write_inputs(params, dataset, paths)
    changed = repo.changed(["plan", "inputs", "ablate"]) if repo else {f"ablate@{name}": [] for name in names}
    outdated = [name for name in names if f"ablate@{name}" in changed]
    runs = [RunId(dataset, name, seed) for dataset in settings.datasets for name in outdated for seed in settings.seeds]
    unfinished = paths.ablations / "swept.partial"  # runs until all of their ablation are complete; git ignores it

    def out(run: RunId) -> Path:
        return ablate.run_paths(unfinished / run.method, run.dataset, run.seed).root

    missing = missing_tasks(make_tasks(params, runs, paths, out))
    report.complete = report.runs - len(missing)
    succeeded = execute(task_executor(params, runs, jobs, engine, paths), missing, report)
    failed = {task.run.method for task in missing if task.run not in succeeded}
    complete = [name for name in outdated if name not in failed]
    for name in complete:
        ablate.copy_results(params, name, unfinished / name, paths)
    if repo and complete and not is_unchanged(params, paths):
        report.not_committed = CHANGED_PARAMS
    elif repo and complete:
        repo.commit(["plan", "inputs", *(f"ablate@{name}" for name in complete)])
        for name in complete:
            shutil.rmtree(unfinished / name)
        report.committed = sum(run.method in complete for run in runs)
    report.seconds = time.perf_counter() - start
    return report
