"""Published numbers beside those measured here, method by method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duplex.report.blocks import MISSING, Cell, Column, Row, Table
from duplex.report.numbers import Tree
from duplex.report.results import DatasetResults, Results
from duplex.report.tables import benchmark_of, data_file, plain, pointer


def published_table(results: Results, data: DatasetResults, world: str) -> Table | None:
    """AUC here less AUC there, of every method that was run on a published benchmark; None where there is none."""
    benchmark = benchmark_of(data)
    if benchmark is None:
        return None
    rows = []
    for entry in data_file("quoted.yaml").get(world, ()):
        ours = _row_of(entry["method"], data, world)
        if benchmark in entry and ours is not None:
            rows.append(_row(results, data, world, ours, entry["method"], entry[benchmark]))
    if not rows:
        return None
    header = [
        Column("method", numeric=False),
        Column("row", numeric=False),
        Column("HM there"),
        Column("HM here"),
        Column("AUC there", tip="published: a 20-point sweep, which reads AUC low by up to 0.8 %"),
        Column("AUC here", tip="exact, mean over seeds"),
        Column("difference", tip="AUC here less AUC there"),
        Column("95 %", tip="of the difference, over test images; the published number is taken as it is printed"),
    ]
    note = f"Published numbers are quoted from {data_file('quoted.yaml')['source']}."
    return Table(f"{data.name}, {world} world: here and there", header, rows, note)


def _row_of(method: str, data: DatasetResults, world: str) -> str | None:
    """The row of params.yaml that is a published method, where it was evaluated in this world."""
    named = data_file("quoted.yaml")["rows"].get(method)
    return next(
        (
            row
            for row, found in data.summary.items()
            if world in found and (row == named or (named is None and plain(row) == plain(method)))
        ),
        None,
    )


def _row(results: Results, data: DatasetResults, world: str, ours: str, method: str, published: list[float]) -> Row:
    values: Tree = data.summary[ours][world]
    there = dict(zip(("seen", "unseen", "hm", "auc"), published, strict=True))
    cells = [Cell(method, method), Cell(ours, ours)]
    for name in ("hm", "auc"):
        cells += [Cell(f"{there[name]:.1f}", there[name]), _measured(results, (data.name, ours, world, name), values)]
    gain = values["auc"] - there["auc"]
    return Row([*cells, Cell(f"{gain:+.1f}", gain), _interval(values, there["auc"])])


def _measured(results: Results, place: tuple[str, ...], values: Mapping[str, Any]) -> Cell:
    value = values.get(place[-1])
    return Cell(MISSING) if value is None else Cell(f"{value:.1f}", value, pointer(results.metrics_file, *place))


def _interval(values: Mapping[str, Any], published: float) -> Cell:
    low, high = values.get("auc_low"), values.get("auc_high")
    if low is None or high is None:
        return Cell(MISSING)
    return Cell(f"{low - published:+.1f} to {high - published:+.1f}", low - published)
