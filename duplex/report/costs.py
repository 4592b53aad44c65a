"""Tables of what runs cost, of the recipes that training compared, and of a data set's counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from duplex.evaluation.metrics import METRICS
from duplex.report.aggregate import DatasetResults, Results, RunRecord
from duplex.report.blocks import (
    Column,
    ColumnOf,
    Note,
    Table,
    TableCell,
    json_pointer,
    number_cell,
    pair_table,
    table_of,
    text_cell,
    text_column,
)
from duplex.report.tables import SummaryLine, run_cell, value_at

RecipeLine = tuple[Mapping[str, Any], str]  # a recipe and its source
RECIPE = "recipe_"  # prefix of the recipes in a run's metrics
RECIPE_COLUMNS = {  # key -> heading and format, of those that a recipe may have
    "rate": ("learning rate", "{:g}"),
    "epochs": ("epochs", "{:.0f}"),
    "auc": ("validation AUC", "{:.1f}"),
    "error": ("standard error", "{:.1f}"),
    "gain": ("gain over the best before", "{:+.1f}"),
    "gain_error": ("its error", "{:.1f}"),
    "accuracy": ("accuracy, %", "{:.1f}"),
    "accuracy_seen": ("known pairs right, %", "{:.1f}"),
    "accuracy_unseen": ("new pairs right, %", "{:.1f}"),
    "epoch": ("best epoch", "{:.0f}"),
}
RECIPE_NOTE = (
    "The chosen one is bold. All trainings with fine-tuned blocks end with a learning rate of 0; the "
    "best is repeated with more epochs while validation AUC rises by more than the standard error of "
    "the difference. Of the recipes that are at most this error below the highest AUC, that with the "
    "best mean accuracy on known and on new pairs is chosen, or the cheapest if this is not measured."
)
COST_NOTE = (
    "Mean over seeds. A codebook that gradients train is among the trained parameters; the values "
    "of one that only refinement changes are listed apart. Memory is the peak of the process in "
    "training. Times depend on the machine; they include the fine-tuned blocks of the encoder, "
    "but not its frozen ones."
)


@dataclass(frozen=True)
class CostLine:
    """A row of the table of costs: a method's runs, and its metrics in the closed world."""

    method: str
    runs: Sequence[RunRecord]
    closed: SummaryLine

    def mean(self, key: str, form: str = "{:,.0f}", part: str = "timing", scale: float = 1.0) -> TableCell:
        return run_cell(self.runs, (key,), form, part, scale)


COST_COLUMNS: list[ColumnOf[CostLine]] = [
    (text_column("method"), lambda line: text_cell(line.method)),
    (Column("trained parameters"), lambda line: line.mean("parameters")),
    (Column("fine-tuned blocks"), lambda line: line.mean("finetuned_blocks")),
    (Column("prototypes"), lambda line: line.mean("codebook_rows")),
    (Column("codebook values"), lambda line: line.mean("codebook_values")),
    (Column("peak memory"), lambda line: line.mean("peak_bytes", "{:,.0f} MB", scale=1e-6)),
    (Column("epoch"), lambda line: line.mean("seconds_per_epoch", "{:.2f} s")),
    (Column("test split"), lambda line: line.mean("test_seconds", "{:.2f} s", "evaluation_timing")),
    (Column(METRICS["hm"]), lambda line: line.closed.cell("hm")),
    (Column(METRICS["auc"]), lambda line: line.closed.cell("auc")),
]


def efficiency_table(results: Results, data: DatasetResults) -> Table:
    """Each method's costs (parameters, memory, seconds per epoch and for the test), HM and AUC."""
    lines = []
    for method, runs in data.runs.items():
        seeds = list(runs.values())
        is_closed = any("closed" in run.metrics for run in seeds)
        shown = data.shown_as.get(method, method) if is_closed else ""
        numbers = data.summary.get(shown, {}).get("closed", {})
        place = (results.metrics_file, data.name, shown, "closed")
        lines.append(CostLine(method, seeds, SummaryLine(shown, numbers, place)))
    return table_of(f"Cost and result: {data.name}, closed world", COST_COLUMNS, lines, COST_NOTE)


def statistics_table(data: DatasetResults) -> Table | Note:
    """A data set's counts (states, objects, pairs, images) and the size of its cache."""
    if data.statistics is None:
        return Note("The data set has no statistics.", f"dvc repro prepare@{data.name}")
    places: dict[str, tuple[str, ...]] = {
        "states": ("states",),
        "objects": ("objects",),
        "train pairs": ("train", "seen"),
        "train images": ("train", "images"),
    }
    for split in ("val", "test"):
        places[f"{split} seen pairs"] = (split, "seen")
        places[f"{split} unseen pairs"] = (split, "unseen")
        places[f"{split} images"] = (split, "images")
    rows = []
    for title, keys in places.items():
        source = json_pointer(data.statistics_file, *keys)
        rows.append((title, number_cell(value_at(data.statistics, keys), "{:,.0f}", source)))
    if data.extraction is not None:
        size = data.extraction.get("bytes")
        megabytes = None if size is None else 1e-6 * size
        cell = partial(json_pointer, data.extraction_file)
        rows += [
            ("feature cache", number_cell(megabytes, "{:,.1f} MB", cell("bytes"))),
            ("unreadable images", number_cell(data.extraction.get("bad"), "{:,.0f}", cell("bad"))),
        ]
    return pair_table(f"Counts: {data.name}", rows, Column("count"))


def auto_finetune_tables(data: DatasetResults) -> list[Table]:
    """The compared recipes (numbers of fine-tuned blocks) of each run with `finetune: auto`."""
    tables = []
    for method, runs in data.runs.items():
        for seed, run in runs.items():
            keys = [key for key in run.metrics if key.startswith(RECIPE)]
            keys.sort(key=lambda key: int(key.removeprefix(RECIPE)))
            recipes = []
            for key in keys:
                recipe = run.metrics[key]
                recipes.append({**recipe, "recipe": f"{recipe['blocks']:.0f}"})
            if recipes:
                sources = [json_pointer(run.files["metrics"], key) for key in keys]
                caption = f"Fine-tuned blocks of {method}, seed {seed}"
                tables.append(recipe_table(caption, recipes, "blocks", sources))
    return tables


def recipe_table(
    caption: str, recipes: Sequence[Mapping[str, Any]], heading: str, sources: Sequence[str] = ()
) -> Table:
    """Table of training recipes that were compared on validation images, with their `sources`."""

    def name_cell(line: RecipeLine) -> TableCell:
        name = line[0]["recipe"]
        return TableCell(name, name, rank=1 if line[0].get("chosen") else 0)

    def cell(line: RecipeLine, key: str, form: str) -> TableCell:
        recipe, source = line
        return number_cell(recipe.get(key), form, f"{source}/{key}" if source else "")

    columns: list[ColumnOf[RecipeLine]] = [(text_column(heading), name_cell)]
    for key, (title, form) in RECIPE_COLUMNS.items():
        if any(recipe.get(key) is not None for recipe in recipes):
            columns.append((Column(title), partial(cell, key=key, form=form)))
    lines = list(zip(recipes, sources or [""] * len(recipes), strict=True))
    return table_of(caption, columns, lines, RECIPE_NOTE)
