"""Build the project's report: a section per data set with tables, figures and examples; claims; and provenance.

Every number in a table cites its source: a JSON file and a pointer into it. `RUN_COLUMNS` are the columns of
`artifacts/runs.csv`, the table of all runs.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pandas as pd

from duplex.evaluation.metrics import METRICS, MISSING, OPEN_METRICS, PART_METRICS, TIPS, interval_of, interval_text
from duplex.labels import GROUPS, WORLDS
from duplex.report.aggregate import TERMS, Aggregate, DatasetResults, Results, RunRecord, Tree, at_threshold
from duplex.report.blocks import (
    Block,
    Column,
    Note,
    Report,
    ReportPart,
    ReportSection,
    Table,
    TableCell,
    TableRow,
    headings,
    json_pointer,
    number_cell,
    text_cell,
)
from duplex.report.claims import (
    CLIP,
    COSTS,
    NOT_COMPARABLE,
    VERDICTS,
    Gap,
    MeanWithError,
    Measured,
    backbone_of,
    benchmark_of,
    counts_of,
    judge_all,
    measured_methods,
    number_verdict,
    obstacle,
    paper_row,
    paper_value,
    published_rows,
    read_package_yaml,
    runs_of,
)
from duplex.report.figures import curve_figure, lambda_figures, slug, training_figures

NUMBERS = tuple(Column(title, tip=TIPS[title]) for title in METRICS.values())
RECIPE = "recipe_"  # prefix of the recipes in a run's metrics
COUNTS = ("compositions", "train_images", "train_percent", "test_images", "test_percent")  # of frequency groups
GRAPH = ("codebook without graph", "with graph", "gain")
PACKAGES = ("duplex-czsl", "torch", "open_clip_torch", "numpy", "h5py", "pillow", "dvc")
ENCODER = ("encoder", "architecture", "weights", "preprocessing", "precision", "dim", "manifest", "torch",
           "open_clip_torch")  # fmt: skip
RUN_COLUMNS = ("dataset", "method", "seed", "world", "options", "val_auc", "val_auc_all", "epoch", "auc", "hm", "seen",
               "unseen", "seconds")  # fmt: skip
TERMS_NOTE = (
    "Score terms of one trained method, evaluated without the others and weighted as in the whole score: semantic "
    "prototypes (semantic), visual prototypes (visual), states and objects by prompts (factors), pairs by closed-form "
    "prototypes (gaussian), states and objects by closed-form prototypes (gaussian_factors). A term of states or of "
    "objects alone is equal for several pairs, and ties count as wrong answers."
)
COST_FORMS = {"parameters": ("{:,.0f}", 1.0), "peak_bytes": ("{:,.0f} MB", 1e-6)}
COST_FORMS |= dict.fromkeys(("seconds_per_epoch", "test_seconds"), ("{:.2f} s", 1.0))
NUMBER_NOTE = (
    "A number is reproduced if it differs by at most a point and the 95 % interval of the difference over seeds, with "
    "the standard errors of both sides, contains 0; not reproduced if the interval excludes 0; undecided otherwise. A "
    "published number without an error counts as exact."
)
CLAIMS_NOTE = (
    "Statements of the paper, as comparisons of runs of this data set. Reproduced: the 95 % interval of the difference "
    "over seeds (Student's t, the standard errors of both sides) lies above 0; not reproduced: below 0; undecided: it "
    "contains 0, or there is none. The verdict holds for this data set and the encoder named in the last column, and "
    "for no other. Intervals are not corrected for the number of statements: of 40 about equal rows, two are decided "
    "by chance on average."
)
FEASIBILITY_NOTE = (
    "Unseen pairs with a feasibility below the threshold, which has the best validation AUC, are excluded; with "
    "evaluation.feasibility: auto only if the gain on unseen validation pairs without a part in the choice exceeds "
    "twice its standard error. Feasibility comes from word vectors, as in the published protocol. “Used” counts runs; "
    "the others use no threshold. Mean over seeds."
)
UNTRAINED_TIP = "seeds whose best epoch by validation AUC is 0: an untrained model"
NOT_RECORDED = "Validation AUC, best epochs, encoder and settings of these runs were not recorded."
ORDER_TIP = "whether AUC is below that of the last row, as in the paper"
RECIPE_NOTE = (
    "The chosen one is bold. Recipes with fine-tuned blocks are compared after two epochs; more blocks replace fewer "
    "ones if their AUC is higher at all. Only the best is trained to its end, and adopted if its validation AUC "
    "exceeds that of the best recipe without blocks by more than the standard error of the difference."
)


def value_at(tree: Any, keys: Sequence[str]) -> Any:
    """The value at `tree[keys[0]][keys[1]]...` of a nested mapping; None if a key is missing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def ranked(rows: Sequence[TableRow], places: Iterable[int]) -> list[TableRow]:
    """Copies of the rows, in which the two largest numbers of each column in `places` have ranks 1 and 2."""
    grid = [list(row.cells) for row in rows]
    for place in places:
        numbers = (line[place].value for line in grid)
        values = sorted({number for number in numbers if isinstance(number, int | float)}, reverse=True)
        for line in grid:
            value = line[place].value
            if isinstance(value, int | float) and value in values[:2] and len(values) > 1:
                line[place] = replace(line[place], rank=1 + values.index(value))
    return [TableRow(cells, row.quoted) for cells, row in zip(grid, rows, strict=True)]


def metric_cells(values: Tree, place: Sequence[str], names: Iterable[str] = METRICS) -> list[TableCell]:
    """One cell per metric in `names`, ± standard error over seeds; `place`: the file and keys where `values` are."""
    cells = []
    for name in names:
        value, error = values.get(name), values.get(f"{name}_se")
        if value is None:
            cells.append(TableCell(MISSING))
            continue
        spread = f"± {error:.1f}" if error is not None and values.get("seeds", 1) > 1 else ""
        ends = interval_of(values, name)
        tip = f"{value:.2f}" if ends is None else f"{value:.2f}; 95 % over images: {ends[0]:.1f} to {ends[1]:.1f}"
        cells.append(number_cell(value, source=json_pointer(*place, name), spread=spread, tip=tip))
    return cells


def run_cell(
    runs: Iterable[RunRecord], keys: Sequence[str], form: str, part: str = "metrics", scale: float = 1.0
) -> TableCell:
    return mean_cell([(run, keys) for run in runs], form, part, scale)


def mean_cell(
    places: Sequence[tuple[RunRecord, Sequence[str]]], form: str, part: str = "metrics", scale: float = 1.0
) -> TableCell:
    """Table cell that shows the mean of a number over those runs that recorded it, multiplied by `scale`.

    places: each run's record, and the keys under which the record's `part` has the number.
    """
    values = [(value_at(getattr(run, part), keys), run, keys) for run, keys in places]
    found = [one for one in values if isinstance(one[0], int | float) and math.isfinite(one[0])]
    if not found:
        return TableCell(MISSING)
    sources = " ".join(json_pointer(run.files[part], *keys) for _, run, keys in found)
    return number_cell(math.fsum(value for value, _, _ in found) / len(found) * scale, form, sources)


def result_table(results: Results, data: DatasetResults, world: str) -> Table | None:
    """Table of all methods' S, U, HM and AUC in one world, then published results; None if no method has results."""
    ours = {method: worlds[world] for method, worlds in data.summary.items() if world in worlds}
    if not ours:
        return None
    further = {**OPEN_METRICS, **PART_METRICS} if world == "open" else PART_METRICS
    rows = []
    for method, values in ours.items():
        place = (results.metrics_file, data.name, method, world)
        ends = interval_of(values)
        sources = " ".join(json_pointer(*place, f"auc_{end}") for end in ("low", "high"))
        interval = TableCell(MISSING) if ends is None else TableCell(interval_text(values), ends[0], sources)
        cells = [*metric_cells(values, place), interval, *metric_cells(values, place, further)]
        rows.append(TableRow([text_cell(method), *cells]))
    rows = ranked(rows, range(1, 1 + len(METRICS)))
    quoted = quoted_rows(data, world, 1 + len(further))
    seeds = max(int(values.get("seeds", 1)) for values in ours.values())
    over = f"{seeds} seed{'s' if seeds > 1 else ''}"
    note = f"Mean ± standard error over {over}, in percent. Bold: best, underlined: second."
    if quoted:
        note += " Rows marked “quoted” are published numbers, where no other source stands beside them from "
        note += f"{read_package_yaml('quoted.yaml')['source']}."
        note += " Their open world has a feasibility threshold by words." if world == "open" else ""
        encoders = {values["settings"]["encoder"] for values in data.summary.values() if "settings" in values}
        if others := sorted(encoder for encoder in encoders if backbone_of(encoder) != CLIP):
            note += f" The encoder here is {', '.join(others)}: not comparable with rows of {CLIP}."
    others = [Column(title, tip=TIPS[title]) for title in ("AUC 95 %", *further.values())]
    return Table(f"{data.name}, {world} world", [*headings("method"), *NUMBERS, *others], [*rows, *quoted], note)


def quoted_rows(data: DatasetResults, world: str, further: int) -> list[TableRow]:
    """Rows of published results if the data set is a benchmark; each row ends with `further` empty cells."""
    benchmark = benchmark_of(counts_of(data.statistics))
    rows = []
    for row in published_rows(world):
        if benchmark in row:
            errors = row.get("errors", {}).get(benchmark, [None] * 4)
            numbers = [
                number_cell(value, spread="" if error is None else f"± {error:.1f}")
                for value, error in zip(row[benchmark], errors, strict=True)
            ]
            source = f" from {row['source']}" if "source" in row else ""
            name = text_cell(f"{row['method']}, {row['backbone']} (quoted{source})")
            rows.append(TableRow([name, *numbers, *[TableCell(MISSING)] * further], quoted=True))
    return rows


def published_table(results: Results, data: DatasetResults, world: str) -> Table | None:
    """Table that compares measured with published S, U, HM and AUC; None if no method here has published results."""
    benchmark = benchmark_of(counts_of(data.statistics))
    entries = read_package_yaml("quoted.yaml")["entries"]
    candidates = [m for m in measured_methods(results, data) if m.file == results.metrics_file and world in m.tree]
    rows = []
    for line in published_rows(world):
        if benchmark in line and line["method"] in entries:
            row = {**entries[line["method"]], "quoted": line["method"], "backbone": line["backbone"]}
            found = runs_of(row, candidates, world)
            if line in read_package_yaml("quoted.yaml")["backbones"]:
                found = [each for each in found if not obstacle(each.settings(world), line["backbone"])]
            rows += [_published_line(row, each, world, str(benchmark)) for each in found]
    if not rows:
        return None
    header = headings("method", "encoder", "name here", texts=3)
    for title in METRICS.values():
        header += [Column(f"{title} published"), Column(f"{title} measured", tip=TIPS[title])]
    header += headings("AUC, difference", "95 %", "verdict on AUC", "why", texts=4)
    source = read_package_yaml("quoted.yaml")["source"]
    note = (
        f"Published numbers are quoted from {source}. Measured ones are of the same sweep if runs have it; "
        "exact ones have an AUC higher by up to 0.8 %. Runs are found by kind and options, whatever their names. "
        "Numbers are compared if data and encoder are the paper's. " + NUMBER_NOTE
    )
    if world == "open":
        note += " Both have a feasibility threshold by words, chosen on validation images: the published protocol."
    return Table(f"{data.name}, {world} world: measured and published", header, rows, note)


def _published_line(row: Tree, each: Measured, world: str, benchmark: str) -> TableRow:
    cells = [text_cell(row["quoted"]), text_cell(row["backbone"]), text_cell(each.name)]
    for metric in METRICS:
        published = paper_value(row, world, benchmark, metric)
        number = None if published is None else published.mean
        here = each.value(world, metric, sampled=True)
        cells += [number_cell(number, spread=_spread(published)), _value_cell(here, metric)]
    verdict, gap, reason = number_verdict(each, row, world, "auc")
    return TableRow([*cells, *_gap_cells(gap), text_cell(verdict), text_cell(reason)])


def _spread(value: MeanWithError | None) -> str:
    return f"± {value.error:.1f}" if value is not None and value.seeds > 1 and value.error is not None else ""


def _value_cell(value: MeanWithError | None, metric: str) -> TableCell:
    if value is None:
        return TableCell(MISSING)
    form, scale = COST_FORMS.get(metric, ("{:.1f}", 1.0))
    spread = "" if metric in COST_FORMS else _spread(value)
    return number_cell(scale * value.mean, form, value.source, spread=spread)


def _gap_cells(gap: Gap | None) -> list[TableCell]:
    if gap is None:
        return [TableCell(MISSING), TableCell(MISSING)]
    return [TableCell(f"{gap.value:+.1f}", gap.value), TableCell(gap.interval, gap.low)]


def feasibility_table(data: DatasetResults) -> Table | None:
    """Table of each method's threshold on feasibility (from word vectors) and its AUC; None if no method has one."""
    forms = {"threshold": "{:.3f}", "feasible": "{:,.0f}"}
    forms |= dict.fromkeys(("val_auc_all_feasible", "val_auc_at_threshold"), "{:.1f}")
    forms |= {"val_auc_gain": "{:+.2f}", "val_auc_gain_se": "{:.2f}", "auc": "{:.1f}"}
    rows = []
    for method, runs in data.runs.items():
        worlds = [(run, run.metrics["open"]) for run in runs.values() if "open" in run.metrics]
        if not worlds or not all(at_threshold(world) for _, world in worlds):
            continue
        places = [("open",) if "threshold" in world else ("open", "words") for _, world in worlds]
        cited = [(run, place) for (run, _), place in zip(worlds, places, strict=True)]
        numbers = [mean_cell([(run, (*keys, key)) for run, keys in cited], form) for key, form in forms.items()]
        used = f"{places.count(('open',))} of {len(places)}"
        rows.append(TableRow([text_cell(method), text_cell(used), *numbers]))
    if not rows:
        return None
    titles = ("threshold", "feasible pairs", "val AUC, all feasible", "val AUC, at threshold", "gain on pairs left out")
    header = headings("method", "used", *titles, "standard error", "test AUC", texts=2)
    return Table(f"Feasibility in the open world: {data.name}", header, rows, FEASIBILITY_NOTE)


def ablation_tables(results: Results, data: DatasetResults) -> list[tuple[str, Table | None]]:
    """The tables in `ablation_tables.yaml`, each with its title; a table is None if its ablations were not run."""
    tables: list[tuple[str, Table | None]] = []
    candidates = measured_methods(results, data)
    for entry in read_package_yaml("ablation_tables.yaml")["tables"]:
        lines = [(row, found) for row in entry["rows"] if (found := _ablation(candidates, row["run"])) is not None]
        was_run = len(lines) > 1 and any(found.file == results.ablations_file for _, found in lines)
        tables.append((entry["title"], _ablation_table(entry, lines, data.name) if was_run else None))
    return tables


def _ablation(candidates: Sequence[Measured], names: str | list[str]) -> Measured | None:
    listed = [names] if isinstance(names, str) else names
    return next((each for name in listed for each in candidates if each.name == name and "closed" in each.tree), None)


def _ablation_table(entry: Tree, lines: Sequence[tuple[Tree, Measured]], dataset: str) -> Table:
    """Table with S, U, HM and AUC, two verdicts, the paper's numbers and, if recorded, validation AUC and settings."""
    texts = entry["columns"]
    whole = lines[-1][1]
    is_recorded = any(each.settings() or "validation" in each.tree for _, each in lines)
    rows = []
    for row, each in lines:
        names = [row["run"]] if isinstance(row["run"], str) else row["run"]
        known = paper_row(next(name for name in names if name in read_package_yaml("claims.yaml")["rows"]))
        place = (each.file, dataset, each.name)
        cells = [*map(text_cell, row["cells"]), *metric_cells(each.tree["closed"], (*place, "closed"))]
        cells += [text_cell(_order_text(whole, each)), text_cell(number_verdict(each, known, "closed", "auc")[0])]
        for benchmark in entry["paper"]:
            values = [paper_value(known, "closed", benchmark, metric) for metric in METRICS]
            cells.append(text_cell(" / ".join(MISSING if value is None else f"{value.mean:.1f}" for value in values)))
        if is_recorded:
            cells += metric_cells(each.tree.get("validation", {}), (*place, "validation"), ("auc",))
            cells += [text_cell(_untrained(each)), text_cell(_settings_text(each))]
        rows.append(TableRow(cells))
    rows = ranked(rows, range(len(texts), len(texts) + len(METRICS)))
    more = [Column("below the last row", False, ORDER_TIP), Column("paper's AUC", False, NUMBER_NOTE)]
    more += [Column(f"paper, {name}: S / U / HM / AUC", False) for name in entry["paper"]]
    if is_recorded:
        more += [Column("validation AUC"), Column("untrained", False, UNTRAINED_TIP), Column("settings", False)]
    caption = f"{entry['title']} ({entry['source']}): {dataset}, closed world"
    note = entry["caption"] if is_recorded else f"{entry['caption']} {NOT_RECORDED}"
    return Table(caption, [*headings(*texts, texts=len(texts)), *NUMBERS, *more], rows, note)


def _untrained(each: Measured) -> str:
    if each.untrained is None:
        return MISSING
    return f"{each.untrained} of {each.seeds} seeds" if each.untrained else ""


def _settings_text(each: Measured) -> str:
    settings = each.settings()
    if settings is None:
        return MISSING
    shown = {key: value for key, value in settings.items() if key not in ("world", "encoder", "counts")}
    return json.dumps(shown)[1:-1].replace('"', "")


def _order_text(whole: Measured, each: Measured) -> str:
    above, below = whole.value("closed", "auc"), each.value("closed", "auc")
    if whole is each or above is None or below is None:
        return ""
    if whole.surroundings("closed") != each.surroundings("closed"):
        return NOT_COMPARABLE
    return Gap.of((1.0, above), (-1.0, below)).order


def claims_table(results: Results, data: DatasetResults) -> Table:
    """Table of the verdicts on the paper's claims for a data set, a row per claim and metric."""
    rows = []
    judgements = judge_all(results, data)
    for found in judgements:
        metric = next((key for key, title in {**METRICS, **COSTS}.items() if title == found.metric), "")
        texts = [text_cell(text) for text in (found.source, found.text, found.metric, found.verdict)]
        texts[1] = replace(texts[1], tip=found.rows)
        numbers = [_value_cell(found.left, metric), _value_cell(found.right, metric)]
        gap = _gap_cells(found.gap)
        if metric in COSTS and found.left is not None and found.right is not None:
            ratio = found.left.mean / found.right.mean
            gap = [TableCell(f"× {ratio:.2f}", ratio), TableCell(MISSING)]
        rows.append(TableRow([*texts, *numbers, *gap, text_cell(found.paper), text_cell(found.reason)]))
    header = headings("source", "statement", "metric", "verdict", texts=4)
    header += [Column("left", tip="what is to be higher or small"), Column("right", tip="what it is compared with")]
    header += headings("difference", "95 %", "paper", "runs, or why not", texts=4)
    counts = Counter(found.verdict for found in judgements)
    shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return Table(f"Claims of the paper on {data.name}: {shown}", header, rows, f"{CLAIMS_NOTE} {NUMBER_NOTE}")


def term_tables(results: Results, data: DatasetResults) -> list[Block]:
    """For each method with several score terms, a table of metrics by single terms and by sums of terms."""
    tables: list[Block] = []
    for method, summary in data.summary.items():
        sums = {name.removeprefix(TERMS).replace("+", " + "): name for name in summary if name.startswith(TERMS)}
        if not sums:
            continue
        rows = []
        for title, name in {**sums, "all score terms": "closed"}.items():
            place = (results.metrics_file, data.name, method, name)
            rows.append(TableRow([text_cell(title), *metric_cells(summary[name], place)]))
        caption = f"Score terms: {method}, {data.name}, closed world"
        rows = ranked(rows, range(1, 1 + len(METRICS)))
        tables.append(Table(caption, [*headings("score terms"), *NUMBERS], rows))
    return [Note(TERMS_NOTE), *tables] if tables else []


def frequency_table(data: DatasetResults) -> Table | Note:
    """Table of each method's accuracy on head, medium, tail and unseen pairs, with a bias of 0 on unseen pairs."""
    every = {method: [run for run in runs.values() if run.metrics.get("groups")] for method, runs in data.runs.items()}
    methods = {method: runs for method, runs in every.items() if runs}
    if not methods:
        return Note("No run has metrics by frequency group, which need the closed world.", "dvc repro")
    first = next(iter(methods.values()))[0]
    rows = []
    for group in first.metrics["groups"]:
        counts = [
            run_cell([first], ("groups", group, key), "{:.1f}" if key.endswith("percent") else "{:,.0f}")
            for key in COUNTS
        ]
        accuracies = [run_cell(runs, ("groups", group, "accuracy"), "{:.1f}") for runs in methods.values()]
        rows.append(TableRow([text_cell(group), *counts, *accuracies]))
    note = (
        "Pairs by number of training images: head is the top 20 %, medium the next 30 %, tail the rest; unseen pairs "
        "have none. Accuracy without bias, closed world, percent, mean over seeds."
    )
    titles = [key.replace("_percent", " %").replace("_", " ") for key in COUNTS]
    return Table(f"Accuracy by training frequency: {data.name}", headings("group", *titles, *methods), rows, note)


def frequency_at_ends_table(results: Results, data: DatasetResults) -> Table | None:
    """Table of accuracies by frequency group at the ends of the seen–unseen curve, without and with the local graph."""
    runs = [run for seeds in data.runs.values() for run in seeds.values()]
    rows = []
    for group in ("head", "medium", "tail", "seen", "unseen"):  # rows of the appendix
        place = ("closed", "seen") if group == "seen" else ("groups_at_ends", group)
        counted = ("closed", "images_seen") if group == "seen" else ("groups", group, "test_images")
        images = [run_cell([run], counted, "{:,.0f}") for run in runs]
        if cells := _graph_cells(results, data, *place):
            count = next((cell for cell in images if cell.source), TableCell(MISSING))
            rows.append(TableRow([text_cell(group), count, *cells]))
    if not any(row.cells[0].text in GROUPS for row in rows):
        return None
    note = (
        "Accuracy at the ends of the curve: head, medium, tail and all seen pairs when unseen pairs are excluded (so "
        "that seen is S), unseen pairs when seen pairs are excluded (U). Closed world, percent, mean over seeds."
    )
    caption = f"Training frequency and the graph at the curve's ends: {data.name}"
    return Table(caption, headings("group", "test images", *GRAPH), rows, note)


def _graph_cells(results: Results, data: DatasetResults, *place: str) -> list[TableCell]:
    pair = read_package_yaml("ablation_tables.yaml")["frequency"]  # rows that differ in the graph only
    names = (pair["without"], pair["with"])
    values = [value_at(data.ablations, (name, *place)) for name in names]
    if None in values:
        return []
    sources = [json_pointer(results.ablations_file, data.name, name, *place) for name in names]
    cells = [number_cell(value, source=source) for value, source in zip(values, sources, strict=True)]
    return [*cells, number_cell(values[1] - values[0], "{:+.1f}", " ".join(sources))]


def efficiency_table(results: Results, data: DatasetResults) -> Table:
    """Table of each method's costs (parameters, memory, seconds per epoch and for the test), with its HM and AUC."""
    rows = []
    for method, runs in data.runs.items():
        seeds = list(runs.values())
        shown = data.shown_as.get(method, method) if any("closed" in run.metrics for run in seeds) else ""
        closed = data.summary.get(shown, {}).get("closed", {})
        place = (results.metrics_file, data.name, shown, "closed")
        counts = ("parameters", "finetuned_blocks", "codebook_rows", "codebook_values")
        cells = [
            *(run_cell(seeds, (name,), "{:,.0f}", "timing") for name in counts),
            run_cell(seeds, ("peak_bytes",), "{:,.0f} MB", "timing", 1e-6),
            run_cell(seeds, ("seconds_per_epoch",), "{:.2f} s", "timing"),
            run_cell(seeds, ("test_seconds",), "{:.2f} s", "evaluation_timing"),
        ]
        rows.append(TableRow([text_cell(method), *cells, *metric_cells(closed, place, ("hm", "auc"))]))
    sizes = ("trained parameters", "fine-tuned blocks", "prototypes", "codebook values")
    titles = (*sizes, "peak memory", "epoch", "test split")
    note = (
        "Mean over seeds. A codebook that gradients train is among the trained parameters; the values of one that only "
        "refinement changes are listed apart. Memory is the peak of the process in training. Times depend on the "
        "machine; they include the fine-tuned blocks of the encoder, but not its frozen ones."
    )
    return Table(f"Cost and result: {data.name}, closed world", headings("method", *titles, "HM", "AUC"), rows, note)


def statistics_table(data: DatasetResults) -> Table | Note:
    """Table of a data set's counts (states, objects, pairs, images, unreadable images) and the size of its cache."""
    if data.statistics is None:
        return Note("The data set has no statistics.", f"dvc repro prepare@{data.name}")
    places: dict[str, tuple[str, ...]] = {"states": ("states",), "objects": ("objects",)}
    places |= {"train pairs": ("train", "seen"), "train images": ("train", "images")}
    counts = {"seen pairs": "seen", "unseen pairs": "unseen", "images": "images"}
    places |= {f"{split} {title}": (split, key) for split in ("val", "test") for title, key in counts.items()}
    cells = {}
    for title, keys in places.items():
        source = json_pointer(data.statistics_file, *keys)
        cells[title] = number_cell(value_at(data.statistics, keys), "{:,.0f}", source)
    if data.extraction is not None:
        size, bad = data.extraction.get("bytes"), data.extraction.get("bad")
        megabytes = None if size is None else 1e-6 * size
        cells["feature cache"] = number_cell(megabytes, "{:,.1f} MB", json_pointer(data.extraction_file, "bytes"))
        cells["unreadable images"] = number_cell(bad, "{:,.0f}", json_pointer(data.extraction_file, "bad"))
    rows = [TableRow([text_cell(title), cell]) for title, cell in cells.items()]
    return Table(f"Counts: {data.name}", headings("item", "count"), rows)


def auto_finetune_tables(data: DatasetResults) -> list[Table]:
    """For each run with `finetune: auto`, a table of the recipes (numbers of fine-tuned blocks) that it compared."""
    tables = []
    for method, runs in data.runs.items():
        for seed, run in runs.items():
            keys = [key for key in run.metrics if key.startswith(RECIPE)]
            keys.sort(key=lambda key: int(key.removeprefix(RECIPE)))
            recipes = [{**run.metrics[key], "recipe": f"{run.metrics[key]['blocks']:.0f}"} for key in keys]
            if recipes:
                sources = [json_pointer(run.files["metrics"], key) for key in keys]
                caption = f"Fine-tuned blocks of {method}, seed {seed}"
                tables.append(recipe_table(caption, recipes, "blocks", sources))
    return tables


def recipe_table(
    caption: str, recipes: Sequence[Mapping[str, Any]], heading: str, sources: Sequence[str] = ()
) -> Table:
    """Table of training recipes that were compared on validation images.

    Args:
        heading: title of the column with the recipes' names.
        recipes: mappings with `recipe` (a name), validation `auc`, `chosen`, `epoch` and further results.
        sources: pointers to the recipes in a JSON file, which cells cite.
    """
    forms = {"rate": "{:g}", "epochs": "{:.0f}", "auc": "{:.1f}", "error": "{:.1f}", "gain": "{:+.1f}"}
    forms |= {"gain_error": "{:.1f}", "accuracy": "{:.1f}", "epoch": "{:.0f}"}
    titles = {"rate": "learning rate", "epochs": "epochs", "auc": "validation AUC", "error": "standard error"}
    titles |= {"gain": "gain over the best before", "gain_error": "its error"}
    titles |= {"accuracy": "accuracy, %", "epoch": "best epoch"}
    shown = [name for name in forms if any(recipe.get(name) is not None for recipe in recipes)]
    rows = []
    for recipe, source in zip(recipes, sources or [""] * len(recipes), strict=True):
        name = TableCell(recipe["recipe"], recipe["recipe"], rank=1 if recipe.get("chosen") else 0)
        cells = [number_cell(recipe.get(key), forms[key], source and f"{source}/{key}") for key in shown]
        rows.append(TableRow([name, *cells]))
    return Table(caption, headings(heading, *(titles[name] for name in shown)), rows, RECIPE_NOTE)


def run_table(results: Results, options: Mapping[tuple[str, str], Mapping[str, Any]]) -> pd.DataFrame:
    """Table with one line of metrics per run and world; `options` maps (data set, method) to the column `options`."""
    lines = []
    for data in results.datasets:
        for method, runs in data.runs.items():
            changed = json.dumps(options.get((data.name, method), {}))
            for seed, run in runs.items():
                for world in WORLDS:
                    if world in run.metrics:
                        place = {"dataset": data.name, "method": method, "seed": seed, "world": world}
                        numbers = {**run.metrics, **run.metrics[world]}
                        lines.append({**numbers, **place, "options": changed, "seconds": run.seconds})
    return pd.DataFrame(lines, columns=list(RUN_COLUMNS))


def metrics_as_text(table: Aggregate) -> list[list[str]]:
    """Metrics averaged over seeds, as rows of text: a header, then one row per data set, world and method.

    `all pairs`: open-world AUC, all pairs feasible. `by words`: AUC at the threshold by word vectors, as published.
    """
    extra = {"all pairs": "auc_all", "by words": "auc_by_words"}
    rows = [["data set", "world", "method", *METRICS.values(), "AUC 95 %", *extra]]
    for dataset, methods in table.items():
        worlds = [world for world in WORLDS if any(world in summaries for summaries in methods.values())]
        for world in worlds:
            for method, summaries in methods.items():
                summary = summaries.get(world, {})
                main = [_with_error(summary, name) for name in METRICS]
                more = [_with_error(summary, name) for name in extra.values()]
                rows.append([dataset, world, method, *main, interval_text(summary), *more])
    return rows


def _with_error(summary: Mapping[str, float], name: str) -> str:
    if name not in summary:
        return MISSING
    error = f"{summary[f'{name}_se']:.1f}" if summary.get("seeds", 1) > 1 else MISSING
    return f"{summary[name]:.1f} ± {error}"


def build_report(results: Results, image_parts: Mapping[str, Sequence[ReportPart]] | None = None) -> Report:
    """Build the report of all data sets; `image_parts` maps a data set to parts that show images or need a method."""
    sections = [dataset_section(results, data, (image_parts or {}).get(data.name, ())) for data in results.datasets]
    claims = [ReportPart(data.name, [claims_table(results, data)]) for data in results.datasets if data.summary]
    if claims:
        sections.append(ReportSection("claims", "Claims of the paper", claims))
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
    """The parts with data, then a part `Not shown` that collects the notes of parts without data."""
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
        *(result_table(results, data, world) for world in WORLDS),
        *(published_table(results, data, world) for world in WORLDS),
        feasibility_table(data),
    ]
    blocks: list[Block] = [table for table in candidates if table]
    if blocks and (missing := results.not_evaluated.get(data.name)):
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
    notes = [Note(f"Not run for this data set: {', '.join(missing)}.", spec["command"])] if missing else []
    return [*finished, *term_tables(results, data), *notes, *curves]


def provenance_part(results: Results) -> ReportPart:
    common = [("git revision", _revision()), ("seeds", ", ".join(map(str, results.seeds)))]
    common.append(("python", platform.python_version()))
    common += [(package, package_version(package)) for package in PACKAGES]
    blocks = [_pairs("This run", common)]
    for data in results.datasets:
        identity = [(key, data.identity[key]) for key in ENCODER if key in data.identity]
        blocks.append(_pairs(f"Features of {data.name}", identity or [("encoder", MISSING)]))
    return ReportPart("Where the numbers come from", blocks)


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


def _pairs(caption: str, rows: list[tuple[str, str]]) -> Table:
    lines = [TableRow([text_cell(name), text_cell(value)]) for name, value in rows]
    return Table(caption, headings("item", "value", texts=2), lines)
