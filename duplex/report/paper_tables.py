"""Tables that compare measured results with the paper: numbers, ablations and claims."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from duplex.evaluation.metrics import METRICS, MISSING, TIPS
from duplex.report import claims
from duplex.report.aggregate import DatasetResults, Results, Tree
from duplex.report.blocks import (
    Column,
    ColumnOf,
    Table,
    TableCell,
    number_cell,
    ranked,
    table_of,
    text_cell,
    text_column,
)
from duplex.report.measured import Measured, measured_methods
from duplex.report.tables import SummaryLine
from duplex.report.verdicts import NOT_COMPARABLE, UNTRAINED, VERDICTS, Gap, MeanWithError

COST_FORMS = {  # of the costs' titles
    "parameters": ("{:,.0f}", 1.0),
    "memory": ("{:,.0f} MB", 1e-6),
    "epoch": ("{:.2f} s", 1.0),
    "test": ("{:.2f} s", 1.0),
}
NUMBER_NOTE = (
    "A number is reproduced if the 95 % interval of ours over seeds lies within ±1 point of the "
    "published number, which counts as exact; not reproduced if it lies outside; undecided otherwise."
)
CLAIMS_NOTE = (
    "A line is a sentence of the paper. It is reproduced if each of its comparisons is, and not "
    "reproduced if one of them is not; the next table has the comparisons. The verdict holds for "
    "this data set and the encoder named there, and for no other."
)
COMPARISONS_NOTE = (
    "Reproduced: the 95 % interval of the difference over seeds (Student's t, the standard errors "
    "of both sides) lies above 0 (≥: above −1 point; ≈: within ±1 point); not reproduced: below 0 "
    "(below −1; outside of ±1); undecided: neither, or there is no interval. Untrained: in most "
    "seeds, validation chose the untrained model of a row. Intervals are not corrected for the "
    "number of comparisons: of 40 about equal rows, two are decided by chance on average."
)
UNTRAINED_TIP = "seeds whose best epoch by validation AUC is 0: an untrained model"
LEFT_TIP = "what is to be higher or small"
RIGHT_TIP = "what it is compared with"
ORDER_TIP = "whether AUC is below that of the last row, as in the paper"


def _spread(value: MeanWithError | None) -> str:
    if value is None or value.error is None or value.seeds < 2:
        return ""
    return f"± {value.error:.1f}"


def _value_cell(value: MeanWithError | None, metric: str) -> TableCell:
    if value is None:
        return TableCell(MISSING)
    form, scale = COST_FORMS.get(metric, ("{:.1f}", 1.0))
    spread = "" if metric in COST_FORMS else _spread(value)
    return number_cell(scale * value.mean, form, value.source, spread=spread)


def _gap_cell(gap: Gap | None) -> TableCell:
    return TableCell(MISSING) if gap is None else TableCell(f"{gap.value:+.1f}", gap.value)


def _interval_cell(gap: Gap | None) -> TableCell:
    return TableCell(MISSING) if gap is None else TableCell(gap.interval, gap.low)


@dataclass(frozen=True)
class PublishedLine:
    """A run, and the published row that it matches; without one, `row` is empty."""

    row: Tree
    run: Measured
    world: str
    benchmark: str

    @cached_property
    def verdict(self) -> tuple[str, Gap | None, str]:
        if not self.row:
            return MISSING, None, "the paper's tables have no such row"
        return claims.number_verdict(self.run, self.row, self.world, "auc")

    def published(self, metric: str) -> TableCell:
        value = claims.paper_value(self.row, self.world, self.benchmark, metric) if self.row else None
        return number_cell(None if value is None else value.mean, spread=_spread(value))

    def measured(self, metric: str, sampled: bool) -> TableCell:
        """By the published sweep, or exactly."""
        value = self.run.value(self.world, metric, sampled)
        if sampled and value is not None and "sampled" not in value.source:
            value = None
        return _value_cell(value, metric)


def published_table(results: Results, data: DatasetResults, world: str) -> Table | None:
    """Measured against published metrics, in the order of the paper's tables; None if there is nothing to compare.

    A reproduction also shows rows that have no published numbers.
    """
    benchmark = claims.benchmark_of(claims.counts_of(data.statistics))
    measured = measured_methods(results, data)
    here = [each for each in measured if each.file == results.metrics_file and world in each.tree and not each.part]
    lines = _published_lines(here, world, benchmark)
    order = claims.read_package_yaml("ablation_tables.yaml")["groups"]["main"]
    if results.ablations_file == results.metrics_file:
        shown = {line.run.name for line in lines}
        for run in here:
            if run.name in order and run.name not in shown:
                lines.append(PublishedLine({}, run, world, str(benchmark)))
        lines.sort(key=lambda line: order.index(line.run.name) if line.run.name in order else len(order))
    if not lines:
        return None
    columns: list[ColumnOf[PublishedLine]] = [
        (text_column("method"), lambda line: text_cell(line.row.get("quoted", MISSING))),
        (text_column("encoder"), lambda line: text_cell(line.row.get("backbone", MISSING))),
    ]
    columns = columns if benchmark else []
    columns.append((text_column("name here"), lambda line: text_cell(line.run.name)))
    for name, title in METRICS.items():
        if benchmark:
            columns.append((Column(f"{title} published"), partial(PublishedLine.published, metric=name)))
        columns += [
            (Column(f"{title} sampled", tip=TIPS[title]), partial(PublishedLine.measured, metric=name, sampled=True)),
            (Column(f"{title} exact", tip=TIPS[title]), partial(PublishedLine.measured, metric=name, sampled=False)),
        ]
    if benchmark:
        columns += [
            (text_column("AUC, difference"), lambda line: _gap_cell(line.verdict[1])),
            (text_column("95 %"), lambda line: _interval_cell(line.verdict[1])),
            (text_column("verdict on AUC"), lambda line: text_cell(line.verdict[0])),
            (text_column("why"), lambda line: text_cell(line.verdict[2])),
        ]
    title = "measured and published" if benchmark else "rows of the paper's tables of comparison"
    return table_of(f"{data.name}, {world} world: {title}", columns, lines, _published_note(world, benchmark))


def _published_lines(here: Sequence[Measured], world: str, benchmark: str | None) -> list[PublishedLine]:
    quoted = claims.read_package_yaml("quoted.yaml")
    lines = []
    for line in claims.published_rows(world):
        if benchmark in line and line["method"] in quoted["entries"]:
            row = {**quoted["entries"][line["method"]]}
            row |= {"quoted": line["method"], "backbone": line["backbone"]}
            found = claims.runs_of(row, here, world)
            if line in quoted["backbones"]:
                found = [run for run in found if not claims.obstacle(run.settings(world), line["backbone"])]
            lines += [PublishedLine(row, run, world, str(benchmark)) for run in found]
    return lines


def _published_note(world: str, benchmark: str | None) -> str:
    note = "Sampled: by the published sweep of about 20 biases. Exact: by all biases; AUC is higher by up to 0.8 %."
    if benchmark:
        quoted = claims.read_package_yaml("quoted.yaml")
        note += (
            f" Published numbers are quoted from {quoted['source']}, and compared with sampled ones, if runs have "
            "them. Runs are found by kind and options, whatever their names. Numbers are compared if data and "
            f"encoder are the paper's. {NUMBER_NOTE}"
        )
    if world == "open":
        note += (
            " All have a feasibility threshold by words, chosen on validation images. It is that of the published "
            "protocol if the words are GloVe vectors of 300 numbers; otherwise, numbers are not comparable."
        )
    return note


def ablation_tables(results: Results, data: DatasetResults) -> list[tuple[str, Table | None]]:
    """Each table of `ablation_tables.yaml` with its title; None if its ablations were not run."""
    tables: list[tuple[str, Table | None]] = []
    candidates = measured_methods(results, data)
    for entry in claims.read_package_yaml("ablation_tables.yaml")["tables"]:
        lines = []
        for row in entry["rows"]:
            run = _ablation(candidates, row["run"]) or _part_of_score(candidates, row["run"])
            if run is not None:
                lines.append(AblationLine(row, run))
        was_run = any(line.run.file == results.ablations_file for line in lines)
        table = _ablation_table(entry, lines, data.name) if was_run and len(lines) > 1 else None
        tables.append((entry["title"], table))
    return tables


def _ablation(candidates: Sequence[Measured], names: Sequence[str]) -> Measured | None:
    for name in names:
        for each in candidates:
            if each.name == name and not each.part and "closed" in each.tree:
                return each
    return None


def _part_of_score(candidates: Sequence[Measured], names: Sequence[str]) -> Measured | None:
    """Score terms of a trained method that are those of a row which was not trained by itself."""
    rows = claims.read_package_yaml("claims.yaml")["rows"]
    for name in names:
        found = claims.runs_of(rows[name], candidates, "closed") if name in rows else []
        parts = [each for each in found if each.part]
        if parts:
            return parts[0]
    return None


@dataclass(frozen=True)
class AblationLine:
    """A row of an ablation table, and the run that it shows."""

    row: Tree
    run: Measured

    @cached_property
    def paper(self) -> Tree:
        """The row of the paper's tables, with its numbers."""
        known = claims.read_package_yaml("claims.yaml")["rows"]
        names = (self.row["paper"],) if "paper" in self.row else self.row["run"]
        return claims.paper_row(next(name for name in names if name in known))

    @property
    def verdict(self) -> str:
        return claims.number_verdict(self.run, self.paper, "closed", "auc")[0]

    def label(self, place: int) -> TableCell:
        return text_cell(self.row["cells"][place])

    def cell(self, dataset: str, table: str, metric: str) -> TableCell:
        stored = self.run.part if self.run.part and table == "closed" else table
        place = (self.run.file, dataset, self.run.name, stored)
        return SummaryLine("", self.run.tree.get(table, {}), place).cell(metric)

    def published(self, benchmark: str) -> TableCell:
        values = [claims.paper_value(self.paper, "closed", benchmark, metric) for metric in METRICS]
        shown = [MISSING if value is None else f"{value.mean:.1f}" for value in values]
        return text_cell(" / ".join(shown))

    def below(self, last: Measured) -> str:
        """Verdict on whether AUC is below that of the `last` row; empty if not defined."""
        above = last.value("closed", "auc")
        below = self.run.value("closed", "auc")
        if last is self.run or above is None or below is None:
            return ""
        if last.surroundings("closed") != self.run.surroundings("closed"):
            return NOT_COMPARABLE
        if self.run.lacks_training("closed") or last.lacks_training("closed"):
            return UNTRAINED
        return Gap.of((1.0, above), (-1.0, below)).order

    @property
    def untrained(self) -> str:
        count = self.run.untrained
        if count is None:
            return MISSING
        return f"{count} of {self.run.seeds} seeds" if count else ""

    @property
    def settings(self) -> str:
        settings = self.run.settings()
        if settings is None:
            return MISSING
        left_out = ("world", "encoder", "counts", "word_vectors")
        shown = {key: value for key, value in settings.items() if key not in left_out}
        return json.dumps(shown)[1:-1].replace('"', "")


def _ablation_table(entry: Tree, lines: Sequence[AblationLine], dataset: str) -> Table:
    last = lines[-1].run
    columns: list[ColumnOf[AblationLine]] = []
    for place, title in enumerate(entry["columns"]):
        columns.append((text_column(title), partial(AblationLine.label, place=place)))
    first = len(columns)
    for name, title in METRICS.items():
        cell = partial(AblationLine.cell, dataset=dataset, table="closed", metric=name)
        columns.append((Column(title, tip=TIPS[title]), cell))
    columns += [
        (text_column("below the last row", ORDER_TIP), lambda line: text_cell(line.below(last))),
        (text_column("paper's AUC", NUMBER_NOTE), lambda line: text_cell(line.verdict)),
    ]
    for benchmark in entry["paper"]:
        heading = text_column(f"paper, {benchmark}: S / U / HM / AUC")
        columns.append((heading, partial(AblationLine.published, benchmark=benchmark)))
    columns += [
        (Column("validation AUC"), lambda line: line.cell(dataset, "validation", "auc")),
        (text_column("untrained", UNTRAINED_TIP), lambda line: text_cell(line.untrained)),
        (text_column("settings"), lambda line: text_cell(line.settings)),
    ]
    caption = f"{entry['title']} ({entry['source']}): {dataset}, closed world"
    table = table_of(caption, columns, lines)
    rows = ranked(table.rows, range(first, first + len(METRICS)))
    return Table(caption, table.columns, rows, entry["caption"])


def _cost_ratio(found: claims.Judgement) -> float | None:
    if found.metric not in COST_FORMS or found.left is None or found.right is None:
        return None
    return found.left.mean / found.right.mean


def _difference_cell(found: claims.Judgement) -> TableCell:
    ratio = _cost_ratio(found)
    return _gap_cell(found.gap) if ratio is None else TableCell(f"× {ratio:.2f}", ratio)


SENTENCE_COLUMNS: list[ColumnOf[claims.Sentence]] = [
    (text_column("source"), lambda found: text_cell(found.source)),
    (text_column("statement"), lambda found: text_cell(found.text)),
    (text_column("metrics"), lambda found: text_cell(", ".join(found.metrics))),
    (text_column("verdict"), lambda found: text_cell(found.verdict)),
    (text_column("comparisons"), lambda found: text_cell(_counted(found.parts))),
]
COMPARISON_COLUMNS: list[ColumnOf[claims.Judgement]] = [
    (text_column("source"), lambda found: text_cell(found.source)),
    (text_column("statement"), lambda found: text_cell(found.text)),
    (text_column("rows"), lambda found: text_cell(found.rows)),
    (text_column("metric"), lambda found: text_cell(found.metric)),
    (text_column("verdict"), lambda found: text_cell(found.verdict)),
    (Column("left", tip=LEFT_TIP), lambda found: _value_cell(found.left, found.metric)),
    (Column("right", tip=RIGHT_TIP), lambda found: _value_cell(found.right, found.metric)),
    (text_column("difference"), _difference_cell),
    (
        text_column("95 %"),
        lambda found: _interval_cell(found.gap if _cost_ratio(found) is None else None),
    ),
    (text_column("paper"), lambda found: text_cell(found.paper)),
    (text_column("runs, or why not"), lambda found: text_cell(found.reason)),
]


def claims_tables(results: Results, data: DatasetResults) -> list[Table]:
    """Verdicts on the paper's claims for a data set: on sentences, and on each comparison."""
    sentences = claims.judge_all(results, data)
    caption = f"Claims of the paper on {data.name}: {_counted(sentences)}"
    table = table_of(caption, SENTENCE_COLUMNS, sentences, CLAIMS_NOTE)
    parts: list[claims.Judgement] = []
    for sentence in sentences:
        parts += sentence.parts
    comparisons = list(dict.fromkeys(parts))  # those made nowhere stand in several sentences
    caption = f"Comparisons of the claims on {data.name}"
    return [table, table_of(caption, COMPARISON_COLUMNS, comparisons, f"{COMPARISONS_NOTE} {NUMBER_NOTE}")]


def _counted(found: Sequence[claims.Sentence] | Sequence[claims.Judgement]) -> str:
    counts = Counter(each.verdict for each in found)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
