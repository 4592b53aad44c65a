"""The report's sections: one a data set, one on where everything comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from duplex.labels import WORLDS
from duplex.report.blocks import Block, Note, Part, Report, Section
from duplex.report.figures import curve_figure, lambda_figures, slug, training_figures
from duplex.report.frequency import ends_table, graph_table
from duplex.report.provenance import Provenance, provenance_part
from duplex.report.published import published_table
from duplex.report.results import DatasetResults, Results
from duplex.report.tables import (
    ablation_tables,
    data_file,
    efficiency_table,
    feasibility_table,
    group_table,
    result_table,
    statistics_table,
)
from duplex.report.terms import term_tables


def build_report(results: Results, origin: Provenance, pictured: Mapping[str, Sequence[Part]] | None = None) -> Report:
    """`pictured`: by data set, the parts that need a network or pictures (qualitative, maps)."""
    sections = [dataset_section(results, data, (pictured or {}).get(data.name, ())) for data in results.datasets]
    provenance = Section("provenance", "Provenance", [provenance_part(results, origin)])
    methods = dict.fromkeys(method for data in results.datasets for method in data.summary)
    facts = (
        ("data sets", ", ".join(data.name for data in results.datasets)),
        ("methods", ", ".join(methods)),
        ("seeds", ", ".join(map(str, results.seeds))),
    )
    lead = "Compositional zero-shot recognition: which state–object pairs are recognised, seen in training or not."
    return Report("Duplex report", lead, [*sections, provenance], facts)


def dataset_section(results: Results, data: DatasetResults, pictured: Sequence[Part]) -> Section:
    parts = [
        Part("Results", _results(results, data)),
        Part("Seen against unseen", _curves(data)),
        Part("Training", training_figures(data) or [Note("No run has a training history of more than one epoch.")]),
        Part("Training frequency", _frequency(results, data)),
        Part("Ablations", _ablations(results, data)),
        Part("Cost", [efficiency_table(results, data)]),
        *pictured,
        Part("Data", [statistics_table(data)]),
    ]
    return Section(slug("data", data.name), data.name, parts)


def _results(results: Results, data: DatasetResults) -> list[Block]:
    tables = [
        *(result_table(results, data, world) for world in WORLDS),
        *(published_table(results, data, world) for world in WORLDS),
        feasibility_table(data),
    ]
    found: list[Block] = [table for table in tables if table]
    if found and (absent := results.absent.get(data.name)):
        found.append(Note(f"Not evaluated, and in no number here: {', '.join(absent)}.", "dvc repro"))
    return found or [Note("No method has been evaluated.", "dvc repro")]


def _curves(data: DatasetResults) -> list[Block]:
    figures = [curve_figure(data, world) for world in WORLDS]
    return [figure for figure in figures if figure] or [
        Note("No run has predictions of seen and unseen pairs.", "dvc repro")
    ]


def _frequency(results: Results, data: DatasetResults) -> list[Block]:
    graph = (graph_table(results, data), ends_table(results, data))
    return [group_table(data), *(table for table in graph if table is not None)]


def _ablations(results: Results, data: DatasetResults) -> list[Block]:
    """The tables whose runs exist, parts of single models' scores and lambda's curves; one note for all that is
    missing."""
    entries = ablation_tables(results, data)
    tables = [block for _, block in entries if not isinstance(block, Note)]
    missing = [title for title, block in entries if isinstance(block, Note)]
    curves = lambda_figures(data, data_file("tables.yaml")["sensitivity"])
    if not curves:
        missing.append("Sensitivity to λ")
    command = data_file("tables.yaml")["command"]
    notes = [Note(f"Not run for this data set: {', '.join(missing)}.", command)] if missing else []
    return [*tables, *term_tables(results, data), *notes, *curves]
