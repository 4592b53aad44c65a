"""Sections of the report: one per data set, and provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from duplex.labels import WORLDS
from duplex.report.blocks import Block, Note, Report, ReportPart, ReportSection
from duplex.report.figures import curve_figure, lambda_figures, slug, training_figures
from duplex.report.provenance import Provenance, provenance_part
from duplex.report.published import published_table
from duplex.report.results import DatasetResults, Results
from duplex.report.tables import (
    ablation_tables,
    data_file,
    efficiency_table,
    ends_table,
    feasibility_table,
    graph_table,
    group_table,
    result_table,
    statistics_table,
    term_tables,
)


def build_report(
    results: Results, origin: Provenance, image_parts: Mapping[str, Sequence[ReportPart]] | None = None
) -> Report:
    """Build the report; `image_parts`: the parts of each data set that need images or a trained method."""
    sections = [dataset_section(results, data, (image_parts or {}).get(data.name, ())) for data in results.datasets]
    provenance = ReportSection("provenance", "Provenance", [provenance_part(results, origin)])
    methods = dict.fromkeys(method for data in results.datasets for method in data.summary)
    facts = (
        ("data sets", ", ".join(data.name for data in results.datasets)),
        ("methods", ", ".join(methods)),
        ("seeds", ", ".join(map(str, results.seeds))),
    )
    lead = "Compositional zero-shot recognition: which state–object pairs are recognised, seen in training or not."
    return Report("Duplex report", lead, [*sections, provenance], facts)


def dataset_section(results: Results, data: DatasetResults, image_parts: Sequence[ReportPart]) -> ReportSection:
    curves = [figure for world in WORLDS if (figure := curve_figure(data, world))]
    training = training_figures(data)
    graph = [table for table in (graph_table(results, data), ends_table(results, data)) if table]
    parts = [
        ReportPart("Results", _results(results, data)),
        ReportPart(
            "Seen against unseen", curves or [Note("No run has predictions of seen and unseen pairs.", "dvc repro")]
        ),
        ReportPart("Training", training or [Note("No run has a training history of more than one epoch.")]),
        ReportPart("Training frequency", [group_table(data), *graph]),
        ReportPart("Ablations", _ablations(results, data)),
        ReportPart("Cost", [efficiency_table(results, data)]),
        *image_parts,
        ReportPart("Data", [statistics_table(data)]),
    ]
    return ReportSection(slug("data", data.name), data.name, parts)


def _results(results: Results, data: DatasetResults) -> list[Block]:
    tables = [
        *(result_table(results, data, world) for world in WORLDS),
        *(published_table(results, data, world) for world in WORLDS),
        feasibility_table(data),
    ]
    blocks: list[Block] = [table for table in tables if table]
    if blocks and (missing := results.not_evaluated.get(data.name)):
        blocks.append(Note(f"Not evaluated and not included: {', '.join(missing)}.", "dvc repro"))
    return blocks or [Note("No method has been evaluated.", "dvc repro")]


def _ablations(results: Results, data: DatasetResults) -> list[Block]:
    """Return the ablation tables whose runs exist, score terms and curves over lambda; one note lists missing runs."""
    entries = ablation_tables(results, data)
    tables = [block for _, block in entries if not isinstance(block, Note)]
    missing = [title for title, block in entries if isinstance(block, Note)]
    curves = lambda_figures(data, data_file("tables.yaml")["sensitivity"])
    if not curves:
        missing.append("Sensitivity to λ")
    command = data_file("tables.yaml")["command"]
    notes = [Note(f"Not run for this data set: {', '.join(missing)}.", command)] if missing else []
    return [*tables, *term_tables(results, data), *notes, *curves]
