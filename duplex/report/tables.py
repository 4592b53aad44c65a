"""Tables of measured results, one column a line: a heading, and what it says of a row.

`METRICS_COLUMNS` are the columns of `duplex metrics`, `RUN_COLUMNS` those of `artifacts/runs.csv`.
Tables of the page cite the source of every number: a JSON file and a pointer into it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from duplex.evaluation.metrics import (
    METRICS,
    MISSING,
    OPEN_METRICS,
    OWN_ANSWERS,
    PART_METRICS,
    TIPS,
    interval_of,
    interval_text,
)
from duplex.labels import GROUPS, WORLDS
from duplex.report.aggregate import TERMS, Aggregate, DatasetResults, Results, RunRecord, Tree, at_threshold
from duplex.report.blocks import (
    Block,
    Column,
    ColumnOf,
    Note,
    Table,
    TableCell,
    TableRow,
    json_pointer,
    number_cell,
    ranked,
    table_of,
    text_cell,
    text_column,
)
from duplex.report.claims import CLIP, backbone_of, benchmark_of, counts_of, published_rows, read_package_yaml

TERMS_NOTE = (
    "Score terms of one trained method, evaluated without the others and weighted as in the "
    "whole score: semantic prototypes (semantic), visual prototypes (visual), states and objects "
    "by prompts (factors), pairs by closed-form prototypes (gaussian), states and objects by "
    "closed-form prototypes (gaussian_factors). A term of states or of objects alone is equal for "
    "several pairs, and ties count as wrong answers."
)
FEASIBILITY_NOTE = (
    "Unseen pairs with a feasibility below the threshold, which has the best validation AUC, are "
    "excluded; with evaluation.feasibility: auto only if the gain on unseen validation pairs "
    "without a part in the choice exceeds twice its standard error. Feasibility comes from word "
    "vectors (docs/metrics.md). “Used” counts runs; the others use no threshold. "
    "Mean over seeds."
)
FREQUENCY_NOTE = (
    "Pairs by number of training images: head is the top 20 %, medium the next 30 %, tail the "
    "rest; unseen pairs have none. Accuracy without bias, closed world, percent, mean over seeds."
)
ENDS_NOTE = (
    "Accuracy at the ends of the curve: head, medium, tail and all seen pairs when unseen pairs "
    "are excluded (so that seen is S), unseen pairs when seen pairs are excluded (U). Closed "
    "world, percent, mean over seeds."
)


@dataclass(frozen=True)
class MetricsLine:
    """A row of `duplex metrics`: a method's metrics in one world, averaged over seeds."""

    dataset: str
    world: str
    method: str
    summary: Mapping[str, float]

    def number(self, name: str) -> str:
        if name not in self.summary:
            return MISSING
        several = self.summary.get("seeds", 1) > 1
        error = f"{self.summary[f'{name}_se']:.1f}" if several else MISSING
        return f"{self.summary[name]:.1f} ± {error}"


METRICS_COLUMNS: list[tuple[str, Callable[[MetricsLine], str]]] = [
    ("data set", lambda line: line.dataset),
    ("world", lambda line: line.world),
    ("method", lambda line: line.method),
    *((title, partial(MetricsLine.number, name=name)) for name, title in METRICS.items()),
    ("AUC 95 %", lambda line: interval_text(line.summary)),
    *((PART_METRICS[name], partial(MetricsLine.number, name=name)) for name in OWN_ANSWERS),
    ("all pairs", lambda line: line.number("auc_all")),  # open world, all pairs feasible
    ("by words", lambda line: line.number("auc_by_words")),  # at the threshold by word vectors
]
RUN_COLUMNS = ("dataset", "method", "seed", "world", "options", "val_auc", "val_auc_all", "epoch", "auc", "hm", "seen",
               "unseen", "seconds")  # fmt: skip


def metrics_as_text(table: Aggregate) -> list[list[str]]:
    """The table of `duplex metrics`: a header, then a row per data set, world and method."""
    rows = [[title for title, _ in METRICS_COLUMNS]]
    for dataset, methods in table.items():
        for world in WORLDS:
            if any(world in summaries for summaries in methods.values()):
                for method, summaries in methods.items():
                    line = MetricsLine(dataset, world, method, summaries.get(world, {}))
                    rows.append([text(line) for _, text in METRICS_COLUMNS])
    return rows


def run_table(results: Results, options: Mapping[tuple[str, str], Mapping[str, Any]]) -> pd.DataFrame:
    """Table with one line per run and world; options: (data set, method) -> text of that column."""
    lines = []
    for data in results.datasets:
        for method, runs in data.runs.items():
            changed = json.dumps(options.get((data.name, method), {}))
            for seed, run in runs.items():
                for world in WORLDS:
                    if world in run.metrics:
                        line = {**run.metrics, **run.metrics[world]}
                        line |= {"dataset": data.name, "method": method, "seed": seed}
                        line |= {"world": world, "options": changed, "seconds": run.seconds}
                        lines.append(line)
    return pd.DataFrame(lines, columns=list(RUN_COLUMNS))


@dataclass(frozen=True)
class SummaryLine:
    """A row of numbers from a summary, and the place where they are: the file, then keys."""

    title: str
    numbers: Tree
    place: tuple[str, ...]

    def cell(self, name: str) -> TableCell:
        """A metric, ± its standard error over seeds."""
        value = self.numbers.get(name)
        if value is None:
            return TableCell(MISSING)
        error = self.numbers.get(f"{name}_se")
        spread = ""
        if error is not None and self.numbers.get("seeds", 1) > 1:
            spread = f"± {error:.1f}"
        ends = interval_of(self.numbers, name)
        tip = f"{value:.2f}"
        if ends is not None:
            tip += f"; 95 % over images: {ends[0]:.1f} to {ends[1]:.1f}"
        return number_cell(value, source=json_pointer(*self.place, name), spread=spread, tip=tip)

    def interval_cell(self) -> TableCell:
        ends = interval_of(self.numbers)
        if ends is None:
            return TableCell(MISSING)
        sources = [json_pointer(*self.place, f"auc_{end}") for end in ("low", "high")]
        return TableCell(interval_text(self.numbers), ends[0], " ".join(sources))


def title_column(heading: str) -> ColumnOf[SummaryLine]:
    return text_column(heading), lambda line: text_cell(line.title)


def metric_columns(metrics: Mapping[str, str] = METRICS) -> list[ColumnOf[SummaryLine]]:
    """A column per metric; `metrics`: key in summaries -> heading."""
    return [(Column(title, tip=TIPS[title]), partial(SummaryLine.cell, name=name)) for name, title in metrics.items()]


def value_at(tree: Any, keys: Sequence[str]) -> Any:
    """The value at `tree[keys[0]][keys[1]]...` of a nested mapping; None if a key is missing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def run_cell(
    runs: Iterable[RunRecord], keys: Sequence[str], form: str, part: str = "metrics", scale: float = 1.0
) -> TableCell:
    """The mean over runs of the number under `keys`, as `mean_cell`."""
    return mean_cell([(run, keys) for run in runs], form, part, scale)


def mean_cell(
    places: Sequence[tuple[RunRecord, Sequence[str]]], form: str, part: str = "metrics", scale: float = 1.0
) -> TableCell:
    """The mean of a number over those runs that recorded it in `places`, multiplied by `scale`."""
    numbers = []
    sources = []
    for run, keys in places:
        value = value_at(getattr(run, part), keys)
        if isinstance(value, int | float) and math.isfinite(value):
            numbers.append(value)
            sources.append(json_pointer(run.files[part], *keys))
    if not numbers:
        return TableCell(MISSING)
    return number_cell(math.fsum(numbers) / len(numbers) * scale, form, " ".join(sources))


def result_table(results: Results, data: DatasetResults, world: str) -> Table | None:
    """All methods' metrics in one world, then published ones; None if no method has results."""
    lines = [
        SummaryLine(method, worlds[world], (results.metrics_file, data.name, method, world))
        for method, worlds in data.summary.items()
        if world in worlds
    ]
    if not lines:
        return None
    further = {**OPEN_METRICS, **PART_METRICS} if world == "open" else PART_METRICS
    columns = [
        title_column("method"),
        *metric_columns(),
        (Column("AUC 95 %", tip=TIPS["AUC 95 %"]), SummaryLine.interval_cell),
        *metric_columns(further),
    ]
    table = table_of(f"{data.name}, {world} world", columns, lines)
    rows = ranked(table.rows, range(1, 1 + len(METRICS)))
    quoted = quoted_rows(data, world, 1 + len(further))
    seeds = max(int(line.numbers.get("seeds", 1)) for line in lines)
    over = f"{seeds} seed{'s' if seeds > 1 else ''}"
    note = f"Mean ± standard error over {over}, in percent. Bold: best, underlined: second."
    if quoted:
        note += _quoted_note(data, world)
    return Table(table.caption, table.columns, [*rows, *quoted], note)


def _quoted_note(data: DatasetResults, world: str) -> str:
    source = read_package_yaml("quoted.yaml")["source"]
    note = f" Rows marked “quoted” are published numbers, where no other source stands beside them from {source}."
    if world == "open":
        note += " Their open world has a feasibility threshold by words."
    encoders = {each["settings"]["encoder"] for each in data.summary.values() if "settings" in each}
    others = sorted(encoder for encoder in encoders if backbone_of(encoder) != CLIP)
    if others:
        note += f" The encoder here is {', '.join(others)}: not comparable with rows of {CLIP}."
    return note


def quoted_rows(data: DatasetResults, world: str, further: int) -> list[TableRow]:
    """Published results if the data set is a benchmark; rows end with `further` empty cells."""
    benchmark = benchmark_of(counts_of(data.statistics))
    rows = []
    for row in published_rows(world):
        if benchmark in row:
            errors = row.get("errors", {}).get(benchmark, [None] * 4)
            source = f" from {row['source']}" if "source" in row else ""
            cells = [text_cell(f"{row['method']}, {row['backbone']} (quoted{source})")]
            numbers = row[benchmark]
            if isinstance(numbers, Mapping):  # only some are known
                numbers = [numbers.get(metric) for metric in METRICS]
            for value, error in zip(numbers, errors, strict=True):
                cells.append(number_cell(value, spread="" if error is None else f"± {error:.1f}"))
            rows.append(TableRow([*cells, *[TableCell(MISSING)] * further], quoted=True))
    return rows


@dataclass(frozen=True)
class ThresholdLine:
    """A method's open-world metrics at the feasibility threshold: runs, and keys of each."""

    method: str
    places: Sequence[tuple[RunRecord, tuple[str, ...]]]

    @property
    def used(self) -> str:
        return f"{sum(keys == ('open',) for _, keys in self.places)} of {len(self.places)}"

    def cell(self, key: str, form: str) -> TableCell:
        return mean_cell([(run, (*keys, key)) for run, keys in self.places], form)


FEASIBILITY_COLUMNS: list[ColumnOf[ThresholdLine]] = [
    (text_column("method"), lambda line: text_cell(line.method)),
    (text_column("used"), lambda line: text_cell(line.used)),
    (Column("threshold"), lambda line: line.cell("threshold", "{:.3f}")),
    (Column("feasible pairs"), lambda line: line.cell("feasible", "{:,.0f}")),
    (Column("val AUC, all feasible"), lambda line: line.cell("val_auc_all_feasible", "{:.1f}")),
    (Column("val AUC, at threshold"), lambda line: line.cell("val_auc_at_threshold", "{:.1f}")),
    (Column("gain on pairs left out"), lambda line: line.cell("val_auc_gain", "{:+.2f}")),
    (Column("standard error"), lambda line: line.cell("val_auc_gain_se", "{:.2f}")),
    (Column("test AUC"), lambda line: line.cell("auc", "{:.1f}")),
]


def feasibility_table(data: DatasetResults) -> Table | None:
    """Each method's threshold on feasibility and its AUC; None if no method has one."""
    lines = []
    for method, runs in data.runs.items():
        worlds = [(run, run.metrics["open"]) for run in runs.values() if "open" in run.metrics]
        if worlds and all(at_threshold(world) for _, world in worlds):
            places = [(run, ("open",) if "threshold" in world else ("open", "words")) for run, world in worlds]
            lines.append(ThresholdLine(method, places))
    if not lines:
        return None
    caption = f"Feasibility in the open world: {data.name}"
    return table_of(caption, FEASIBILITY_COLUMNS, lines, FEASIBILITY_NOTE)


def term_tables(results: Results, data: DatasetResults) -> list[Block]:
    """For each method with several score terms, metrics by single terms and by sums of terms."""
    tables: list[Block] = []
    for method, summary in data.summary.items():
        terms = [name for name in summary if name.startswith(TERMS)]
        if not terms:
            continue
        titles = {name: name.removeprefix(TERMS).replace("+", " + ") for name in terms}
        titles["closed"] = "all score terms"
        place = (results.metrics_file, data.name, method)
        lines = [SummaryLine(title, summary[name], (*place, name)) for name, title in titles.items()]
        caption = f"Score terms: {method}, {data.name}, closed world"
        table = table_of(caption, [title_column("score terms"), *metric_columns()], lines)
        rows = ranked(table.rows, range(1, 1 + len(METRICS)))
        tables.append(Table(caption, table.columns, rows))
    return [Note(TERMS_NOTE), *tables] if tables else []


def frequency_table(data: DatasetResults) -> Table | Note:
    """Each method's accuracy on head, medium, tail and unseen pairs, without bias."""
    methods = {}
    for method, seeds in data.runs.items():
        measured = [run for run in seeds.values() if run.metrics.get("groups")]
        if measured:
            methods[method] = measured
    if not methods:
        return Note("No run has metrics by frequency group, which need the closed world.", "dvc repro")
    first = next(iter(methods.values()))[0]

    def cell(group: str, runs: Sequence[RunRecord], key: str, form: str = "{:.1f}") -> TableCell:
        return run_cell(runs, ("groups", group, key), form)

    columns: list[ColumnOf[str]] = [(text_column("group"), text_cell)]
    columns += [
        (Column("compositions"), partial(cell, runs=[first], key="compositions", form="{:,.0f}")),
        (Column("train images"), partial(cell, runs=[first], key="train_images", form="{:,.0f}")),
        (Column("train %"), partial(cell, runs=[first], key="train_percent")),
        (Column("test images"), partial(cell, runs=[first], key="test_images", form="{:,.0f}")),
        (Column("test %"), partial(cell, runs=[first], key="test_percent")),
    ]
    for method, runs in methods.items():
        columns.append((Column(method), partial(cell, runs=runs, key="accuracy")))
    caption = f"Accuracy by training frequency: {data.name}"
    return table_of(caption, columns, first.metrics["groups"], FREQUENCY_NOTE)


@dataclass(frozen=True)
class EndsLine:
    """Accuracies of one frequency group in two ablations that differ in the graph only."""

    group: str
    images: TableCell
    accuracies: tuple[float, float]  # without and with the graph
    sources: tuple[str, str]

    def cell(self, place: int) -> TableCell:
        return number_cell(self.accuracies[place], source=self.sources[place])

    def gain_cell(self) -> TableCell:
        gain = self.accuracies[1] - self.accuracies[0]
        return number_cell(gain, "{:+.1f}", " ".join(self.sources))


ENDS_COLUMNS: list[ColumnOf[EndsLine]] = [
    (text_column("group"), lambda line: text_cell(line.group)),
    (Column("test images"), lambda line: line.images),
    (Column("codebook without graph"), lambda line: line.cell(0)),
    (Column("with graph"), lambda line: line.cell(1)),
    (Column("gain"), EndsLine.gain_cell),
]


def frequency_at_ends_table(results: Results, data: DatasetResults) -> Table | None:
    """Accuracies by frequency group at the ends of the curve, without and with the local graph."""
    runs = [run for seeds in data.runs.values() for run in seeds.values()]
    rows = read_package_yaml("ablation_tables.yaml")["frequency"]
    names = (rows["without"], rows["with"])
    lines = []
    for group in ("head", "medium", "tail", "seen", "unseen"):  # rows of the appendix
        keys = ("closed", "seen") if group == "seen" else ("groups_at_ends", group)
        before, after = [value_at(data.ablations, (name, *keys)) for name in names]
        if before is not None and after is not None:
            counted = ("closed", "images_seen") if group == "seen" else ("groups", group, "test_images")
            counts = [run_cell([run], counted, "{:,.0f}") for run in runs]
            images = next((cell for cell in counts if cell.source), TableCell(MISSING))
            place = (results.ablations_file, data.name)
            without, with_graph = [json_pointer(*place, name, *keys) for name in names]
            lines.append(EndsLine(group, images, (before, after), (without, with_graph)))
    if not any(line.group in GROUPS for line in lines):
        return None
    caption = f"Training frequency and the graph at the curve's ends: {data.name}"
    return table_of(caption, ENDS_COLUMNS, lines, ENDS_NOTE)
