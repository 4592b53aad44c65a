"""Build the cells of the report's tables. A cell cites the source of its number: a JSON file and a pointer into it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from duplex.report.aggregate import Tree
from duplex.report.blocks import MISSING, TableCell, TableRow
from duplex.report.results import RunRecord

METRICS = (("seen", "S"), ("unseen", "U"), ("hm", "HM"), ("auc", "AUC"))


def json_pointer(file: str, *keys: object) -> str:
    """Return `file#/a/b` for the keys a, b: a JSON pointer with `/` and `~` in keys escaped (RFC 6901)."""
    return file + "#" + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def ranked(rows: Sequence[TableRow], columns: Iterable[int]) -> list[TableRow]:
    """Return table rows in which the two largest numbers of each given column are marked; ties share a rank.

    columns: indices of the columns to rank.
    """
    grid = [list(row.cells) for row in rows]
    for column in columns:
        numbers = (line[column].value for line in grid)
        values = sorted({number for number in numbers if isinstance(number, int | float)}, reverse=True)
        for line in grid:
            value = line[column].value
            if isinstance(value, int | float) and value in values[:2] and len(values) > 1:
                line[column] = replace(line[column], rank=1 + values.index(value))
    return [TableRow(cells, row.quoted) for cells, row in zip(grid, rows, strict=True)]


def metric_cells(values: Tree, place: Sequence[str], metrics: Sequence[tuple[str, str]] = METRICS) -> list[TableCell]:
    """Return a table cell per metric, with its standard error over seeds and its source.

    values: metrics by name.
    place: file of the metrics and the keys that lead to them, which cells cite.
    metrics: (name, title) of each metric.
    """
    cells = []
    for name, _ in metrics:
        value, error = values.get(name), values.get(f"{name}_se")
        if value is None:
            cells.append(TableCell(MISSING))
            continue
        spread = f"± {error:.1f}" if error is not None and values.get("seeds", 1) > 1 else ""
        ends = [values.get(f"{name}_{end}") for end in ("low", "high")]
        tip = f"{value:.2f}; 95 % over images: {ends[0]:.1f} to {ends[1]:.1f}" if None not in ends else f"{value:.2f}"
        cells.append(TableCell(f"{value:.1f}", value, json_pointer(*place, name), spread=spread, tip=tip))
    return cells


def auc_interval_cell(values: Tree, place: Sequence[str]) -> TableCell:
    """Return a table cell with the 95 % interval of AUC.

    values: metrics by name, of which `auc_low` and `auc_high` are used.
    place: file of the metrics and the keys that lead to them, which the cell cites.
    """
    low, high = values.get("auc_low"), values.get("auc_high")
    if low is None or high is None:
        return TableCell(MISSING)
    ends = " ".join(json_pointer(*place, f"auc_{end}") for end in ("low", "high"))
    return TableCell(f"{low:.1f}–{high:.1f}", low, ends)


def run_cell(
    runs: Sequence[RunRecord], keys: Sequence[str], form: str, part: str = "metrics", scale: float = 1.0
) -> TableCell:
    """Return a table cell with the mean over runs of one number in their files, each of which the cell cites.

    keys: keys that lead to the number in a run's file.
    form: format string.
    part: which of a run's files, as the name of a field of `RunRecord`.
    scale: factor to multiply the mean by.
    """
    return mean_cell([(run, keys) for run in runs], form, part, scale)


def mean_cell(
    places: Sequence[tuple[RunRecord, Sequence[str]]], form: str, part: str = "metrics", scale: float = 1.0
) -> TableCell:
    """Return a table cell with the mean of one number per run, whose keys may differ between runs.

    places: each run with the keys that lead to its number.
    form: format string.
    part: which of a run's files, as the name of a field of `RunRecord`.
    scale: factor to multiply the mean by.
    """
    values = [value_at(getattr(run, part), keys) for run, keys in places]
    numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not places or len(numbers) < len(places):
        return TableCell(MISSING)
    average = math.fsum(numbers) / len(numbers) * scale
    sources = " ".join(json_pointer(run.files[part], *keys) for run, keys in places)
    return TableCell(form.format(average), average, sources)


def value_cell(tree: Tree, file: str, keys: Sequence[str], form: str, scale: float = 1) -> TableCell:
    """Return a table cell with one number of a JSON file, which the cell cites.

    tree: contents of the file as nested mappings.
    keys: keys that lead to the number.
    form: format string.
    scale: factor to multiply the number by.
    """
    value = value_at(tree, keys)
    if value is None:
        return TableCell(MISSING)
    return TableCell(form.format(scale * value), scale * value, json_pointer(file, *keys))


def value_at(tree: Any, keys: Sequence[str]) -> Any:
    """Return the value at `keys` of a nested mapping; None if a key is missing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
