"""Frequency groups without and with the graph."""

from __future__ import annotations

from duplex.report.blocks import Table
from duplex.report.page_sections import dataset_section
from duplex.report.results import DatasetResults, Results, RunRecord
from duplex.report.tables import ends_table, graph_table

GROUPS = {"static": {"head": 80.0, "tail": 41.0, "unseen": 20.0}, "duplex_five": {"head": 79.5, "tail": 45.25}}


def results(*names: str) -> Results:
    return Results((DatasetResults("own/x", {}, ablations={name: {"groups": GROUPS[name]} for name in names}),))


def test_the_gain_of_the_graph_is_the_difference_of_both_ablations():
    whole = results("static", "duplex_five")
    table = graph_table(whole, whole.datasets[0])
    assert isinstance(table, Table)
    assert [column.title for column in table.columns] == ["group", "codebook without graph", "with graph", "gain"]
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["head", "80.0", "79.5", "-0.5"],
        ["tail", "41.0", "45.2", "+4.2"],
    ]
    assert table.rows[1].cells[2].source == "ablations/metrics.json#/own~1x/duplex_five/groups/tail"


def test_one_ablation_gives_no_table():
    for whole in (results("static"), results("duplex_five"), results()):
        assert graph_table(whole, whole.datasets[0]) is None


def test_at_the_ends_of_the_curve_seen_is_s_and_images_are_counted():
    ablations = {
        name: {"groups_at_ends": values, "closed": {"seen": s}}
        for (name, values), s in zip(GROUPS.items(), (41.0, 43.0), strict=True)
    }
    run = RunRecord(
        {"groups": {"head": {"test_images": 1200}}, "closed": {"images_seen": 1500}}, files={"metrics": "m.json"}
    )
    whole = Results((DatasetResults("own", {}, ablations=ablations, runs={"m": {0: run}}),))
    table = ends_table(whole, whole.datasets[0])
    assert isinstance(table, Table)
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["head", "1,200", "80.0", "79.5", "-0.5"],
        ["tail", "–", "41.0", "45.2", "+4.2"],
        ["seen", "1,500", "41.0", "43.0", "+2.0"],
    ]
    assert table.rows[2].cells[3].source == "ablations/metrics.json#/own/duplex_five/closed/seen"
    assert table.rows[0].cells[1].source == "m.json#/groups/head/test_images"
    assert ends_table(results("static", "duplex_five"), results("static").datasets[0]) is None


def test_the_table_is_in_the_part_on_training_frequency():
    whole = results("static", "duplex_five")
    parts = {part.title: part.blocks for part in dataset_section(whole, whole.datasets[0], ()).parts}
    assert parts["Training frequency"][-1] == graph_table(whole, whole.datasets[0])
