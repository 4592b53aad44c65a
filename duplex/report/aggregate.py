"""Metrics of single runs -> data set, method, world -> mean, standard error and interval over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duplex.errors import DuplexError
from duplex.labels import GROUPS, WORLDS
from duplex.report.numbers import GROUPINGS, JUDGES, TERMS, read_numbers
from duplex.system.files import write_text

HEADLINE = ("seen", "unseen", "hm", "auc")
BESIDE = ("state_accuracy", "object_accuracy", "seen_at_val_bias", "unseen_at_val_bias", "hm_at_val_bias")
OTHERWISE = tuple(f"auc_by_{judge}" for judge in JUDGES)  # with feasibility by the other judge
Aggregate = dict[str, dict[str, dict[str, dict[str, float]]]]


def aggregate(runs: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Aggregate:
    """`{data set: {method: {world: {auc: mean, auc_se: .., auc_low: .., auc_high: .., seeds: n}}}}`.

    `auc_low` and `auc_high` are the means of the runs' own 95 % intervals over images; `auc_se` is the standard error
    of the mean over seeds (0 for one seed). Beside the worlds, `terms_semantic+visual` is the closed one by these parts
    of the score alone, `groups` holds the mean accuracy of each frequency group, `groups_at_ends` the same where the
    curve ends. What is undefined for any seed is left out.
    """
    table: Aggregate = {}
    for (dataset, method), records in runs.items():
        found: dict[str, dict[str, float]] = {
            world: _summary(known)
            for world in WORLDS
            if (known := [record[world] for record in records if world in record])
        }
        for name in _terms(records):
            found[name] = _summary([record[name] for record in records])
        for grouping, name in GROUPINGS.items():
            if groups := _groups(records, name):
                found[grouping] = groups
        table.setdefault(dataset, {})[method] = found
    return table


def headlines(table: Aggregate) -> Aggregate:
    """What people compare, for `dvc metrics diff` and `dvc exp show`: S, U, HM and AUC of every method and world, and
    the AUC by the other judge of feasibility where there are two."""
    return {
        dataset: {
            method: {
                world: {name: found[world][name] for name in (*HEADLINE, *OTHERWISE) if name in found[world]}
                for world in WORLDS
                if world in found
            }
            for method, found in methods.items()
        }
        for dataset, methods in table.items()
    }


def _terms(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sums of parts of a score that every seed was measured by."""
    names = [name for record in records[:1] for name in record if name.startswith(TERMS)]
    return [name for name in names if all(name in record for record in records)]


def _groups(records: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """`{head: mean accuracy, ..}`: scalars, so that DVC shows them."""
    tables = [record.get("groups", {}) for record in records]
    found = {group: _mean_of([table.get(group, {}) for table in tables], name) for group in GROUPS}
    return {group: value for group, value in found.items() if value is not None}


def _mean_of(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """None where any record is without it."""
    values = [record.get(name) for record in records]
    return None if any(value is None for value in values) else mean(values)


def _summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in HEADLINE:
        centre = _mean_of(records, name)
        if centre is None:
            continue
        found[name], found[f"{name}_se"] = centre, standard_error([record[name] for record in records])
        for end in ("low", "high"):
            if (value := _mean_of(records, f"{name}_{end}")) is not None:
                found[f"{name}_{end}"] = value
    for judge, name in zip(JUDGES, OTHERWISE, strict=True):
        tables = [record.get(judge, {}) for record in records]
        if (value := _mean_of(tables, "auc")) is not None:
            found[name], found[f"{name}_se"] = value, standard_error([table["auc"] for table in tables])
    for name in BESIDE:
        if (value := _mean_of(records, name)) is not None:
            found[name] = value
    return {**found, "seeds": len(records)}


def mean(values: Sequence[Any]) -> float:
    return math.fsum(values) / len(values)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1) / len(values))


def read_metrics(path: Path, command: str = "dvc repro report", *, names: int = 2) -> dict[str, Any]:
    """A file of metrics by data set and method, or data set and seed; `command` is what writes it."""
    found = read_numbers(path, command, names=names)
    if found is None:
        raise DuplexError(f"{path} does not exist; `{command}` writes it")
    return found


def write_json(record: Mapping[str, Any], path: Path) -> None:
    write_text(path, json.dumps(record, indent=2) + "\n")


def metrics_table(table: Aggregate) -> list[list[str]]:
    """Rows of text: a header, then one row a data set x world x method."""
    rows = [["data set", "world", "method", "S", "U", "HM", "AUC", "AUC 95 %"]]
    for dataset, methods in table.items():
        worlds = [world for world in WORLDS if any(world in found for found in methods.values())]
        for world in worlds:
            for method, found in methods.items():
                rows.append([dataset, world, method, *_cells(found.get(world, {}))])
    return rows


def _spread(summary: Mapping[str, float], name: str) -> str:
    """One seed says nothing of how far seeds lie apart."""
    return f"{summary[f'{name}_se']:.1f}" if summary.get("seeds", 1) > 1 else "–"


def _cells(summary: Mapping[str, float]) -> list[str]:
    cells = [f"{summary[n]:.1f} ± {_spread(summary, n)}" if n in summary else "–" for n in HEADLINE]
    ends = [summary.get(f"auc_{end}") for end in ("low", "high")]
    return [*cells, f"{ends[0]:.1f}–{ends[1]:.1f}" if None not in ends else "–"]
