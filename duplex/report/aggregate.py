"""Average metrics over seeds, per data set, method and world (closed or open), and read JSON files of metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from duplex.errors import DuplexError
from duplex.labels import GROUPS, WORLDS
from duplex.metric_table import METRICS, MISSING, interval_text

Tree = dict[str, Any]
SOURCES = ("words", "likelihood")  # of feasibility: tables with the results of thresholds that a run does not use
GROUPINGS = {"groups": "accuracy", "groups_at_ends": "accuracy_at_ends"}  # in summaries -> the averaged field of a run
VALIDATION = {"auc": "val_auc", "auc_all": "val_auc_all"}  # numbers of the table `validation` -> of a run
TERMS = "terms_"  # prefix of tables with some summands of the score only
BAD_IMAGES = "bad_images"  # key of the unreadable images: their list in extraction.json, their number in metrics.json
NO_RUN = "no run of params.yaml is evaluated yet; `dvc repro` trains and evaluates them"
ALSO_AVERAGED = ("state_accuracy", "object_accuracy", "seen_at_val_bias", "unseen_at_val_bias", "hm_at_val_bias")
BY_SOURCE = ("hm", "auc", "auc_low", "auc_high")  # metrics that are averaged for each source of feasibility too
SHOWN = ("auc", "auc_se", "hm", "seen", "unseen", "auc_all")  # by world in artifacts/metrics.json, after validation
Aggregate = dict[str, dict[str, dict[str, dict[str, float]]]]


def aggregate(runs: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Aggregate:
    """Average metrics over seeds: `{data set: {method: {world: {auc: mean, auc_se: .., auc_low: .., seeds: n}}}}`.

    `auc_se`: standard error of the mean over seeds (0 for one seed). `auc_low`, `auc_high`: means over seeds of the 95
    % intervals over images. Besides worlds there are the keys `validation`, AUC on validation images; `terms_...`, such
    as `terms_semantic+visual`, metrics of the closed world with only these summands of the score; `groups`, the
    accuracy of each frequency group; `groups_at_ends`, that accuracy at the ends of the seen–unseen curve. Numbers that
    are undefined for a seed are left out.

    Args:
        runs: (data set, method) -> metrics of each seed.
    """
    table: Aggregate = {}
    for (dataset, method), records in runs.items():
        summaries: dict[str, dict[str, float]] = {}
        if validation := _validation(records):
            summaries["validation"] = validation
        for world in WORLDS:
            if known := [record[world] for record in records if world in record]:
                summaries[world] = _summary(known)
        for name in records[0] if records else ():
            if name.startswith(TERMS) and all(name in record for record in records):
                summaries[name] = _summary([record[name] for record in records])
        for grouping, name in GROUPINGS.items():
            tables = [record.get("groups", {}) for record in records]
            means = {group: _mean_of([table.get(group, {}) for table in tables], name) for group in GROUPS}
            if groups := {group: value for group, value in means.items() if value is not None}:
                summaries[grouping] = groups
        table.setdefault(dataset, {})[method] = summaries
    return table


def headlines(table: Aggregate) -> Aggregate:
    """Select at most fourteen numbers per method from averaged metrics, for `dvc metrics diff` and `dvc exp show`.

    They are validation AUC, then AUC, HM, S and U of the closed and the open world. Validation AUC comes first because
    options are to be chosen by it: a choice by test metrics would be tuning on test images. `auc_all` is the AUC in the
    open world without a feasibility threshold: every pair is a candidate.
    """
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


def _validation(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    summary: dict[str, float] = {}
    for name, key in VALIDATION.items():
        centre = _mean_of(records, key) if records else None
        if centre is not None:
            summary |= {name: centre, f"{name}_se": standard_error([record[key] for record in records])}
    return summary


def _mean_of(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values: list[Any] = [record.get(name) for record in records]
    return None if any(value is None for value in values) else fmean(values)


def _summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    means: dict[str, float | None] = {}
    for name in METRICS:
        means[name] = _mean_of(records, name)
        if means[name] is not None:
            means[f"{name}_se"] = standard_error([record[name] for record in records])
            means |= {f"{name}_{end}": _mean_of(records, f"{name}_{end}") for end in ("low", "high")}
    for source in SOURCES:
        tables = [at_threshold(record, source) for record in records]
        means |= {f"{name}_by_{source}": _mean_of(tables, name) for name in BY_SOURCE}
        if means[f"auc_by_{source}"] is not None:
            means[f"auc_by_{source}_se"] = standard_error([table["auc"] for table in tables])
    if (value := _mean_of(records, "auc_all")) is not None:
        means |= {"auc_all": value, "auc_all_se": standard_error([record["auc_all"] for record in records])}
    means |= {name: _mean_of(records, name) for name in ALSO_AVERAGED}
    return {name: value for name, value in means.items() if value is not None} | {"seeds": len(records)}


def at_threshold(record: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """A run's open-world metrics with implausible pairs excluded by a threshold; empty without a threshold.

    Args:
        record: the run's metrics of the open world.
        source: how plausibility is measured: `words` (by word vectors) or `likelihood` (by the method's likelihood).
    """
    other: Mapping[str, Any] = record.get(source, {})
    return record if used_source(record) == source else other


def used_source(record: Mapping[str, Any]) -> str | None:
    """By what a run excludes implausible pairs in the open world, `words` or `likelihood`; None if it excludes none."""
    if "threshold" not in record:
        return None
    return "likelihood" if "by_likelihood" in record else "words"


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    centre = fmean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1) / len(values))


def read_metrics(path: Path, command: str = "dvc repro report") -> dict[str, Any]:
    """Read a JSON file of metrics by data set and method (or by method and seed); `command` is the one that writes it.

    Raises:
        DuplexError: if the file is missing or damaged.
    """
    metrics = read_numbers(path, command)
    if metrics is None:
        raise DuplexError(f"{path} does not exist; `{command}` writes it")
    return metrics


def read_numbers(path: Path, command: str = "dvc repro") -> Tree | None:
    """Read a JSON file of numbers, with NaN and infinite ones as None; None if the file does not exist."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DuplexError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DuplexError(f"{path} does not hold results in JSON ({error}); `{command} -f` writes it again") from error
    if not isinstance(record, dict):
        raise DuplexError(f"{path} does not hold results in JSON (no table); `{command} -f` writes it again")
    return record


def metrics_table(table: Aggregate) -> list[list[str]]:
    """Metrics averaged over seeds as rows of text: a header, then one row per data set, world and method.

    Two columns are of the open world: `all pairs` is the AUC with every pair as a candidate, `by words` the AUC with
    the feasibility threshold by word vectors, as in the published protocol.
    """
    extra = {"all pairs": "auc_all", "by words": "auc_by_words"}
    rows = [["data set", "world", "method", *METRICS.values(), "AUC 95 %", *extra]]
    for dataset, methods in table.items():
        worlds = [world for world in WORLDS if any(world in summaries for summaries in methods.values())]
        for world in worlds:
            for method, summaries in methods.items():
                summary = summaries.get(world, {})
                main = [_with_error(summary, name) for name in METRICS]
                more = [_with_error(summary, name) for name in extra.values()]
                rows.append([dataset, world, method, *main, interval_text(summary), *more])
    return rows


def _with_error(summary: Mapping[str, float], name: str) -> str:
    if name not in summary:
        return MISSING
    error = f"{summary[f'{name}_se']:.1f}" if summary.get("seeds", 1) > 1 else MISSING
    return f"{summary[name]:.1f} ± {error}"
