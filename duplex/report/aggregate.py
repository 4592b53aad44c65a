"""Metrics of single runs -> data set, method, world -> mean, standard error and interval over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duplex.errors import DuplexError

WORLDS = ("closed", "open")
HEADLINE = ("seen", "unseen", "hm", "auc")
Aggregate = dict[str, dict[str, dict[str, dict[str, float]]]]


def aggregate(runs: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Aggregate:
    """`{data set: {method: {world: {auc: mean, auc_se: .., auc_low: .., auc_high: .., seeds: n}}}}`.

    `auc_low` and `auc_high` are the means of the runs' own 95 % intervals over images; `auc_se` is the standard error
    of the mean over seeds (0 for one seed).
    """
    table: Aggregate = {}
    for (dataset, method), records in runs.items():
        worlds = [world for world in WORLDS if world in records[0]]
        table.setdefault(dataset, {})[method] = {
            world: _summary([record[world] for record in records]) for world in worlds
        }
    return table


def _summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in HEADLINE:
        values = [record[name] for record in records]
        if any(value is None for value in values):
            continue
        found[name], found[f"{name}_se"] = mean(values), standard_error(values)
        for end in ("low", "high"):
            ends = [record.get(f"{name}_{end}") for record in records]
            if all(value is not None for value in ends):
                found[f"{name}_{end}"] = mean(ends)
    for name in ("state_accuracy", "object_accuracy"):
        found[name] = mean([record[name] for record in records])
    return {**found, "seeds": len(records)}


def mean(values: Sequence[Any]) -> float:
    return math.fsum(values) / len(values)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1) / len(values))


def read_metrics(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DuplexError(f"{path} does not exist; `dvc repro evaluate` writes it") from None
    except ValueError as error:
        raise DuplexError(f"{path} is not JSON ({error}); `dvc repro -f evaluate` writes it again") from None


def write_json(record: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def metrics_table(table: Aggregate) -> list[list[str]]:
    """Rows of text: a header, then one row a data set x world x method."""
    rows = [["data set", "world", "method", "S", "U", "HM", "AUC", "AUC 95 %"]]
    for dataset, methods in table.items():
        worlds = dict.fromkeys(world for found in methods.values() for world in found)
        for world in worlds:
            for method, found in methods.items():
                rows.append([dataset, world, method, *_cells(found.get(world, {}))])
    return rows


def _cells(summary: Mapping[str, float]) -> list[str]:
    cells = [f"{summary[n]:.1f} ± {summary[f'{n}_se']:.1f}" if n in summary else "–" for n in HEADLINE]
    ends = [summary.get(f"auc_{end}") for end in ("low", "high")]
    return [*cells, f"{ends[0]:.1f}–{ends[1]:.1f}" if None not in ends else "–"]
