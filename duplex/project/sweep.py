"""Train and evaluate many runs in parallel, in processes that load inputs once; writes the files of `dvc repro`.

Only runs that are missing or outdated are executed. Complete runs are committed to DVC, so that `dvc repro` does not
repeat them. An interrupted sweep resumes after the last whole epoch.

`tune` searches for settings of methods by validation AUC; test images are never scored. Each combination of settings
and seed is a trial, kept in `artifacts/trials.partial`, so a repeated or larger search trains only what is missing.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import product
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.encoders.base import resolve_device
from duplex.errors import DuplexError, UsageError
from duplex.options import AutoFinetune
from duplex.project import stamps
from duplex.project.stages import evaluate_stage
from duplex.project.stamps import DATA_STAGES, RUN_STAGES, run_difference
from duplex.project.train import train_stage
from duplex.report.aggregate import standard_error
from duplex.system.files import json_digest, sole_writer
from duplex.system.processes import BrokenProcessPool, ProgressBar, WorkerProcess
from duplex.system.threads import Threads
from duplex.training.inputs import LastDatasetLoader, LoadInputs
from duplex.training.run import MethodSpec, reproducible
from duplex.training.trials import Trial, TrialResult, Trials

LONGEST_REASON = 300


@dataclass(frozen=True)
class DvcRepo:
    """A folder with a dvc.yaml, in which DVC's commands are run."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> DvcRepo | None:
        """The pipeline in a folder; None if the folder has no dvc.yaml or DVC repository, or DVC is not installed."""
        place = folder.resolve()
        in_repository = any((parent / ".dvc").is_dir() for parent in (place, *place.parents))
        return cls(folder) if in_repository and (folder / "dvc.yaml").is_file() and find_spec("dvc") else None

    def changed(self, targets: Collection[str]) -> dict[str, Any]:
        """The stages among `targets` that DVC would run again, each with what has changed in it (DVC's JSON)."""
        status: dict[str, Any] = json.loads(self._dvc("status", "--json", *targets) or "{}")
        return {name.rpartition(":")[2]: changes for name, changes in status.items()}

    def repro(self, targets: Iterable[str]) -> None:
        """Run `dvc repro` for stages and all stages before them; DVC skips stages that are up to date."""
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

    def execute(self, params: Params, paths: ArtifactPaths, load: LoadInputs) -> Any: ...


@dataclass(frozen=True)
class SweptRun:
    """One run of the pipeline: a method on a data set with a seed."""

    dataset: str
    method: str
    seed: int
    combines: bool = False  # whether its method combines other runs, which are executed first

    def __str__(self) -> str:
        return f"{self.dataset} {self.method} {self.seed}"

    def stage(self, name: str) -> str:
        """This run's stage in dvc.yaml, `NAME@DATASET-METHOD-SEED`; NAME is `name` or, for a product, `product`."""
        return f"{'product' if self.combines else name}@{self.dataset}-{self.method}-{self.seed}"

    def difference(self, params: Params, paths: ArtifactPaths, *stages: str) -> str:
        return run_difference(params, self.dataset, self.method, self.seed, paths, stages)

    def execute(self, params: Params, paths: ArtifactPaths, load: LoadInputs) -> None:
        """Evaluate the run, after training it if its checkpoint is outdated."""
        if self.difference(params, paths, "train"):
            train_stage(params, self.dataset, self.method, self.seed, paths, load=load)
        evaluate_stage(params, self.dataset, self.method, self.seed, paths, load=load)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a task: what it returned, what it printed on stderr and, if it failed, why."""

    trial: Any
    value: Any = None
    output: str = ""
    error: str | None = None  # None: it succeeded


@dataclass
class TaskRunner:
    """Executes tasks one after another in one process; inputs are loaded once per data set."""

    params: Params
    paths: ArtifactPaths
    threads: int  # CPU threads for `threads: auto`: as many as outside of a sweep
    load: LoadInputs = field(default_factory=LastDatasetLoader)

    def execute(self, trial: Task) -> Outcome:
        """Execute a task and return its outcome; an error is not raised but recorded there."""
        output = io.StringIO()
        torch.set_num_threads(self.threads)
        try:
            with redirect_stderr(output):  # several processes share a terminal: none shows its own progress bar
                return Outcome(trial, trial.execute(self.params, self.paths, self.load), output.getvalue())
        except Exception as failure:
            self.load = LastDatasetLoader()  # a method's code may have written into the inputs
            error = str(failure)
            if not isinstance(failure, DuplexError):
                first = next(iter(error.splitlines()), "")
                error = f"{type(failure).__name__}: {first}; with DUPLEX_DEBUG=1 its traceback is shown"
                if os.environ.get("DUPLEX_DEBUG"):
                    output.write(traceback.format_exc())
            return Outcome(trial, None, output.getvalue(), error)


Engine = Literal["local", "ray"]
Execute = Callable[[Sequence[Task]], Iterator[Outcome]]


@dataclass
class SweepResult:
    """Result of a sweep: how many runs were complete, executed or committed to DVC, and which ones failed."""

    runs: int
    complete: int = 0  # runs that were up to date
    executed: int = 0  # runs trained or evaluated by this sweep
    committed: int = 0  # runs committed to DVC, those of interrupted sweeps included
    outside_pipeline: int = 0  # runs that are not in `run:`, which DVC does not track
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)  # run -> error message
    not_committed: str | None = None  # why no run was committed; None: no problem


def grid(
    params: Params, datasets: Sequence[str] | None, methods: Sequence[str] | None, seeds: Sequence[int] | None
) -> list[SweptRun]:
    """Runs for all combinations of data sets, methods and seeds; None means all under `run:` in params.yaml."""
    datasets, methods = datasets or params.run.datasets, methods or params.run.methods
    seeds = seeds or params.run.seeds
    for thing, values in (("data set", datasets), ("method", methods), ("seed", seeds)):
        refuse_duplicates(thing, values)
    for name in datasets:
        params.dataset(name)
    for name in methods:
        params.entry(name)
    return [
        SweptRun(dataset, method, seed, bool(params.entry(method).members))
        for dataset in datasets
        for method in methods
        for seed in seeds
    ]


def refuse_duplicates(thing: str, values: Sequence[object]) -> None:
    """Raise UsageError if `values` has a value twice; `thing` says in the message what a value is, such as "seed"."""
    for value in values:
        if list(values).count(value) > 1:
            raise UsageError(f"the {thing} {value} is listed twice; remove one")


def sweep(
    params: Params,
    runs: Sequence[SweptRun],
    jobs: int | None,
    engine: Engine,
    paths: ArtifactPaths = ArtifactPaths(),
    commit: bool = True,
) -> SweepResult:
    """Train and evaluate all missing or outdated runs and commit them to DVC; returns numbers of runs, and failures."""
    start, report = time.perf_counter(), SweepResult(len(runs))
    repo, datasets = DvcRepo.at(paths.root.parent) if commit else None, list(dict.fromkeys(run.dataset for run in runs))
    in_pipeline = set(grid(params, None, None, None)) if repo else set()
    tracked = [run for run in runs if run in in_pipeline]
    report.outside_pipeline = len(runs) - len(tracked) if repo else 0
    if repo and tracked:
        for name in dict.fromkeys(run.dataset for run in tracked):
            if not paths.features(name).exists() or stamps.data_difference(params, name, paths):
                repo.repro([f"extract@{name}"])
        stamps.write_plan(params, paths)
    for dataset in datasets:
        require_features(dataset, paths)
        stamps.require_data(params, dataset, paths)
    failed: set[SweptRun] = set()
    for combines in (False, True):  # products multiply runs of the first turn
        turn = [run for run in runs if run.combines is combines]
        missing = [run for run in turn if run.difference(params, paths, *RUN_STAGES)]
        report.complete += len(turn) - len(missing)
        if missing:
            wanted = {params.training(run.dataset, run.method).threads for run in runs}
            failed |= execute(trial_executor(params, wanted, jobs, engine, paths), missing, report)
    if repo and (complete := [run for run in tracked if run not in failed]):
        _commit(repo, params, complete, report, paths)
    report.seconds = time.perf_counter() - start
    return report


def require_features(dataset: str, paths: ArtifactPaths) -> None:
    """Raise `DuplexError`, with the command to run, if a data set is not prepared or its features are not extracted."""
    for path, stage in ((paths.manifest, "prepare"), (paths.labels, "prepare"), (paths.features, "extract")):
        if not path(dataset).exists():
            raise DuplexError(f"{path(dataset)} does not exist; `duplex {stage} --dataset {dataset}` writes it")


def _commit(repo: DvcRepo, params: Params, runs: Sequence[SweptRun], report: SweepResult, paths: ArtifactPaths) -> None:
    datasets = dict.fromkeys(run.dataset for run in runs)
    earlier = [f"{stage}@{name}" for name in datasets for stage in DATA_STAGES]
    products = ["product"] if params.run.products else []
    changed = repo.changed(["plan", *earlier, *RUN_STAGES, *products])
    to_commit = [run for run in runs if any(run.stage(stage) in changed for stage in RUN_STAGES)]
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


def execute(engine: Execute, runs: Sequence[SweptRun], report: SweepResult) -> set[SweptRun]:
    """Execute runs and count them in `report`; returns the runs that failed."""
    failed: set[SweptRun] = set()
    for done, outcome in enumerate(_with_progress("runs", engine, runs), 1):
        result = "finished" if outcome.error is None else "failed"
        print(f"{outcome.output}run {done} of {len(runs)} {result}: {outcome.trial}", file=sys.stderr)
        if outcome.error is None:
            report.executed += 1
        else:
            failed.add(outcome.trial)
            report.failed[str(outcome.trial)] = outcome.error
    return failed


def _with_progress(label: str, engine: Execute, tasks: Sequence[Task]) -> Iterator[Outcome]:
    failed = 0
    with ProgressBar(label, len(tasks)) as bar:
        for done, outcome in enumerate(engine(tasks), 1):
            failed += outcome.error is not None
            bar.show(done, {"failed": failed} if failed else {})
            yield outcome


def commit_targets(runs: Sequence[SweptRun], changed: Collection[str]) -> list[str]:
    """Targets of `dvc commit` for `runs`: groups such as `train`, or single stages if stages of other runs changed too.

    changed: names of the changed stages, those of `runs` included.
    """
    stages = list(dict.fromkeys(run.stage(stage) for stage in RUN_STAGES for run in runs))
    groups = list(dict.fromkeys(name.partition("@")[0] for name in stages))
    others = {name for name in changed if name.partition("@")[0] in groups} - set(stages)
    return stages if others else groups


def trial_executor(
    params: Params, wanted: Collection[Threads], jobs: int | None, engine: Engine, paths: ArtifactPaths
) -> Execute:
    """A function that executes tasks, here or on Ray; `wanted`: the tasks' options `threads`."""
    threads = max((torch.get_num_threads() if count == "auto" else count for count in wanted), default=1)
    executor = TaskRunner(params, paths, torch.get_num_threads())
    if engine == "ray":
        return partial(_run_on_ray, executor=executor, jobs=jobs, cpus=threads)
    jobs, gpus = workers_and_gpus(params.device, jobs, threads)
    return partial(run_in_processes, executor=executor, jobs=jobs, gpus=gpus)


def _run_on_ray(trials: Sequence[Task], executor: TaskRunner, jobs: int | None, cpus: int) -> Iterator[Outcome]:
    from duplex.project.ray import connect, last_line, run_on_actors

    ray = connect()
    create, on_gpu = partial(getattr, executor, "execute"), executor.params.device != "cpu"
    for trial, future in run_on_actors(ray, create, trials, on_gpu=on_gpu, jobs=jobs, cpus=cpus):
        try:
            yield ray.get(future)
        except ray.exceptions.RayError as error:
            yield Outcome(trial, error=f"its Ray actor died ({last_line(error)}); run the same command again")


def workers_and_gpus(device: str, jobs: int | None, threads: int) -> tuple[int, list[str]]:
    """Number of processes (default: one per GPU, or one per `threads` CPU cores), and the GPUs that they share."""
    gpus: list[str] = []
    if resolve_device(device) == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return jobs or len(gpus) or max(1, cores // threads), gpus


def run_in_processes(trials: Sequence[Task], executor: TaskRunner, jobs: int, gpus: Sequence[str]) -> Iterator[Outcome]:
    """Execute tasks in `jobs` processes and yield outcomes as they finish; if a process dies, only its task fails."""
    create = partial(getattr, executor, "execute")
    workers = []
    for n in range(min(jobs, len(trials))):
        gpu = {"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} if gpus else {}
        workers.append(WorkerProcess(create, {"OMP_WAIT_POLICY": "passive", **gpu}))  # waiting threads sleep
    waiting, idle = deque(trials), list(workers)
    busy: dict[Future[Outcome], tuple[WorkerProcess, Task]] = {}
    try:
        while waiting or busy:
            while waiting and idle:
                worker, trial = idle.pop(), waiting.popleft()
                busy[worker.submit(trial)] = worker, trial
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                worker, trial = busy.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:
                    reason = f"its process {worker.describe_end()}, perhaps out of memory; try fewer --jobs"
                    yield Outcome(trial, error=reason)
                idle.append(worker)
    finally:
        for worker in workers:
            worker.kill()  # files are replaced whole, so a process may be killed at any moment


@dataclass(frozen=True)
class TuningTrial:
    """A method with some settings changed, to be trained on a data set with one seed."""

    dataset: str
    method: str
    settings: Mapping[str, Any]  # name -> value, of training options and options of the kind
    seed: int
    folder: Path  # of the method's trials, named by a digest of what all of them depend on

    def spec(self, params: Params) -> MethodSpec:
        return MethodSpec.of(params, self.dataset, self.method).with_settings({**self.settings, "log": "none"})

    def execute(self, params: Params, paths: ArtifactPaths, load: LoadInputs) -> TrialResult:
        spec = self.spec(params)
        with reproducible(spec.training.threads):
            read = partial(load, params, self.dataset, paths)
            device = torch.device(resolve_device(params.device))
            trials = Trials(self.folder, read, device, params.evaluation, key=self.folder.name)
            return trials.result(Trial(self.method, spec, self.seed))


@dataclass(frozen=True)
class TuningRow:
    """Validation results of a method with one combination of settings, with one outcome per seed."""

    method: str
    settings: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]  # one per seed

    @cached_property
    def errors(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error is not None]

    @property
    def results(self) -> list[TrialResult]:
        return [outcome.value for outcome in self.outcomes if outcome.error is None]

    @property
    def val_auc(self) -> float:
        """Mean validation AUC over the seeds, in percent; NaN if a trial failed."""
        return nan if self.errors else fmean([result.auc for result in self.results])

    def to_dict(self) -> dict[str, Any]:
        """Method, settings and means of AUC, epoch and seconds, for JSON; if a trial failed, its error instead."""
        record = {"method": self.method, "settings": dict(self.settings), "seeds": len(self.results)}
        if self.errors:
            return {**record, "error": self.errors[0]}
        everywhere = [result.auc_all for result in self.results if result.auc_all is not None]
        return {
            **record,
            "val_auc": self.val_auc,
            "val_auc_se": standard_error([each.auc for each in self.results]) if len(self.results) > 1 else None,
            "val_auc_all": fmean(everywhere) if everywhere else None,
            "epoch": fmean([result.epoch for result in self.results]),
            "seconds": fmean([result.seconds for result in self.results]),
        }


def tune(
    params: Params,
    dataset: str,
    methods: Sequence[str],
    choices: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    jobs: int | None = None,
    paths: ArtifactPaths = ArtifactPaths(),
    engine: Engine = "local",
) -> list[TuningRow]:
    """Train methods with all combinations of `choices` (setting -> values) per seed; returns a row per combination."""
    for thing, values in (("method", methods), ("seed", seeds), *choices.items()):
        if not values:
            raise UsageError(f"there is no {thing} to try; give at least one")
        refuse_duplicates(thing, list(map(repr, values)))
    for method in methods:
        if members := params.entry(method).members:
            raise UsageError(
                f"{method} combines finished runs and trains nothing; tune {' and '.join(members)} instead"
            )
        if isinstance(params.finetune(method, dataset), AutoFinetune):
            raise UsageError(f"{method} has `finetune: auto`, which `duplex tune` cannot vary; give a number of blocks")
    grid = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    rows = [(method, settings) for method in methods for settings in grid]
    for method, settings in rows:
        MethodSpec.of(params, dataset, method).with_settings(settings)  # raises for a wrong setting
    require_features(dataset, paths)
    stamps.require_data(params, dataset, paths)
    folder = paths.trials / dataset
    with sole_writer(folder / "tune", "tuning"):
        folders = {method: _trials_folder(params, dataset, method, paths, folder) for method in methods}
        trials = [
            TuningTrial(dataset, method, settings, seed, folders[method]) for method, settings in rows for seed in seeds
        ]
        wanted = {trial.spec(params).training.threads for trial in trials}
        in_processes = trial_executor(params, wanted, jobs, engine, paths)
        found = {str(outcome.trial): outcome for outcome in _with_progress("trials", in_processes, trials)}
        outcomes = (found[str(trial)] for trial in trials)
        return [TuningRow(method, settings, tuple(next(outcomes) for _ in seeds)) for method, settings in rows]


def _trials_folder(params: Params, dataset: str, method: str, paths: ArtifactPaths, parent: Path) -> Path:
    """The folder of a method's trials; deletes trials that were made from other data or code."""
    stamp = stamps.stamp(params, dataset, "train", paths, method, 0)
    shared = {key: value for key, value in stamp.items() if key not in ("options", "training", "finetune")}
    folder = parent / method / json_digest({**shared, "torch": torch.__version__})[:16]
    for other in folder.parent.glob("*"):
        if other != folder:
            shutil.rmtree(other)
    return folder


def best_rows(rows: Sequence[TuningRow]) -> dict[str, TuningRow]:
    """Each method's row with the best mean validation AUC; methods whose rows all have errors are left out."""
    best: dict[str, TuningRow] = {}
    for row in rows:
        if not row.errors and (row.method not in best or row.val_auc > best[row.method].val_auc):
            best[row.method] = row
    return best
