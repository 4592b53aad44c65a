"""Search for settings of methods by validation AUC; test images are never scored.

Each combination of settings and seed is a trial, kept in `artifacts/trials.partial`, so a repeated
or larger search trains only what is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.encoders.base import resolve_device
from duplex.errors import UsageError
from duplex.options import AutoFinetune
from duplex.project.run import LoadInputs, ProjectData, ProjectRun, reader
from duplex.project.sweep import Engine, Outcome, in_parallel, refuse_duplicates, with_progress
from duplex.report.aggregate import standard_error
from duplex.system.files import json_digest, sole_writer
from duplex.training.run import MethodSpec, reproducible
from duplex.training.trials import Trial, TrialResult, Trials


@dataclass(frozen=True)
class TuningTrial:
    """A method with some settings changed, to be trained on a data set with one seed."""

    run: ProjectRun
    settings: Mapping[str, Any]  # name -> value, of training options and options of the kind
    folder: Path  # of the method's trials, named by a digest of what all of them depend on
    read: Mapping[str, str | None]  # checksums of the data set's files, which this digest covers

    @property
    def spec(self) -> MethodSpec:
        return self.run.spec.with_settings({**self.settings, "log": "none"})

    def execute(self, load: LoadInputs) -> TrialResult:
        spec = self.spec
        params = self.run.params
        with reproducible(spec.training.threads):
            read = reader(self.run.data, self.read, load)
            device = torch.device(resolve_device(params.device))
            trials = Trials(self.folder, read, device, params.evaluation, key=self.folder.name)
            return trials.result(Trial(self.run.method, spec, self.run.seed))


@dataclass(frozen=True)
class TuningRow:
    """Validation results of a method with one combination of settings, one outcome per seed."""

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
        """Method, settings and means of AUC, epoch and seconds; an error if a trial failed."""
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
    """Train methods with all combinations of `choices` (setting -> values); a row for each."""
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
            automatic = f"{method} has `finetune: auto`, which `duplex tune` cannot vary"
            raise UsageError(f"{automatic}; give a number of blocks")
    grid = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    rows = [(method, settings) for method in methods for settings in grid]
    for method, settings in rows:
        MethodSpec.of(params, dataset, method).with_settings(settings)  # raises for a wrong setting
    data = ProjectData(params, dataset, paths)
    data.require_features()
    data.require()
    folder = paths.trials / dataset
    with sole_writer(folder / "tune", "tuning"):
        read = data.checksums()
        folders = {method: _trials_folder(data.run(method, 0), read, folder) for method in methods}
        by_row = [
            [TuningTrial(data.run(method, seed), settings, folders[method], read) for seed in seeds]
            for method, settings in rows
        ]
        trials = list(chain.from_iterable(by_row))
        wanted = {trial.spec.training.threads for trial in trials}
        executor = in_parallel(params.device, wanted, jobs, engine)
        outcomes = {str(outcome.trial): outcome for outcome in with_progress("trials", executor, trials)}
    return [
        TuningRow(method, settings, tuple(outcomes[str(trial)] for trial in row))
        for (method, settings), row in zip(rows, by_row, strict=True)
    ]


def _trials_folder(run: ProjectRun, read: Mapping[str, str | None], parent: Path) -> Path:
    """The folder of a method's trials; deletes trials that were made from other data or code."""
    shared = run.stamp("train", read)
    for key in ("options", "training", "finetune"):
        del shared[key]
    folder = parent / run.method / json_digest({**shared, "torch": torch.__version__})[:16]
    for other in folder.parent.glob("*"):
        if other != folder:
            shutil.rmtree(other)
    return folder


def best_rows(rows: Sequence[TuningRow]) -> dict[str, TuningRow]:
    """Each method's row with the best mean validation AUC; rows with errors do not count."""
    best: dict[str, TuningRow] = {}
    for row in rows:
        if not row.errors and (row.method not in best or row.val_auc > best[row.method].val_auc):
            best[row.method] = row
    return best
