"""Read the results of runs for the report, and average metrics and seen–unseen curves over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from duplex.artifacts import RunPaths
from duplex.errors import DuplexError
from duplex.evaluation.accumulate import Floats
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.metrics import METRICS, OWN_ANSWERS
from duplex.labels import GROUPS, WORLDS

Tree = dict[str, Any]
# in summaries -> the averaged field of a run
GROUPINGS = {"groups": "accuracy", "groups_at_ends": "accuracy_at_ends"}
VALIDATION = {"auc": "val_auc", "auc_all": "val_auc_all"}  # in `validation` -> of a run
STREAM = "+stream"  # after the name of a method: as it adapted to the test images
TERMS = "terms_"  # prefix of tables with some summands of the score only
NO_RUN = "no run of params.yaml has been evaluated; `dvc repro` trains and evaluates the runs"
ALSO_AVERAGED = (
    "state_accuracy",
    "object_accuracy",
    "seen_at_val_bias",
    "unseen_at_val_bias",
    "hm_at_val_bias",
)
SHOWN = ("auc", "auc_se", "hm", "seen", "unseen", "auc_all")  # by world in metrics.json
POINTS, ROUNDS = 81, 200  # of a mean curve: its points, and bootstrap rounds of its interval
Aggregate = dict[str, dict[str, dict[str, dict[str, float]]]]


def aggregate(runs: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Aggregate:
    """Average metrics over seeds: `{data set: {method: {world: {auc: mean, auc_se: .., seeds: n}}}}`.

    `auc_se` is the standard error over seeds; `auc_low`, `auc_high` are means of the seeds' 95 %
    intervals. A number that a seed lacks is left out.
    """
    table: Aggregate = {}
    for (dataset, method), records in runs.items():
        summaries: dict[str, dict[str, float]] = {}
        validated = [{name: record.get(key) for name, key in VALIDATION.items()} for record in records]
        validation = _means(validated, VALIDATION)
        if validation:
            summaries["validation"] = validation
            if all("epoch" in record for record in records):
                validation["untrained"] = sum(record["epoch"] == 0 for record in records)
        for world in WORLDS:
            known = [record[world] for record in records if world in record]
            if known:
                summaries[world] = _summary(known)
        for name in records[0] if records else ():
            if name.startswith(TERMS) and all(name in record for record in records):
                summaries[name] = _summary([record[name] for record in records])
        retrieved = [record.get("retrieval", {}) for record in records]
        means = _means(retrieved, retrieved[0] if retrieved else ())
        if means:
            summaries["retrieval"] = means
        groups = [record.get("groups", {}) for record in records]
        for grouping, name in GROUPINGS.items():
            numbers = [{key: group.get(name) for key, group in each.items()} for each in groups]
            means = _means(numbers, GROUPS)
            if means:
                summaries[grouping] = means
        table.setdefault(dataset, {})[method] = summaries
    return table


def headline_numbers(table: Aggregate) -> Aggregate:
    """Select at most fourteen averaged numbers per method, validation AUC first."""
    shown: dict[str, tuple[str, ...]] = {"validation": tuple(VALIDATION), "closed": SHOWN, "open": SHOWN}
    return {
        dataset: {
            method: {
                table: {name: summaries[table][name] for name in names if name in summaries[table]}
                for table, names in shown.items()
                if table in summaries
            }
            for method, summaries in methods.items()
        }
        for dataset, methods in table.items()
    }


def _means(
    records: Sequence[Mapping[str, Any]], names: Iterable[str], end: str = "", *, errors: bool = True
) -> dict[str, float]:
    means = {}
    for name in names:
        values: list[Any] = [record.get(name) for record in records]
        if values and None not in values:
            means[f"{name}{end}"] = fmean(values)
            if errors:
                means[f"{name}{end}_se"] = standard_error(values)
    return means


def _summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    by_words = [at_threshold(record) for record in records]
    ends = []
    for name in METRICS:
        ends += [f"{name}_low", f"{name}_high"]
    return {
        **_means(records, METRICS),
        **_means(records, ends, errors=False),
        **_means(by_words, METRICS, "_by_words"),
        **_means(by_words, ("auc_low", "auc_high"), "_by_words", errors=False),
        **_means([record.get("sampled", {}) for record in records], METRICS, "_sampled"),
        **_means([table.get("sampled", {}) for table in by_words], METRICS, "_sampled_by_words"),
        **_means(records, ("auc_all", *OWN_ANSWERS)),
        **_means(records, ALSO_AVERAGED),
        "seeds": len(records),
    }


def at_threshold(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Metrics at the feasibility threshold, even if unused; empty without a threshold."""
    unused: Mapping[str, Any] = record.get("words", {})
    return record if "threshold" in record else unused


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of `values`; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    centre = fmean(values)
    squares = math.fsum((v - centre) ** 2 for v in values)
    return math.sqrt(squares / (len(values) - 1) / len(values))


def read_metrics(path: Path, command: str = "dvc repro report") -> dict[str, Any]:
    """Read a JSON file of numbers, NaN as None; raises `DuplexError` if it is missing."""
    metrics = stored_numbers(path, command)
    if metrics is None:
        raise DuplexError(f"{path} does not exist; `{command}` writes it")
    return metrics


def stored_numbers(path: Path, command: str = "dvc repro") -> Tree | None:
    """Read a JSON file of numbers, NaN as None; None if it is missing."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DuplexError(f"{path} does not hold results in JSON ({error}); `{command} -f` writes it again") from error


@dataclass(frozen=True)
class MeanCurve:
    """Unseen accuracy, averaged over seeds, at evenly spaced seen accuracies."""

    seen: Floats  # percent
    unseen: Floats
    low: Floats  # of the interval around `unseen`
    high: Floats


@dataclass(frozen=True)
class RunRecord:
    """What the files of one run contain; `files` maps each field to the path of its file."""

    metrics: Tree
    history: pd.DataFrame | None = None
    timing: Tree = field(default_factory=dict)
    evaluation_timing: Tree = field(default_factory=dict)
    predictions: pd.DataFrame | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        per_epoch = self.timing.get("seconds_per_epoch")
        if self.history is None or per_epoch is None:
            return None
        return float(per_epoch * (len(self.history) - 1))


@dataclass(frozen=True)
class DatasetResults:
    """One data set's results for the report."""

    name: str
    summary: Mapping[str, Tree]  # method -> world -> seen, seen_se, ...; -> "groups" -> accuracies
    runs: Mapping[str, Mapping[int, RunRecord]] = field(default_factory=dict)
    shown_as: Mapping[str, str] = field(default_factory=dict)  # method -> its name in figures
    ablations: Mapping[str, Tree] = field(default_factory=dict)  # name -> as in `summary`
    statistics: Tree | None = None
    statistics_file: str = ""
    extraction: Tree | None = None
    extraction_file: str = ""
    identity: Mapping[str, str] = field(default_factory=dict)  # of the feature cache

    @cached_property
    def curves(self) -> dict[str, dict[str, MeanCurve]]:
        curves: dict[str, dict[str, MeanCurve]] = {world: {} for world in WORLDS}
        for world, (method, runs) in product(WORLDS, self.runs.items()):
            tables = [run.predictions for run in runs.values() if run.predictions is not None]
            margins = [margins_of(table, world) for table in tables]
            known = [seed for seed in margins if seed is not None]
            if known:
                curves[world][self.shown_as.get(method, method)] = mean_curve(known)
        return curves


@dataclass(frozen=True)
class Results:
    """The results of all data sets, and the paths of the files that the report cites."""

    datasets: tuple[DatasetResults, ...]
    metrics_file: str = "artifacts/summary.json"
    ablations_file: str = "ablations/artifacts/summary.json"
    seeds: tuple[int, ...] = ()
    not_evaluated: Mapping[str, Sequence[str]] = field(default_factory=dict)  # data set -> runs


def read_run(files: RunPaths) -> RunRecord:
    """Read the files of one run; missing files leave fields empty."""
    names = ("metrics", "history", "timing", "evaluation_timing", "predictions")
    return RunRecord(
        metrics=stored_numbers(files.metrics) or {},
        history=read_table(files.history),
        timing=stored_numbers(files.timing) or {},
        evaluation_timing=stored_numbers(files.evaluation_timing) or {},
        predictions=read_table(files.predictions),
        files={name: getattr(files, name).as_posix() for name in names},
    )


def read_table(path: Path, advice: str = "`dvc repro -f` runs the pipeline again and writes it") -> pd.DataFrame | None:
    """Read a CSV file, all names as text; None if missing. `advice` ends error messages."""
    text = ("image", "label", "object", "map", "kind", "world", "top1", "top2", "top3")
    missing = {"margin": ["", "nan"], "val_auc": [""]}  # not every epoch is validated
    try:
        return pd.read_csv(path, dtype=dict.fromkeys(text, str), keep_default_na=False, na_values=missing)
    except FileNotFoundError:
        return None
    except (ValueError, OverflowError) as error:
        raise DuplexError(f"{path} is not a valid CSV file ({str(error).strip()}); {advice}") from error


def margins_of(predictions: pd.DataFrame, world: str) -> Margins | None:
    """The margins of a run in one world; None without images of seen or of unseen pairs."""
    rows = predictions[predictions["world"] == world]
    is_seen = rows["seen"].to_numpy(dtype=bool)
    margin = rows["margin"].to_numpy(dtype=np.float64)
    if not is_seen.any() or is_seen.all():
        return None
    return Margins(margin[is_seen], margin[~is_seen], is_seen)


def mean_curve(seeds: Sequence[Margins], points: int = POINTS, rounds: int = ROUNDS) -> MeanCurve:
    """The seen–unseen curve averaged over seeds, with an interval if all have the same test images."""
    curves = [Curve.of(margins) for margins in seeds]
    grid = np.linspace(0.0, max(float(curve.seen_accuracies[0]) for curve in curves), points)
    centre = np.mean([unseen_at(c.seen_accuracies, c.unseen_accuracies, grid) for c in curves], axis=0)
    if len({(c.seen_until.size, c.unseen_from.size) for c in curves}) > 1:
        return MeanCurve(100 * grid, 100 * centre, 100 * centre, 100 * centre)
    rng = np.random.default_rng(0)
    drawn = np.empty((rounds, points))
    for turn in range(rounds):
        seen = rng.integers(0, curves[0].seen_until.size, curves[0].seen_until.size)
        unseen = rng.integers(0, curves[0].unseen_from.size, curves[0].unseen_from.size)
        drawn[turn] = np.mean([unseen_at(*curve.resampled(seen, unseen), grid) for curve in curves], axis=0)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return MeanCurve(100 * grid, 100 * centre, 100 * low, 100 * high)


def unseen_at(seen: Floats, unseen: Floats, grid: Floats) -> Floats:
    """The highest unseen accuracy with at least each seen accuracy in `grid`; 0 if none."""
    last = seen.size - np.searchsorted(seen[::-1], grid - 1e-12, side="left") - 1
    return np.where(last >= 0, unseen[last], 0.0)
