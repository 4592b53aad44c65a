"""Search for settings of methods by validation AUC, in parallel processes that load inputs once.

Test images are never scored, and no files of the pipeline are written.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Any

import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.encoders.base import resolve_device
from duplex.errors import DuplexError, UsageError
from duplex.project.sweep import most_threads, refuse_duplicates, run_in_processes, workers_and_gpus
from duplex.report.aggregate import standard_error
from duplex.system.processes import ProgressBar
from duplex.training.inputs import InputsCache
from duplex.training.run import MethodSpec, reproducible, train_run


@dataclass(frozen=True)
class Trial:
    """A method with some settings changed, to be trained on a data set with one seed."""

    dataset: str
    method: str
    settings: Mapping[str, Any]  # name -> value, of training options and options of the kind
    seed: int

    def spec(self, params: Params) -> MethodSpec:
        """Return the method's kind (class), options and training options with the trial's settings in place."""
        return MethodSpec.of(params, self.dataset, self.method).with_settings({**self.settings, "log": "none"})


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial (a method trained with changed settings): validation AUC in percent, or the error."""

    trial: Trial
    val_auc: float = math.nan
    val_auc_all: float | None = None  # over all pairs; None for a method of the closed world
    epoch: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass
class TrialExecutor:
    """Trains trials (methods with changed settings) one after another in one process; inputs are loaded once."""

    params: Params
    paths: ArtifactPaths
    threads: int  # number of CPU threads for `threads: auto`
    inputs: InputsCache = field(default_factory=InputsCache)

    def execute(self, task: Trial) -> TrialResult:
        """Train a trial and return its validation result. Errors are returned, not raised."""
        torch.set_num_threads(self.threads)
        start = time.perf_counter()
        with redirect_stderr(io.StringIO()):  # several processes share a terminal: none shows its own progress bar
            try:
                run = self._train(task)
            except Exception as error:
                self.inputs = InputsCache()  # a method's code may have written into them
                first = next(iter(str(error).splitlines()), "")
                known = isinstance(error, DuplexError)
                return self.lost(task, str(error) if known else f"{type(error).__name__}: {first}")
        return TrialResult(task, run.val_auc, run.val_auc_all, run.record.epoch, time.perf_counter() - start)

    @staticmethod
    def lost(task: Trial, reason: str) -> TrialResult:
        """Return a result that reports a trial as failed: its training raised an error, or its process died."""
        return TrialResult(task, error=reason)

    def _train(self, trial: Trial) -> Any:
        spec = trial.spec(self.params)
        device = torch.device(resolve_device(self.params.device))
        with reproducible(spec.training.threads):
            inputs = self.inputs(self.params, trial.dataset, self.paths, spec.request)
            return train_run(spec, inputs, trial.seed, device, self.params.evaluation)


@dataclass(frozen=True)
class TuningRow:
    """Validation results of a method with one choice of settings, one result per seed."""

    method: str
    settings: Mapping[str, Any]
    results: tuple[TrialResult, ...]  # one per seed

    @cached_property
    def errors(self) -> list[str]:
        """Error messages of the trials (one per seed) that failed."""
        return [result.error for result in self.results if result.error is not None]

    @property
    def val_auc(self) -> float:
        """Mean validation AUC over seeds, in percent; NaN if a trial failed."""
        return fmean([result.val_auc for result in self.results])

    def to_dict(self) -> dict[str, Any]:
        """Return method, settings and mean AUC, epoch, seconds for JSON; if a trial failed, an error, no means."""
        record = {"method": self.method, "settings": dict(self.settings), "seeds": len(self.results)}
        if self.errors:
            return {**record, "error": self.errors[0]}
        everywhere = [result.val_auc_all for result in self.results if result.val_auc_all is not None]
        return {
            **record,
            "val_auc": self.val_auc,
            "val_auc_se": standard_error([result.val_auc for result in self.results]),
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
) -> list[TuningRow]:
    """Train every method with every combination of settings and every seed; return a row per method and combination.

    choices: setting (name of a training option or of an option of the methods) -> values to try.
    """
    for thing, values in (("method", methods), ("seed", seeds), *choices.items()):
        if not values:
            raise UsageError(f"there is no {thing} to try; name at least one")
        refuse_duplicates(thing, list(map(repr, values)))
    for method in methods:
        if members := params.entry(method).members:
            raise UsageError(
                f"{method} combines finished runs and trains nothing; tune {' and '.join(members)} instead"
            )
    grid = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    trials = [Trial(dataset, method, settings, seed) for method in methods for settings in grid for seed in seeds]
    results = {_key(result.trial): result for result in _run(params, trials, jobs, paths)}
    return [
        TuningRow(method, settings, tuple(results[_key(Trial(dataset, method, settings, seed))] for seed in seeds))
        for method in methods
        for settings in grid
    ]


def best_rows(rows: Sequence[TuningRow]) -> dict[str, TuningRow]:
    """Return method -> its row with the best mean validation AUC; methods whose rows all have errors are left out."""
    best: dict[str, TuningRow] = {}
    for row in rows:
        if not row.errors and (row.method not in best or row.val_auc > best[row.method].val_auc):
            best[row.method] = row
    return best


def _run(params: Params, trials: Sequence[Trial], jobs: int | None, paths: ArtifactPaths) -> Iterator[TrialResult]:
    """Check settings of all trials, train them in processes with a progress bar, and yield each result when ready."""
    wanted = {trial.spec(params).training.threads for trial in trials}
    count, gpus = workers_and_gpus(params.device, jobs, most_threads(wanted))
    executor = TrialExecutor(params, paths, torch.get_num_threads())
    failed = 0
    with ProgressBar("trials", len(trials)) as bar:
        for done, result in enumerate(run_in_processes(trials, executor, count, gpus), start=1):
            failed += result.error is not None
            bar.show(done, {"failed": failed} if failed else {})
            yield result


def _key(trial: Trial) -> tuple[str, str, int]:
    return trial.method, repr(trial.settings), trial.seed
