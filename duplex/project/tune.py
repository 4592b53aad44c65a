"""Search for settings of methods by validation AUC, in parallel processes that load inputs once.

Test images are never scored. Each combination of settings and seed is a trial in `artifacts/trials.partial`, so an
interrupted search, or a larger one, trains only what is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.encoders.base import resolve_device
from duplex.errors import UsageError
from duplex.project import stamps
from duplex.project.sweep import Engine, Outcome, refuse_duplicates, require_features, trial_executor
from duplex.report.aggregate import standard_error
from duplex.system.files import json_digest, sole_writer
from duplex.system.processes import ProgressBar
from duplex.training.inputs import LoadInputs
from duplex.training.run import MethodSpec, reproducible
from duplex.training.trials import Trial, TrialResult, Trials


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
    """Validation results of a method with one choice of settings, one result per seed."""

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
        """Mean validation AUC over seeds, in percent; NaN if a trial failed."""
        return nan if self.errors else fmean([result.auc for result in self.results])

    def to_dict(self) -> dict[str, Any]:
        """Method, settings and mean AUC, epoch, seconds for JSON; if a trial failed, an error, no means."""
        record = {"method": self.method, "settings": dict(self.settings), "seeds": len(self.results)}
        if self.errors:
            return {**record, "error": self.errors[0]}
        everywhere = [result.auc_all for result in self.results if result.auc_all is not None]
        return {
            **record,
            "val_auc": self.val_auc,
            "val_auc_se": standard_error([result.auc for result in self.results]),
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
    """Train methods with every combination of `choices` (setting -> values) and seed; one row for all seeds."""
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
    rows = [(method, settings) for method in methods for settings in grid]
    for method, settings in rows:
        MethodSpec.of(params, dataset, method).with_settings(settings)  # raises for a wrong setting
    require_features(dataset, paths)
    stamps.require_data(params, dataset, paths)
    folder = paths.trials / dataset
    with sole_writer(folder / "tune", "tuning"):
        folders = {method: _folder(params, dataset, method, paths, folder) for method in methods}
        trials = [
            TuningTrial(dataset, method, settings, seed, folders[method]) for method, settings in rows for seed in seeds
        ]
        outcomes = iter(_run(params, trials, jobs, engine, paths))
        return [TuningRow(method, settings, tuple(next(outcomes) for _ in seeds)) for method, settings in rows]


def _folder(params: Params, dataset: str, method: str, paths: ArtifactPaths, parent: Path) -> Path:
    """Trials that were made from other data, options or code are deleted."""
    stamp = stamps.stamp(params, dataset, "train", method, 0, paths)
    folder = parent / method / json_digest({**stamp, "torch": torch.__version__})[:16]
    for other in folder.parent.glob("*"):
        if other != folder:
            shutil.rmtree(other)
    return folder


def best_rows(rows: Sequence[TuningRow]) -> dict[str, TuningRow]:
    """Method -> its row with the best mean validation AUC; methods whose rows all have errors are left out."""
    best: dict[str, TuningRow] = {}
    for row in rows:
        if not row.errors and (row.method not in best or row.val_auc > best[row.method].val_auc):
            best[row.method] = row
    return best


def _run(
    params: Params, trials: Sequence[TuningTrial], jobs: int | None, engine: Engine, paths: ArtifactPaths
) -> list[Outcome]:
    wanted = {trial.spec(params).training.threads for trial in trials}
    execute = trial_executor(params, wanted, jobs, engine, paths)
    found: dict[str, Outcome] = {}
    failed = 0
    with ProgressBar("trials", len(trials)) as bar:
        for outcome in execute(trials):
            found[str(outcome.trial)] = outcome
            failed += outcome.error is not None
            bar.show(len(found), {"failed": failed} if failed else {})
    return [found[str(trial)] for trial in trials]
