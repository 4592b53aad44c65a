"""Frequency groups without and with the graph, side by side."""

from __future__ import annotations

from duplex.report.blocks import Table
from duplex.report.frequency import graph_table
from duplex.report.material import DatasetMaterial, Material
from duplex.report.sections import dataset_section

GROUPS = {"static": {"head": 80.0, "tail": 41.0, "unseen": 20.0}, "duplex_five": {"head": 79.5, "tail": 45.25}}


def material(*names: str) -> Material:
    return Material((DatasetMaterial("own/x", {}, ablations={name: {"groups": GROUPS[name]} for name in names}),))


def test_both_ablations_and_what_the_graph_gains():
    whole = material("static", "duplex_five")
    table = graph_table(whole, whole.datasets[0])
    assert isinstance(table, Table)
    assert [column.title for column in table.columns] == ["group", "codebook without graph", "with graph", "gain"]
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["head", "80.0", "79.5", "-0.5"],
        ["tail", "41.0", "45.2", "+4.2"],
    ]
    assert table.rows[1].cells[2].source == "ablations/metrics.json#/own~1x/duplex_five/groups/tail"


def test_one_of_them_is_no_comparison():
    for whole in (material("static"), material("duplex_five"), material()):
        assert graph_table(whole, whole.datasets[0]) is None


def test_it_stands_with_training_frequency():
    whole = material("static", "duplex_five")
    parts = {part.title: part.blocks for part in dataset_section(whole, whole.datasets[0], ()).parts}
    assert parts["Training frequency"][-1] == graph_table(whole, whole.datasets[0])
