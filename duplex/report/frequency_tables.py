"""Build the report's tables of accuracy by the frequency of pairs in training.

Frequency groups are head, medium, tail (by number of training images) and unseen. Some tables compare a method with and
without the Duplex paper's local graph, which updates prototypes by messages from the images of a batch.
"""

from __future__ import annotations

from duplex.labels import GROUPS
from duplex.report.blocks import MISSING, Note, Table, TableCell, TableRow, columns, text_cell
from duplex.report.results import DatasetResults, Results
from duplex.report.table_cells import json_pointer, run_cell, value_at
from duplex.report.tables import read_package_yaml

COUNTS = {
    "compositions": "{:,.0f}",
    "train_images": "{:,.0f}",
    "train_percent": "{:.1f}",
    "test_images": "{:,.0f}",
    "test_percent": "{:.1f}",
}


def group_table(data: DatasetResults) -> Table | Note:
    """Return a table of each method's accuracy by the pairs' frequency in training, without a bias on unseen pairs.

    If no run has accuracies by frequency, return a note that says so.
    """
    methods = {m: runs for m, runs in data.runs.items() if runs and all(r.metrics.get("groups") for r in runs.values())}
    if not methods:
        metrics = [run.metrics for runs in data.runs.values() for run in runs.values()]
        if any("open" in worlds and "closed" not in worlds for worlds in metrics):
            return Note("Frequency groups need the closed world, which evaluation.worlds in params.yaml omits.")
        return Note("No run has metrics by frequency group.", "dvc repro")
    first = next(iter(next(iter(methods.values())).values()))
    rows = []
    for group in first.metrics["groups"]:
        counts = [run_cell([first], ("groups", group, key), form) for key, form in COUNTS.items()]
        accuracies = [
            run_cell(list(runs.values()), ("groups", group, "accuracy"), "{:.1f}") for runs in methods.values()
        ]
        rows.append(TableRow([text_cell(group), *counts, *accuracies]))
    note = (
        "Pairs by number of training images: head is the top 20 %, medium the next 30 %, tail the rest; unseen pairs "
        "have none. Accuracy without bias, closed world, percent, mean over seeds."
    )
    titles = [key.replace("_percent", " %").replace("_", " ") for key in COUNTS]
    return Table(f"Accuracy by training frequency: {data.name}", columns("group", *titles, *methods), rows, note)


GRAPH = ("codebook without graph", "with graph", "gain")


def graph_table(results: Results, data: DatasetResults) -> Table | None:
    """Return a table of accuracy by the pairs' frequency in training, with and without the Duplex paper's local graph.

    The graph updates prototypes by messages from images. Rows are head, medium, tail and unseen pairs; the bias on
    unseen pairs is 0. None unless both ablations (with, without) were run.
    """
    cells = {group: _graph_cells(results, data, "groups", group) for group in GROUPS}
    rows = [TableRow([text_cell(group), *numbers]) for group, numbers in cells.items() if numbers]
    if not rows:
        return None
    note = "Accuracy without bias, closed world, percent, mean over the ablations' seeds."
    return Table(f"Training frequency and the graph: {data.name}", columns("group", *GRAPH), rows, note)


def curve_ends_table(results: Results, data: DatasetResults) -> Table | None:
    """Return a table of accuracy at the ends of the seen–unseen curve, with and without the Duplex paper's local graph.

    The graph updates prototypes by messages from images. Rows are head, medium, tail, all seen and unseen pairs. None
    unless both ablations (with, without) were run.
    """
    runs = [run for seeds in data.runs.values() for run in seeds.values()]
    rows = []
    for group in ("head", "medium", "tail", "seen", "unseen"):  # rows of the appendix
        place = ("closed", "seen") if group == "seen" else ("groups_at_ends", group)
        counted = ("closed", "images_seen") if group == "seen" else ("groups", group, "test_images")
        images = (run_cell([run], counted, "{:,.0f}") for run in runs)
        if cells := _graph_cells(results, data, *place):
            count = next((cell for cell in images if cell.source), TableCell(MISSING))
            rows.append(TableRow([text_cell(group), count, *cells]))
    if not any(row.cells[0].text in GROUPS for row in rows):
        return None
    note = (
        "Accuracy at the ends of the curve: head, medium, tail and all seen pairs when unseen pairs are excluded (so "
        "that seen is S), unseen pairs when seen pairs are excluded (U). Closed world, percent, mean over seeds."
    )
    caption = f"Training frequency and the graph at the curve's ends: {data.name}"
    return Table(caption, columns("group", "test images", *GRAPH), rows, note)


def _graph_cells(results: Results, data: DatasetResults, *place: str) -> list[TableCell]:
    """Return table cells with an accuracy without and with updates of prototypes by the local graph, and the gain.

    place: keys that lead to the accuracy in an ablation's metrics. If one of the two lacks it, no cells are returned.
    """
    pair = read_package_yaml("tables.yaml")["frequency"]  # entries of `ablations:` that differ in the graph only
    names = (pair["without"], pair["with"])
    values = [value_at(data.ablations, (name, *place)) for name in names]
    if None in values:
        return []
    sources = [json_pointer(results.ablations_file, data.name, name, *place) for name in names]
    cells = [TableCell(f"{value:.1f}", value, source) for value, source in zip(values, sources, strict=True)]
    gain = values[1] - values[0]
    return [*cells, TableCell(f"{gain:+.1f}", gain, " ".join(sources))]
