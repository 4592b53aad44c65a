"""Accuracy by training frequency, without and with the graph over the codebook (the paper's appendix)."""

from __future__ import annotations

from collections.abc import Sequence

from duplex.labels import GROUPS
from duplex.report.blocks import MISSING, Cell, Column, Row, Table
from duplex.report.numbers import Tree
from duplex.report.results import DatasetResults, Results
from duplex.report.tables import data_file, pointer

TITLES = ("codebook without graph", "with graph", "gain")
AT_ENDS = ("head", "medium", "tail", "seen", "unseen")  # the appendix's rows


def graph_table(results: Results, data: DatasetResults) -> Table | None:
    """At no bias; None unless both ablations were run."""
    rows = [
        Row([Cell(group, group), *cells])
        for group in GROUPS
        if (cells := _compared(results, data, ("groups", group))) is not None
    ]
    if not rows:
        return None
    header = [Column("group", numeric=False), *(Column(title) for title in TITLES)]
    note = "Accuracy at no bias, closed world, percent, mean over the ablations' seeds."
    return Table(f"Training frequency and the graph: {data.name}", header, rows, note)


def ends_table(results: Results, data: DatasetResults) -> Table | None:
    """The appendix's own reading; None unless both ablations were run and say it."""
    rows = []
    for group in AT_ENDS:
        place = ("closed", "seen") if group == "seen" else ("groups_at_ends", group)
        cells = _compared(results, data, place)
        if cells is not None:
            rows.append(Row([Cell(group, group), _images(data, group), *cells]))
    if not any(row.cells[0].text in GROUPS for row in rows):
        return None
    header = [Column("group", numeric=False), Column("test images"), *(Column(title) for title in TITLES)]
    note = (
        "Accuracy where the curve ends: head, medium, tail and all seen pairs while seen pairs alone compete (so that "
        "seen is S), unseen ones while unseen pairs alone do (U). Closed world, percent, mean over seeds."
    )
    return Table(f"Training frequency and the graph at the curve's ends: {data.name}", header, rows, note)


def _compared(results: Results, data: DatasetResults, place: Sequence[str]) -> list[Cell] | None:
    """A number of both rows and their difference."""
    pair = data_file("tables.yaml")["frequency"]  # rows of `ablations:` that differ in nothing but the graph
    names = (pair["without"], pair["with"])
    grouping, group = place
    values = [data.ablations.get(name, {}).get(grouping, {}).get(group) for name in names]
    if None in values:
        return None
    sources = [pointer(results.ablations_file, data.name, name, *place) for name in names]
    cells = [Cell(f"{value:.1f}", value, source) for value, source in zip(values, sources, strict=True)]
    gain = values[1] - values[0]
    return [*cells, Cell(f"{gain:+.1f}", gain, " ".join(sources))]


def _images(data: DatasetResults, group: str) -> Cell:
    """How many test images a number is of, as any run counted them."""
    place = ("closed", "images_seen") if group == "seen" else ("groups", group, "test_images")
    for run in (run for runs in data.runs.values() for run in runs.values()):
        value: Tree | float | None = run.metrics
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float):
            return Cell(f"{value:,.0f}", value, pointer(run.files["metrics"], *place))
    return Cell(MISSING)
