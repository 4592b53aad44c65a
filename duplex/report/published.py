"""Comparison of measured with published numbers, per method."""

from __future__ import annotations

from duplex.report.aggregate import Tree
from duplex.report.blocks import MISSING, Column, Table, TableCell, TableRow, columns, text_cell
from duplex.report.results import DatasetResults, Results
from duplex.report.tables import benchmark_of, data_file, plain, pointer

ENDS = ("auc", "auc_low", "auc_high")


def published_table(results: Results, data: DatasetResults, world: str) -> Table | None:
    """Return measured and published HM and AUC of every method run on a published benchmark; None without any."""
    benchmark = benchmark_of(data)
    if benchmark is None:
        return None
    rows = []
    for entry in data_file("quoted.yaml").get(world, ()):
        ours = _name_of(entry["method"], data, world)
        if benchmark in entry and ours is not None:
            rows.append(_row(results, data, world, ours, entry["method"], entry[benchmark]))
    if not rows:
        return None
    header = [
        *columns("method", "name here", "HM published", "HM measured", texts=2),
        Column("AUC published", tip="20-point sweep, which underestimates AUC by up to 0.8 %"),
        Column("AUC measured", tip="exact, mean over seeds"),
        Column("difference", tip="measured AUC minus published AUC"),
        Column("95 %", tip="interval of the difference over test images; the published number counts as exact"),
    ]
    note = f"Published numbers are quoted from {data_file('quoted.yaml')['source']}."
    return Table(f"{data.name}, {world} world: measured and published", header, rows, note)


def _name_of(method: str, data: DatasetResults, world: str) -> str | None:
    """Return the name in params.yaml of a published method that was evaluated in this world; None otherwise."""
    named = data_file("quoted.yaml")["names"].get(method)
    here = [name for name, worlds in data.summary.items() if world in worlds]
    return next((n for n in here if n == named or (named is None and plain(n) == plain(method))), None)


def _row(
    results: Results, data: DatasetResults, world: str, ours: str, method: str, published: list[float]
) -> TableRow:
    values: Tree = data.summary[ours][world]
    cells = [text_cell(method), text_cell(ours)]
    for name, number in zip(("hm", "auc"), published[2:], strict=True):
        value, source = values.get(name), pointer(results.metrics_file, data.name, ours, world, name)
        measured = TableCell(MISSING) if value is None else TableCell(f"{value:.1f}", value, source)
        cells += [TableCell(f"{number:.1f}", number), measured]
    gain, low, high = (None if end is None else end - published[3] for end in map(values.get, ENDS))
    interval = TableCell(MISSING) if low is None or high is None else TableCell(f"{low:+.1f} to {high:+.1f}", low)
    return TableRow([*cells, TableCell(f"{gain:+.1f}", gain), interval])
