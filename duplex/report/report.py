"""The pages of the report: a section per data set, and one on git revision, package versions and encoders."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from duplex.evaluation.metric_table import MISSING
from duplex.labels import WORLDS
from duplex.report import tables
from duplex.report.aggregate import DatasetResults, Results
from duplex.report.blocks import Block, Note, Report, ReportPart, ReportSection, Table, TableRow, columns, text_cell
from duplex.report.figures import curve_figure, lambda_figures, slug, training_figures

PACKAGES = ("duplex", "torch", "open_clip_torch", "numpy", "h5py", "pillow", "dvc")
ENCODER = ("encoder", "architecture", "weights", "preprocessing", "precision", "dim", "manifest", "torch",
           "open_clip_torch")  # fmt: skip


def build_report(results: Results, image_parts: Mapping[str, Sequence[ReportPart]] | None = None) -> Report:
    """The report of all data sets; `image_parts`: by data set, further parts that need images or a trained method."""
    sections = [dataset_section(results, data, (image_parts or {}).get(data.name, ())) for data in results.datasets]
    provenance = ReportSection("provenance", "Provenance", [provenance_part(results)])
    methods = dict.fromkeys(method for data in results.datasets for method in data.summary)
    facts = (
        ("data sets", ", ".join(data.name for data in results.datasets)),
        ("methods", ", ".join(methods)),
        ("seeds", ", ".join(map(str, results.seeds))),
    )
    lead = "Compositional zero-shot recognition: which state–object pairs are recognised, seen in training or not."
    return Report("Duplex report", lead, [*sections, provenance], facts)


def dataset_section(results: Results, data: DatasetResults, image_parts: Sequence[ReportPart]) -> ReportSection:
    curves: list[Block] = [figure for world in WORLDS if (figure := curve_figure(data, world))]
    no_curves = Note("No run has predictions of seen and unseen pairs.", "dvc repro")
    no_training = Note("No run has a training history of more than one epoch.")
    graph = [table(results, data) for table in (tables.graph_table, tables.curve_ends_table)]
    recipes = tables.run_recipe_tables(data)
    parts = [
        ReportPart("Results", _results(results, data)),
        ReportPart("Seen against unseen", curves or [no_curves]),
        *([ReportPart("Fine-tuned blocks", recipes)] if recipes else []),
        ReportPart("Training", training_figures(data) or [no_training]),
        ReportPart("Training frequency", [tables.frequency_table(data), *filter(None, graph)]),
        ReportPart("Ablations", _ablations(results, data)),
        ReportPart("Cost", [tables.efficiency_table(results, data)]),
        *image_parts,
        ReportPart("Data", [tables.statistics_table(data)]),
    ]
    return ReportSection(slug("data", data.name), data.name, with_missing_last(parts))


def with_missing_last(parts: Sequence[ReportPart]) -> list[ReportPart]:
    """The parts with data, then one part `Not shown` with the notes of all parts without data."""
    filled = [part for part in parts if not all(isinstance(block, Note) for block in part.blocks)]
    notes = [
        replace(block, text=f"{part.title}: {block.text}")
        for part in parts
        if part not in filled
        for block in part.blocks
        if isinstance(block, Note)
    ]
    return [*filled, ReportPart("Not shown", notes)] if notes else filled


def _results(results: Results, data: DatasetResults) -> list[Block]:
    candidates = [
        *(tables.result_table(results, data, world) for world in WORLDS),
        *(tables.published_table(results, data, world) for world in WORLDS),
        tables.feasibility_table(data),
    ]
    blocks: list[Block] = [table for table in candidates if table]
    if blocks and (missing := results.not_evaluated.get(data.name)):
        blocks.append(Note(f"Not evaluated and not included: {', '.join(missing)}.", "dvc repro"))
    return blocks or [Note("No method has been evaluated.", "dvc repro")]


def _ablations(results: Results, data: DatasetResults) -> list[Block]:
    entries = tables.ablation_tables(results, data)
    spec = tables.read_package_yaml("tables.yaml")
    finished = [table for _, table in entries if table is not None]
    missing = [title for title, table in entries if table is None]
    curves = lambda_figures(data, spec["sensitivity"])
    if not curves:
        missing.append("Sensitivity to λ")
    notes = [Note(f"Not run for this data set: {', '.join(missing)}.", spec["command"])] if missing else []
    return [*finished, *tables.term_tables(results, data), *notes, *curves]


def provenance_part(results: Results) -> ReportPart:
    common = [("git revision", _revision()), ("seeds", ", ".join(map(str, results.seeds)))]
    common.append(("python", platform.python_version()))
    for package in PACKAGES:
        try:
            common.append((package, version(package)))
        except PackageNotFoundError:
            common.append((package, "not installed"))
    blocks = [_pairs("This run", common)]
    for data in results.datasets:
        identity = [(key, data.identity[key]) for key in ENCODER if key in data.identity]
        blocks.append(_pairs(f"Features of {data.name}", identity or [("encoder", MISSING)]))
    return ReportPart("Where the numbers come from", blocks)


def _revision() -> str:
    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, timeout=20)
        return result.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!artifacts", ":!dvc.lock")
    except (OSError, subprocess.SubprocessError):
        return "not in a git repository"
    return f"{commit} with changes" if changed else commit


def _pairs(caption: str, rows: list[tuple[str, str]]) -> Table:
    lines = [TableRow([text_cell(name), text_cell(value)]) for name, value in rows]
    return Table(caption, columns("item", "value", texts=2), lines)
