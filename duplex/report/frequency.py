"""Accuracy by training frequency, without and with the graph over the codebook (the paper's appendix)."""

from __future__ import annotations

from duplex.labels import GROUPS
from duplex.report.blocks import Cell, Column, Row, Table
from duplex.report.material import DatasetMaterial, Material
from duplex.report.tables import data_file, pointer


def graph_table(material: Material, data: DatasetMaterial) -> Table | None:
    """None unless both ablations were run."""
    pair = data_file("tables.yaml")["frequency"]  # rows of `ablations:` that differ in nothing but the graph
    names = (pair["without"], pair["with"])
    before, after = (data.ablations.get(name, {}).get("groups", {}) for name in names)
    rows = []
    for group in GROUPS:
        if group in before and group in after:
            sources = [pointer(material.ablations_file, data.name, run, "groups", group) for run in names]
            values = (before[group], after[group])
            cells = [Cell(f"{value:.1f}", value, source) for value, source in zip(values, sources, strict=True)]
            gain = values[1] - values[0]
            rows.append(Row([Cell(group, group), *cells, Cell(f"{gain:+.1f}", gain, " ".join(sources))]))
    if not rows:
        return None
    titles = ("codebook without graph", "with graph", "gain")
    header = [Column("group", numeric=False), *(Column(title) for title in titles)]
    note = "Accuracy at no bias, closed world, percent, mean over the ablations' seeds."
    return Table(f"Training frequency and the graph: {data.name}", header, rows, note)
