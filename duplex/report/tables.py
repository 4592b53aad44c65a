"""The report's tables. Every number is a cell that names the file and the place in it where it was read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ruamel.yaml import YAML

from duplex.report.blocks import MISSING, Cell, Column, Note, Row, Table
from duplex.report.numbers import JUDGES, Tree
from duplex.report.results import DatasetResults, Results, Run

METRICS = (("seen", "S"), ("unseen", "U"), ("hm", "HM"), ("auc", "AUC"))
PARTS = (("hm_at_val_bias", "HM, chosen bias"), ("state_accuracy", "state"), ("object_accuracy", "object"))
TIPS = {
    "S": "accuracy on images of seen pairs when unseen pairs are ruled out",
    "U": "accuracy on images of unseen pairs when seen pairs are ruled out",
    "HM": "best harmonic mean of seen and unseen accuracy over all biases",
    "AUC": "area under the seen–unseen curve",
    "AUC 95 %": "interval over test images, mean of the seeds' intervals",
    "HM, chosen bias": "harmonic mean at the bias that validation chose: what a user gets",
    "state": "accuracy of the predicted state, no bias",
    "object": "accuracy of the predicted object, no bias",
}
NUMBERS = tuple(Column(title, tip=TIPS[title]) for _, title in METRICS)


def pointer(file: str, *keys: object) -> str:
    """`file#/a/b`, a JSON pointer; `/` and `~` in a key are escaped as RFC 6901 says."""
    return file + "#" + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


@lru_cache
def data_file(name: str) -> Tree:
    """One of the package's own tables: quoted.yaml, tables.yaml."""
    text = files("duplex.report").joinpath(name).read_text(encoding="utf-8")
    return dict(YAML(typ="safe", pure=True).load(text))


# -- results ----------------------------------------------------------------------------------------------------------


def result_table(results: Results, data: DatasetResults, world: str) -> Table | None:
    """S, U, HM, AUC of every method in one world; the papers' own rows below where the data set is their benchmark."""
    ours = {method: found[world] for method, found in data.summary.items() if world in found}
    if not ours:
        return None
    rows = []
    for method, values in ours.items():
        place = (data.name, method, world)
        cells = [metric_cell(results.metrics_file, values, place, name) for name, _ in METRICS]
        interval = _interval_cell(results.metrics_file, values, place)
        parts = [metric_cell(results.metrics_file, values, place, name) for name, _ in PARTS]
        rows.append(Row([Cell(method, method), *cells, interval, *parts]))
    rows = ranked(rows, range(1, 1 + len(METRICS)))
    quoted = quoted_rows(data, world)
    seeds = max(int(values.get("seeds", 1)) for values in ours.values())
    over = f"{seeds} seed{'s' if seeds > 1 else ''}"
    note = f"Mean ± standard error over {over}, in percent. Bold: best, underlined: second."
    if quoted:
        note += (
            f" Rows marked “quoted” are copied from {data_file('quoted.yaml')['source']}; nothing here measured them."
        )
    header = [
        Column("method", numeric=False),
        *NUMBERS,
        Column("AUC 95 %", tip=TIPS["AUC 95 %"]),
        *(Column(title, tip=TIPS[title]) for _, title in PARTS),
    ]
    return Table(f"{data.name}, {world} world", header, [*rows, *quoted], note)


def quoted_rows(data: DatasetResults, world: str) -> list[Row]:
    """Published rows, where name, states, objects and training pairs are those of the benchmark."""
    table, benchmark = data_file("quoted.yaml"), benchmark_of(data)
    if benchmark is None:
        return []
    rows = []
    for row in [*table.get(world, ()), *(table["backbones"] if world == "closed" else ())]:
        if benchmark in row:
            errors = row.get("errors", {}).get(benchmark, [None] * 4)
            numbers = [
                Cell(f"{value:.1f}", value, spread="" if error is None else f"± {error:.1f}")
                for value, error in zip(row[benchmark], errors, strict=True)
            ]
            name = Cell(f"{row['method']} (quoted)", row["method"], tip=f"published row, {row['backbone']}")
            rows.append(Row([name, *numbers, *[Cell(MISSING)] * (1 + len(PARTS))], quoted=True))
    return rows


def benchmark_of(data: DatasetResults) -> str | None:
    """The published benchmark that a data set is, by its name and its counts."""
    known = data_file("quoted.yaml")["benchmarks"]
    name = next((name for name in known if plain(name) == plain(data.name)), None)
    return name if name is not None and _is_benchmark(data.statistics, known[name]) else None


def plain(name: str) -> str:
    """A name without case and punctuation."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _is_benchmark(statistics: Tree | None, expected: Mapping[str, int]) -> bool:
    if statistics is None:
        return False
    found = {key: statistics.get(key) for key in ("states", "objects")}
    return {**found, "train_pairs": statistics.get("train", {}).get("seen")} == dict(expected)


def feasibility_table(data: DatasetResults) -> Table | None:
    """What the open world rules out by each judge of feasibility, and what validation and test data said about it."""
    keys = ("threshold", "feasible", "val_auc_all_feasible", "val_auc_at_threshold", "auc")
    forms = ("{:.3f}", "{:,.0f}", "{:.1f}", "{:.1f}", "{:.1f}")
    rows = []
    for method, runs in data.runs.items():
        for judge, place in _judges([run.metrics.get("open", {}) for run in runs.values()]):
            numbers = (_run_cell(list(runs.values()), (*place, k), f) for k, f in zip(keys, forms, strict=True))
            rows.append(Row([Cell(method, method), Cell(judge, judge), *numbers]))
    if not rows:
        return None
    titles = ("threshold", "feasible pairs", "val AUC, all feasible", "val AUC, at threshold", "test AUC")
    note = (
        "Unseen pairs below the threshold are ruled out; it is chosen by validation AUC. Words say how feasible a pair "
        "is, or a method's own likelihood; the first line of a method is the one that decides. Mean over seeds."
    )
    header = [Column("method", numeric=False), Column("by", numeric=False), *(Column(title) for title in titles)]
    return Table(f"Feasibility in the open world: {data.name}", header, rows, note)


def _judges(worlds: Sequence[Tree]) -> list[tuple[str, tuple[str, ...]]]:
    """Who judged, and where the numbers stand in a run's metrics: what decided first."""
    found = []
    if any("threshold" in world for world in worlds):
        found.append((JUDGES[any("by_likelihood" in world for world in worlds)], ("open",)))
    return found + [(judge, ("open", judge)) for judge in JUDGES if any(judge in world for world in worlds)]


# -- ablations --------------------------------------------------------------------------------------------------------


def ablation_tables(results: Results, data: DatasetResults) -> list[tuple[str, Table | Note]]:
    """Each ablation table of `tables.yaml`, or a note that names the command where none of its own runs exists."""
    spec = data_file("tables.yaml")
    found: list[tuple[str, Table | Note]] = []
    for entry in spec["tables"]:
        lines = [(row, *_ablation(results, data, row["run"])) for row in entry["rows"]]
        if sum(bool(values) for _, values, *_ in lines) < 2 or not any(
            f == results.ablations_file for *_, f, _ in lines
        ):
            found.append(
                (entry["title"], Note(f"{entry['caption']} These ablations have not been run.", spec["command"]))
            )
            continue
        rows = []
        for row, values, file, name in lines:
            if values:
                place = (data.name, name, "closed")
                numbers = [metric_cell(file, values, place, name) for name, _ in METRICS]
                rows.append(Row([*(Cell(text, text) for text in row["cells"]), *numbers]))
        first = len(entry["columns"])
        header = [*(Column(title, numeric=False) for title in entry["columns"]), *NUMBERS]
        table = Table(f"{entry['title']}: {data.name}, closed world", header, ranked(rows, range(first, first + 4)))
        found.append((entry["title"], replace(table, note=entry["caption"])))
    return found


def _ablation(results: Results, data: DatasetResults, names: str | list[str]) -> tuple[Tree | None, str, str]:
    """Closed-world numbers of the first of some rows that was run, the file they are from and the row's name."""
    for name in [names] if isinstance(names, str) else names:
        for table, file in ((data.ablations, results.ablations_file), (data.summary, results.metrics_file)):
            if "closed" in table.get(name, {}):
                return table[name]["closed"], file, name
    return None, "", ""


COUNTS = {
    "compositions": "{:,.0f}",
    "train_images": "{:,.0f}",
    "train_percent": "{:.1f}",
    "test_images": "{:,.0f}",
    "test_percent": "{:.1f}",
}

# -- frequency, efficiency, data --------------------------------------------------------------------------------------


def group_table(data: DatasetResults) -> Table | Note:
    """Accuracy without bias by how often a pair was trained on, for every method."""
    methods = {m: runs for m, runs in data.runs.items() if runs and all(r.metrics.get("groups") for r in runs.values())}
    if not methods:
        metrics = [run.metrics for runs in data.runs.values() for run in runs.values()]
        if any("open" in one and "closed" not in one for one in metrics):
            return Note("Frequency groups are the closed world's, which evaluation.worlds in params.yaml leaves out.")
        return Note("No run has metrics by frequency group.", "dvc repro")
    first = next(iter(next(iter(methods.values())).values()))
    rows = []
    for group in first.metrics["groups"]:
        counts = [_run_cell([first], ("groups", group, key), form) for key, form in COUNTS.items()]
        accuracies = [
            _run_cell(list(runs.values()), ("groups", group, "accuracy"), "{:.1f}") for runs in methods.values()
        ]
        rows.append(Row([Cell(group, group), *counts, *accuracies]))
    note = (
        "Pairs by number of training images: head is the top 20 %, medium the next 30 %, tail the rest; unseen pairs "
        "have none. Accuracy at no bias, closed world, percent, mean over seeds."
    )
    titles = [key.replace("_percent", " %").replace("_", " ") for key in COUNTS]
    header = [Column("group", numeric=False), *(Column(title) for title in (*titles, *methods))]
    return Table(f"Accuracy by training frequency: {data.name}", header, rows, note)


def efficiency_table(results: Results, data: DatasetResults) -> Table:
    """Parameters, memory, seconds an epoch and for the test split, beside what they buy."""
    rows = []
    for method, runs in data.runs.items():
        every = list(runs.values())
        closed = data.summary.get(method, {}).get("closed", {})
        place = (data.name, method, "closed")
        rows.append(
            Row(
                [
                    Cell(method, method),
                    _run_cell(every, ("parameters",), "{:,.0f}", "timing"),
                    _run_cell(every, ("tail_blocks",), "{:,.0f}", "timing"),
                    _run_cell(every, ("codebook_rows",), "{:,.0f}", "timing"),
                    _run_cell(every, ("peak_bytes",), "{:,.0f} MB", "timing", 1e-6),
                    _run_cell(every, ("seconds_per_epoch",), "{:.2f} s", "timing"),
                    _run_cell(every, ("test_seconds",), "{:.2f} s", "evaluation_timing"),
                    metric_cell(results.metrics_file, closed, place, "hm"),
                    metric_cell(results.metrics_file, closed, place, "auc"),
                ]
            )
        )
    titles = ("trained parameters", "tail blocks", "codebook rows", "peak memory", "epoch", "test split", "HM", "AUC")
    note = (
        "Mean over seeds. Memory is the most that the process held in training. Times depend on the machine; those of "
        "the frozen encoder are not in them, those of the tail blocks, its last ones, are, where something in them is "
        "trained."
    )
    header = [Column("method", numeric=False), *(Column(title) for title in titles)]
    return Table(f"Cost and result: {data.name}, closed world", header, rows, note)


def statistics_table(data: DatasetResults) -> Table | Note:
    """The data set's counts, as papers print them."""
    stats = data.statistics
    if stats is None:
        return Note("The data set has no statistics yet.", f"dvc repro prepare@{data.name}")
    places: list[tuple[str, ...]] = [("states",), ("objects",)]
    places += [("train", "seen"), ("train", "images")]
    places += [(split, key) for split in ("val", "test") for key in ("seen", "unseen", "images")]
    cells = [_tree_cell(stats, data.statistics_file, place, "{:,.0f}") for place in places]
    titles = ["states", "objects", "train pairs", "train images"]
    titles += [f"{split} {what}" for split in ("val", "test") for what in ("seen pairs", "unseen pairs", "images")]
    if data.extraction is not None:
        titles += ["feature cache", "unreadable pictures"]
        cells.append(_tree_cell(data.extraction, data.extraction_file, ("bytes",), "{:,.1f} MB", 1e-6))
        cells.append(_tree_cell(data.extraction, data.extraction_file, ("bad",), "{:,.0f}"))
    rows = [Row([Cell(title, title), cell]) for title, cell in zip(titles, cells, strict=True)]
    return Table(f"Counts: {data.name}", [Column("of", numeric=False), Column("count")], rows)


# -- cells ------------------------------------------------------------------------------------------------------------


def ranked(rows: Sequence[Row], columns: Iterable[int]) -> list[Row]:
    """Mark the best and the second-best number of each column; equal numbers share their mark."""
    grid = [list(row.cells) for row in rows]
    for column in columns:
        numbers = (line[column].value for line in grid)
        values = sorted({number for number in numbers if isinstance(number, int | float)}, reverse=True)
        for line in grid:
            value = line[column].value
            if isinstance(value, int | float) and value in values[:2] and len(values) > 1:
                line[column] = replace(line[column], rank=1 + values.index(value))
    return [Row(cells, row.quoted) for cells, row in zip(grid, rows, strict=True)]


def metric_cell(file: str, values: Tree, place: Sequence[str], name: str) -> Cell:
    value, error = values.get(name), values.get(f"{name}_se")
    if value is None:
        return Cell(MISSING)
    spread = f"± {error:.1f}" if error is not None and values.get("seeds", 1) > 1 else ""
    ends = [values.get(f"{name}_{end}") for end in ("low", "high")]
    tip = f"{value:.2f}; 95 % over images: {ends[0]:.1f} to {ends[1]:.1f}" if None not in ends else f"{value:.2f}"
    return Cell(f"{value:.1f}", value, pointer(file, *place, name), spread=spread, tip=tip)


def _interval_cell(file: str, values: Tree, place: Sequence[str]) -> Cell:
    low, high = values.get("auc_low"), values.get("auc_high")
    if low is None or high is None:
        return Cell(MISSING)
    ends = " ".join(pointer(file, *place, f"auc_{end}") for end in ("low", "high"))
    return Cell(f"{low:.1f}–{high:.1f}", low, ends)


def _run_cell(runs: Sequence[Run], keys: Sequence[str], form: str, part: str = "metrics", scale: float = 1.0) -> Cell:
    """The mean over runs of a number in one of their files; it cites them all."""
    values = [_reach(getattr(run, part), keys) for run in runs]
    numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not runs or len(numbers) < len(runs):
        return Cell(MISSING)
    average = math.fsum(numbers) / len(numbers) * scale
    return Cell(form.format(average), average, " ".join(pointer(run.files[part], *keys) for run in runs))


def _tree_cell(tree: Tree, file: str, keys: Sequence[str], form: str, scale: float = 1) -> Cell:
    value = _reach(tree, keys)
    if value is None:
        return Cell(MISSING)
    return Cell(form.format(scale * value), scale * value, pointer(file, *keys))


def _reach(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
