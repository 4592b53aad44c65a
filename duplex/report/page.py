"""The project's report: a section per data set, the claims of the paper, and provenance."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from duplex.evaluation.metrics import MISSING
from duplex.labels import WORLDS
from duplex.report.aggregate import DatasetResults, Results
from duplex.report.blocks import (
    Block,
    Note,
    Report,
    ReportPart,
    ReportSection,
    Table,
    pair_table,
    text_cell,
    text_column,
)
from duplex.report.claims import read_package_yaml
from duplex.report.costs import auto_finetune_tables, efficiency_table, statistics_table
from duplex.report.figures import curve_figure, lambda_figures, slug, training_figures
from duplex.report.paper_tables import ablation_tables, claims_tables, published_table
from duplex.report.tables import feasibility_table, frequency_at_ends_table, frequency_table, result_table, term_tables

PACKAGES = ("duplex-czsl", "torch", "open_clip_torch", "numpy", "h5py", "pillow", "dvc")
ENCODER = ("encoder", "architecture", "weights", "preprocessing", "precision", "dim", "manifest", "torch",
           "open_clip_torch")  # fmt: skip


def build_report(results: Results, image_parts: Mapping[str, Sequence[ReportPart]] | None = None) -> Report:
    """The report of all data sets, with image_parts: data set -> parts that show images."""
    sections = []
    claims = []
    for data in results.datasets:
        sections.append(dataset_section(results, data, (image_parts or {}).get(data.name, ())))
        if data.summary:
            claims.append(ReportPart(data.name, claims_tables(results, data)))
    if claims:
        sections.append(ReportSection("claims", "Claims of the paper", claims))
    sections.append(ReportSection("provenance", "Provenance", [provenance_part(results)]))
    methods = dict.fromkeys(method for data in results.datasets for method in data.summary)
    facts = (
        ("data sets", ", ".join(data.name for data in results.datasets)),
        ("methods", ", ".join(methods)),
        ("seeds", ", ".join(map(str, results.seeds))),
    )
    lead = "Compositional zero-shot recognition: which state–object pairs are recognised, seen in training or not."
    return Report("Duplex report", lead, sections, facts)


def dataset_section(results: Results, data: DatasetResults, image_parts: Sequence[ReportPart]) -> ReportSection:
    curves: list[Block] = [figure for world in WORLDS if (figure := curve_figure(data, world))]
    no_curves = Note("No run has predictions of seen and unseen pairs.", "dvc repro")
    no_training = Note("No run has a training history of more than one epoch.")
    graph = frequency_at_ends_table(results, data)
    recipes = auto_finetune_tables(data)
    parts = [
        ReportPart("Results", _results(results, data)),
        ReportPart("Seen against unseen", curves or [no_curves]),
        *([ReportPart("Fine-tuned blocks", recipes)] if recipes else []),
        ReportPart("Training", training_figures(data) or [no_training]),
        ReportPart("Training frequency", [frequency_table(data), *([graph] if graph else [])]),
        ReportPart("Ablations", _ablations(results, data)),
        ReportPart("Cost", [efficiency_table(results, data)]),
        *image_parts,
        ReportPart("Data", [statistics_table(data)]),
    ]
    return ReportSection(slug("data", data.name), data.name, collect_missing_parts(parts))


def collect_missing_parts(parts: Sequence[ReportPart]) -> list[ReportPart]:
    """The parts with data, then a part `Not shown` with the notes of parts without data."""
    filled = []
    notes = []
    for part in parts:
        missing = [block for block in part.blocks if isinstance(block, Note)]
        if len(missing) < len(part.blocks):
            filled.append(part)
        else:
            notes += [replace(note, text=f"{part.title}: {note.text}") for note in missing]
    return [*filled, ReportPart("Not shown", notes)] if notes else filled


def _results(results: Results, data: DatasetResults) -> list[Block]:
    candidates = [
        *(result_table(results, data, world) for world in WORLDS),
        *(published_table(results, data, world) for world in WORLDS),
        feasibility_table(data),
    ]
    blocks: list[Block] = [table for table in candidates if table]
    missing = results.not_evaluated.get(data.name)
    if blocks and missing:
        blocks.append(Note(f"Not evaluated and not included: {', '.join(missing)}.", "dvc repro"))
    return blocks or [Note("No method has been evaluated.", "dvc repro")]


def _ablations(results: Results, data: DatasetResults) -> list[Block]:
    entries = ablation_tables(results, data)
    spec = read_package_yaml("ablation_tables.yaml")
    finished = [table for _, table in entries if table is not None]
    missing = [title for title, table in entries if table is None]
    curves = lambda_figures(data, spec["sensitivity"])
    if not curves:
        missing.append("Sensitivity to λ")
    notes = []
    if missing:
        notes.append(Note(f"Not run for this data set: {', '.join(missing)}.", spec["command"]))
    return [*finished, *term_tables(results, data), *notes, *curves]


def provenance_part(results: Results) -> ReportPart:
    common = [("git revision", _revision()), ("seeds", ", ".join(map(str, results.seeds)))]
    common.append(("python", platform.python_version()))
    common += [(package, package_version(package)) for package in PACKAGES]
    blocks = [_facts_table("This run", common)]
    for data in results.datasets:
        identity = [(key, data.identity[key]) for key in ENCODER if key in data.identity]
        facts = identity or [("encoder", MISSING)]
        blocks.append(_facts_table(f"Features of {data.name}", facts))
    return ReportPart("Where the numbers come from", blocks)


def _facts_table(caption: str, facts: Sequence[tuple[str, str]]) -> Table:
    rows = [(name, text_cell(value)) for name, value in facts]
    return pair_table(caption, rows, text_column("value"))


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


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
