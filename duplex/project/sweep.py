"""Train and evaluate many runs in processes that load inputs once; writes what `dvc repro` writes.

Only runs that are missing or outdated are executed. Complete runs are committed to DVC, so that
`dvc repro` does not repeat them. An interrupted sweep resumes after the last whole epoch.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.encoders.base import resolve_device
from duplex.errors import DuplexError, UsageError
from duplex.project.evaluate import evaluate_stage
from duplex.project.plan import write_plan
from duplex.project.run import DATA_STAGES, RUN_STAGES, LastDatasetLoader, LoadInputs, ProjectData, ProjectRun
from duplex.project.stamps import Stamp
from duplex.project.train import train_stage
from duplex.system.processes import BrokenProcessPool, ProgressBar, WorkerProcess
from duplex.system.threads import Threads, cpu_cores

LONGEST_REASON = 300


@dataclass(frozen=True)
class DvcRepo:
    """A folder with a dvc.yaml, in which DVC's commands are run."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> DvcRepo | None:
        """The pipeline in a folder; None without a dvc.yaml, a DVC repository or DVC itself."""
        place = folder.resolve()
        in_repository = any((parent / ".dvc").is_dir() for parent in (place, *place.parents))
        has_pipeline = in_repository and (folder / "dvc.yaml").is_file() and find_spec("dvc")
        return cls(folder) if has_pipeline else None

    def changed(self, targets: Collection[str]) -> dict[str, Any]:
        """The stages among `targets` that DVC would run again, with what changed (DVC's JSON)."""
        status: dict[str, Any] = json.loads(self._dvc("status", "--json", *targets) or "{}")
        return {name.rpartition(":")[2]: changes for name, changes in status.items()}

    def repro(self, targets: Iterable[str]) -> None:
        """Run stages and all stages before them; DVC skips those that are up to date."""
        self._dvc("repro", *targets, quiet=False)

    def commit(self, targets: Iterable[str]) -> None:
        """Record the current outputs of stages in dvc.lock, without running the stages."""
        self._dvc("commit", "--force", *targets)  # `--quiet` would hide errors too

    def _dvc(self, *words: str, quiet: bool = True) -> str:
        process = subprocess.run(
            [sys.executable, "-m", "dvc", *words],
            cwd=self.folder,
            stdout=subprocess.PIPE if quiet else sys.stderr,
            stderr=subprocess.PIPE if quiet else None,
            text=True,
            check=False,
        )
        if process.returncode:
            text = " ".join((process.stderr or "").rpartition("ERROR:")[2].split())
            reason = text[:LONGEST_REASON].rstrip(".") or f"exit code {process.returncode}"
            raise DuplexError(f"`dvc {words[0]}` failed: {reason}; once it works, run the same command again")
        return process.stdout if quiet else ""


class Task(Protocol):
    """What a worker process can execute: a run of a sweep, or a trial of `tune`."""

    def execute(self, load: LoadInputs) -> Any: ...


@dataclass(frozen=True)
class SweptRun:
    """A run of the pipeline, and what its stages used when the sweep began."""

    run: ProjectRun
    planned: Mapping[str, Stamp] = field(compare=False, repr=False)  # stage -> `ProjectRun.settings`

    def __str__(self) -> str:
        return str(self.run)

    def execute(self, load: LoadInputs) -> None:
        """Evaluate the run, after training it if its checkpoint is outdated."""
        self._require_planned()
        if self.run.difference("train"):
            train_stage(self.run, load=load)
            self._require_planned()
        evaluate_stage(self.run, load=load)

    def _require_planned(self) -> None:
        """This process computes with the code that it imported, so stamps must not have another."""
        if any(self.run.settings(stage) != planned for stage, planned in self.planned.items()):
            changed = "params.yaml, the code or files that they name have changed since the sweep began"
            raise DuplexError(f"{changed}; run the same command again")


def is_product(run: ProjectRun) -> bool:
    """Whether a run's method combines other runs, which are executed first."""
    return bool(run.entry.members)


def stage_name(run: ProjectRun, stage: str) -> str:
    """A run's stage in dvc.yaml, `STAGE@DATASET-METHOD-SEED`; a product's stage is `product`."""
    return f"{'product' if is_product(run) else stage}@{run.dataset}-{run.method}-{run.seed}"


@dataclass(frozen=True)
class Outcome:
    """What a task returned, what it printed on stderr and, if it failed, why."""

    trial: Any
    value: Any = None
    output: str = ""
    error: str | None = None  # None: it succeeded


@dataclass
class TaskRunner:
    """Executes tasks one after another in one process; inputs are loaded once per data set."""

    threads: int  # CPU threads for `threads: auto`: as many as outside of a sweep
    load: LoadInputs = field(default_factory=LastDatasetLoader)

    def execute(self, trial: Task) -> Outcome:
        """Execute a task and return its outcome; an error is not raised but recorded there."""
        output = io.StringIO()
        torch.set_num_threads(self.threads)
        try:
            with redirect_stderr(output):  # processes share a terminal: none shows its progress bar
                return Outcome(trial, trial.execute(self.load), output.getvalue())
        except Exception as failure:
            self.load = LastDatasetLoader()  # a method's code may have written into the inputs
            error = str(failure)
            if not isinstance(failure, DuplexError):
                first = next(iter(error.splitlines()), "")
                error = f"{type(failure).__name__}: {first}"
                error += "; with DUPLEX_DEBUG=1 its traceback is shown"
                if os.environ.get("DUPLEX_DEBUG"):
                    output.write(traceback.format_exc())
            return Outcome(trial, None, output.getvalue(), error)


Engine = Literal["local", "ray"]
Execute = Callable[[Sequence[Task]], Iterator[Outcome]]


@dataclass
class SweepResult:
    """How many runs were complete, executed or committed to DVC, and which ones failed."""

    runs: int
    complete: int = 0  # runs that were up to date
    executed: int = 0  # runs trained or evaluated by this sweep
    committed: int = 0  # runs committed to DVC, those of interrupted sweeps included
    outside_pipeline: int = 0  # runs that are not in `run:`, which DVC does not track
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)  # run -> error message
    not_committed: str | None = None  # why no run was committed; None: no problem


def grid(
    params: Params,
    datasets: Sequence[str] | None,
    methods: Sequence[str] | None,
    seeds: Sequence[int] | None,
    paths: ArtifactPaths = ArtifactPaths(),
) -> list[ProjectRun]:
    """Runs of all combinations of data sets, methods and seeds; None: all under `run:`."""
    datasets = datasets or params.run.datasets
    methods = methods or params.run.methods
    seeds = seeds or params.run.seeds
    for thing, values in (("data set", datasets), ("method", methods), ("seed", seeds)):
        refuse_duplicates(thing, values)
    for name in datasets:
        params.dataset(name)
    for name in methods:
        params.entry(name)
    return [ProjectRun(*names, params, paths) for names in product(datasets, methods, seeds)]


def refuse_duplicates(thing: str, values: Sequence[object]) -> None:
    """Raise UsageError if a value occurs twice; `thing` names a value, such as "seed"."""
    for value in values:
        if list(values).count(value) > 1:
            raise UsageError(f"the {thing} {value} is listed twice; remove one")


def sweep(
    params: Params,
    runs: Sequence[ProjectRun],
    jobs: int | None,
    engine: Engine,
    paths: ArtifactPaths = ArtifactPaths(),
    commit: bool = True,
) -> SweepResult:
    """Train and evaluate all missing or outdated runs and commit them to DVC."""
    start = time.perf_counter()
    report = SweepResult(len(runs))
    repo = DvcRepo.at(paths.root.parent) if commit else None
    tracked: list[ProjectRun] = []
    if repo:
        in_pipeline = set(grid(params, None, None, None))
        tracked = [run for run in runs if run in in_pipeline]
        report.outside_pipeline = len(runs) - len(tracked)
    if repo and tracked:
        for name in _datasets(tracked):
            data = ProjectData(params, name, paths)
            if not paths.features(name).exists() or data.difference():
                repo.repro([f"extract@{name}"])
        write_plan(params, paths)
    for name in _datasets(runs):
        data = ProjectData(params, name, paths)
        data.require_features()
        data.require()
    failed: set[ProjectRun] = set()
    for combines in (False, True):  # products multiply runs of the first turn
        turn = [run for run in runs if is_product(run) is combines]
        planned = []
        for run in turn:
            planned.append(SweptRun(run, {stage: run.settings(stage) for stage in RUN_STAGES}))
        missing = [swept for swept in planned if swept.run.difference(*RUN_STAGES)]
        report.complete += len(turn) - len(missing)
        if missing:
            wanted = {params.training(run.dataset, run.method).threads for run in runs}
            failed |= execute(in_parallel(params.device, wanted, jobs, engine), missing, report)
    if repo and (complete := [run for run in tracked if run not in failed]):
        _commit(repo, params, complete, report, paths)
    report.seconds = time.perf_counter() - start
    return report


def _datasets(runs: Iterable[ProjectRun]) -> list[str]:
    return list(dict.fromkeys(run.dataset for run in runs))


def _commit(
    repo: DvcRepo, params: Params, runs: Sequence[ProjectRun], report: SweepResult, paths: ArtifactPaths
) -> None:
    earlier = [f"{stage}@{name}" for name, stage in product(_datasets(runs), DATA_STAGES)]
    products = ["product"] if params.run.products else []
    changed = repo.changed(["plan", *earlier, *RUN_STAGES, *products])
    to_commit = []
    for run in runs:
        if any(stage_name(run, stage) in changed for stage in RUN_STAGES):
            to_commit.append(run)
    made = [stage for stage in earlier if stage in changed]
    if not to_commit and not made:
        return
    try:
        is_unchanged = load_params(paths.root.parent / "params.yaml") == params
    except DuplexError:  # half-edited
        is_unchanged = False
    if not is_unchanged:
        reason = "params.yaml has changed since the sweep started, so no run was committed to DVC"
        report.not_committed = f"{reason}; run the same command again"
        return
    repo.commit(["plan", *made, *commit_targets(to_commit, changed)])
    report.committed = len(to_commit)


def execute(engine: Execute, runs: Sequence[SweptRun], report: SweepResult) -> set[ProjectRun]:
    """Execute runs and count them in `report`; returns the runs that failed."""
    failed: set[ProjectRun] = set()
    for done, outcome in enumerate(with_progress("runs", engine, runs), 1):
        result = "finished" if outcome.error is None else "failed"
        print(f"{outcome.output}run {done} of {len(runs)} {result}: {outcome.trial}", file=sys.stderr)
        if outcome.error is None:
            report.executed += 1
        else:
            failed.add(outcome.trial.run)
            report.failed[str(outcome.trial)] = outcome.error
    return failed


def with_progress(label: str, engine: Execute, tasks: Sequence[Task]) -> Iterator[Outcome]:
    failed = 0
    with ProgressBar(label, len(tasks)) as bar:
        for done, outcome in enumerate(engine(tasks), 1):
            failed += outcome.error is not None
            bar.show(done, {"failed": failed} if failed else {})
            yield outcome


def commit_targets(runs: Sequence[ProjectRun], changed: Collection[str]) -> list[str]:
    """Targets of `dvc commit`: groups such as `train`, or stages if other runs changed too."""
    names = [stage_name(run, stage) for stage, run in product(RUN_STAGES, runs)]
    stages = list(dict.fromkeys(names))
    groups = list(dict.fromkeys(name.partition("@")[0] for name in stages))
    others = {name for name in changed if name.partition("@")[0] in groups} - set(stages)
    return stages if others else groups


def in_parallel(device: str, wanted: Collection[Threads], jobs: int | None, engine: Engine) -> Execute:
    """A function that executes tasks, here or on Ray; `wanted`: the tasks' options `threads`."""
    counts = [torch.get_num_threads() if count == "auto" else count for count in wanted]
    threads = max(counts, default=1)
    executor = TaskRunner(torch.get_num_threads())
    if engine == "ray":
        return partial(_run_on_ray, executor=executor, on_gpu=device != "cpu", jobs=jobs, cpus=threads)
    jobs, gpus = workers_and_gpus(device, jobs, threads)
    return partial(run_in_processes, executor=executor, jobs=jobs, gpus=gpus)


def _run_on_ray(
    trials: Sequence[Task], executor: TaskRunner, on_gpu: bool, jobs: int | None, cpus: int
) -> Iterator[Outcome]:
    from duplex.project.ray import connect, last_line, run_on_actors

    ray = connect()
    create = partial(getattr, executor, "execute")
    for trial, future in run_on_actors(ray, create, trials, on_gpu=on_gpu, jobs=jobs, cpus=cpus):
        try:
            yield ray.get(future)
        except ray.exceptions.RayError as error:
            yield Outcome(trial, error=f"its Ray actor died ({last_line(error)}); run the same command again")


def workers_and_gpus(device: str, jobs: int | None, threads: int) -> tuple[int, list[str]]:
    """Number of processes (one per GPU, or per `threads` CPU cores), and the GPUs they share."""
    gpus: list[str] = []
    if resolve_device(device) == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    return jobs or len(gpus) or max(1, cpu_cores() // threads), gpus


def run_in_processes(trials: Sequence[Task], executor: TaskRunner, jobs: int, gpus: Sequence[str]) -> Iterator[Outcome]:
    """Yield outcomes as `jobs` processes finish tasks; if a process dies, only its task fails."""
    create = partial(getattr, executor, "execute")
    workers = []
    for n in range(min(jobs, len(trials))):
        gpu = {"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} if gpus else {}
        workers.append(WorkerProcess(create, {"OMP_WAIT_POLICY": "passive", **gpu}))  # waiting threads sleep
    waiting = deque(trials)
    idle = list(workers)
    busy: dict[Future[Outcome], tuple[WorkerProcess, Task]] = {}
    try:
        while waiting or busy:
            while waiting and idle:
                worker = idle.pop()
                trial = waiting.popleft()
                busy[worker.submit(trial)] = worker, trial
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                worker, trial = busy.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:
                    reason = f"its process {worker.describe_end()}, perhaps out of memory"
                    yield Outcome(trial, error=f"{reason}; try fewer --jobs")
                idle.append(worker)
    finally:
        for worker in workers:
            worker.kill()  # files are replaced whole, so a process may be killed at any moment
