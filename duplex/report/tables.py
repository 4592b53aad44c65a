"""Build the tables of the report: results, feasibility, ablations, score terms, costs, counts of the data.

Score terms are the summands of a method's score.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files

from ruamel.yaml import YAML

from duplex.report.aggregate import SOURCES, TERMS, Tree, at_threshold, used_source
from duplex.report.blocks import MISSING, Block, Column, Note, Table, TableCell, TableRow, columns, text_cell
from duplex.report.results import DatasetResults, Results
from duplex.report.table_cells import (
    METRICS,
    auc_interval_cell,
    json_pointer,
    mean_cell,
    metric_cells,
    ranked,
    run_cell,
    value_cell,
)

OPEN = (("auc_all", "AUC, all pairs"), ("auc_by_words", "AUC, by words"))
PARTS = (("hm_at_val_bias", "HM, validation bias"), ("state_accuracy", "state"), ("object_accuracy", "object"))
TIPS = {
    "S": "accuracy on images of seen pairs when unseen pairs are excluded",
    "U": "accuracy on images of unseen pairs when seen pairs are excluded",
    "HM": "best harmonic mean of seen and unseen accuracy over all biases",
    "AUC": "area under the seen–unseen curve",
    "AUC 95 %": "interval over test images, mean of the seeds' intervals",
    "AUC, all pairs": "open world with every pair a candidate, no feasibility threshold",
    "AUC, by words": "open world with the feasibility threshold by words that validation chose: the published protocol",
    "HM, validation bias": "harmonic mean at the bias chosen on validation, which predictions use",
    "state": "accuracy of the predicted state, no bias",
    "object": "accuracy of the predicted object, no bias",
}
NUMBERS = tuple(Column(title, tip=TIPS[title]) for _, title in METRICS)


@lru_cache
def read_package_yaml(name: str) -> Tree:
    """Read a YAML file of this package: quoted.yaml (published results) or tables.yaml (tables of ablations)."""
    text = files("duplex.report").joinpath(name).read_text(encoding="utf-8")
    return dict(YAML(typ="safe", pure=True).load(text))


def result_table(results: Results, data: DatasetResults, world: str) -> Table | None:
    """Return a table of S, U, HM and AUC of all methods in the closed or open world; None without results.

    If the data set is a published benchmark, published numbers are added below.
    """
    ours = {method: worlds[world] for method, worlds in data.summary.items() if world in worlds}
    if not ours:
        return None
    rows = []
    further = (*OPEN, *PARTS) if world == "open" else PARTS
    for method, values in ours.items():
        place = (results.metrics_file, data.name, method, world)
        interval = auc_interval_cell(values, place)
        cells = [*metric_cells(values, place), interval, *metric_cells(values, place, further)]
        rows.append(TableRow([text_cell(method), *cells]))
    rows = ranked(rows, range(1, 1 + len(METRICS)))
    quoted = quoted_rows(data, world, 1 + len(further))
    seeds = max(int(values.get("seeds", 1)) for values in ours.values())
    over = f"{seeds} seed{'s' if seeds > 1 else ''}"
    note = f"Mean ± standard error over {over}, in percent. Bold: best, underlined: second."
    if quoted:
        note += f" Rows marked “quoted” are published numbers from {read_package_yaml('quoted.yaml')['source']}."
        note += " Their open world has a feasibility threshold by words." if world == "open" else ""
    others = (Column(title, tip=TIPS[title]) for title in ("AUC 95 %", *(title for _, title in further)))
    header = [*columns("method"), *NUMBERS, *others]
    return Table(f"{data.name}, {world} world", header, [*rows, *quoted], note)


def quoted_rows(data: DatasetResults, world: str, further: int) -> list[TableRow]:
    """Return table rows with published results on a data set; empty if it is no published benchmark.

    A data set is a benchmark if its name and its numbers of states, objects and pairs are the benchmark's.

    further: number of empty cells at the end of each row.
    """
    table, benchmark = read_package_yaml("quoted.yaml"), benchmark_of(data)
    if benchmark is None:
        return []
    rows = []
    for row in [*table.get(world, ()), *(table["backbones"] if world == "closed" else ())]:
        if benchmark in row:
            errors = row.get("errors", {}).get(benchmark, [None] * 4)
            numbers = [
                TableCell(f"{value:.1f}", value, spread="" if error is None else f"± {error:.1f}")
                for value, error in zip(row[benchmark], errors, strict=True)
            ]
            name = TableCell(f"{row['method']} (quoted)", row["method"], tip=f"published, {row['backbone']}")
            rows.append(TableRow([name, *numbers, *[TableCell(MISSING)] * further], quoted=True))
    return rows


def benchmark_of(data: DatasetResults) -> str | None:
    """Return the name of the published benchmark that has a data set's name and counts; None if there is none."""
    if data.statistics is None:
        return None
    counts = {key: data.statistics.get(key) for key in ("states", "objects")}
    counts["train_pairs"] = data.statistics.get("train", {}).get("seen")
    known = read_package_yaml("quoted.yaml")["benchmarks"]
    return next(
        (name for name in known if normalised_name(name) == normalised_name(data.name) and known[name] == counts), None
    )


def normalised_name(name: str) -> str:
    """Return a name in lower case with letters and digits only, by which names are compared."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def feasibility_table(data: DatasetResults) -> Table | None:
    """Return a table of feasibility thresholds, which exclude implausible pairs in the open world, and of their effect.

    A row is a method with a source of feasibility, `words` (word vectors) or `likelihood`. None if no run has a
    threshold.
    """
    forms = {"threshold": "{:.3f}", "feasible": "{:,.0f}"}
    forms |= dict.fromkeys(("val_auc_all_feasible", "val_auc_at_threshold"), "{:.1f}")
    forms |= {"val_auc_gain": "{:+.2f}", "val_auc_gain_se": "{:.2f}", "auc": "{:.1f}"}
    rows = []
    for method, runs in data.runs.items():
        worlds = [run.metrics.get("open", {}) for run in runs.values()]
        used = [used_source(world) for world in worlds]
        for source in sorted(SOURCES, key=used.count, reverse=True):
            if not all(at_threshold(world, source) for world in worlds):
                continue
            places = [("open",) if name == source else ("open", source) for name in used]
            cited = list(zip(runs.values(), places, strict=True))
            numbers = (mean_cell([(run, (*keys, key)) for run, keys in cited], form) for key, form in forms.items())
            count = text_cell(f"{used.count(source)} of {len(used)}")
            rows.append(TableRow([text_cell(method), text_cell(source), count, *numbers]))
    if not rows:
        return None
    titles = "threshold", "feasible pairs", "val AUC, all feasible", "val AUC, at threshold", "gain on pairs left out"
    note = (
        "Unseen pairs with a feasibility below the threshold, which has the best validation AUC, are excluded; with "
        "evaluation.feasibility: auto only if the gain on unseen validation pairs without a part in the choice exceeds "
        "twice its standard error. Feasibility comes from word vectors (the published protocol) or from the method's "
        "likelihood. “Used” counts runs; the others use another source, or no threshold. Mean over seeds."
    )
    header = columns("method", "source", "used", *titles, "standard error", "test AUC", texts=3)
    return Table(f"Feasibility in the open world: {data.name}", header, rows, note)


def ablation_tables(results: Results, data: DatasetResults) -> list[tuple[str, Table | Note]]:
    """Return the tables of ablations that `tables.yaml` lists, as (title, table); without runs a note, not a table."""
    spec = read_package_yaml("tables.yaml")
    tables: list[tuple[str, Table | Note]] = []
    for entry in spec["tables"]:
        title, caption, texts = entry["title"], entry["caption"], entry["columns"]
        lines = [(row["cells"], *_ablation(results, data, row["run"])) for row in entry["rows"]]
        lines = [line for line in lines if line[1]]
        if len(lines) < 2 or not any(place[0] == results.ablations_file for *_, place in lines):
            tables.append((title, Note(f"{caption} These ablations have not been run.", spec["command"])))
            continue
        rows = [TableRow([*map(text_cell, cells), *metric_cells(values, place)]) for cells, values, place in lines]
        rows = ranked(rows, range(len(texts), len(texts) + len(METRICS)))
        header = [*columns(*texts, texts=len(texts)), *NUMBERS]
        tables.append((title, Table(f"{title}: {data.name}, closed world", header, rows, caption)))
    return tables


def _ablation(results: Results, data: DatasetResults, names: str | list[str]) -> tuple[Tree, Sequence[str]]:
    """Return an ablation's closed-world metrics, and the file and keys under which they are stored.

    names: names of ablations or methods; the first with metrics counts. Both results are empty if none has metrics.
    """
    for name in [names] if isinstance(names, str) else names:
        for table, file in ((data.ablations, results.ablations_file), (data.summary, results.metrics_file)):
            if "closed" in table.get(name, {}):
                return table[name]["closed"], (file, data.name, name, "closed")
    return {}, ()


TERMS_NOTE = (
    "Score terms of one trained method, evaluated without the others and weighted as in the whole score: semantic "
    "prototypes (semantic), visual prototypes (visual), states and objects by prompts (factors), pairs by closed-form "
    "prototypes (gaussian), states and objects by closed-form prototypes (gaussian_factors)."
)


def term_tables(results: Results, data: DatasetResults) -> list[Block]:
    """Return, per method, a table of its accuracy by single score terms (summands of the score) and by sums of them.

    A note precedes the tables. Empty if no method has several score terms.
    """
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
        tables.append(Table(caption, [*columns("score terms"), *NUMBERS], rows))
    return [Note(TERMS_NOTE), *tables] if tables else []


def efficiency_table(results: Results, data: DatasetResults) -> Table:
    """Return a table of each method's costs (parameters, memory, seconds per epoch and test), with its HM and AUC."""
    rows = []
    for method, runs in data.runs.items():
        seeds = list(runs.values())
        closed = data.summary.get(method, {}).get("closed", {})
        place = (results.metrics_file, data.name, method, "closed")
        counts = ("parameters", "finetuned_blocks", "codebook_rows")
        cells = [
            *(run_cell(seeds, (name,), "{:,.0f}", "timing") for name in counts),
            run_cell(seeds, ("peak_bytes",), "{:,.0f} MB", "timing", 1e-6),
            run_cell(seeds, ("seconds_per_epoch",), "{:.2f} s", "timing"),
            run_cell(seeds, ("test_seconds",), "{:.2f} s", "evaluation_timing"),
        ]
        rows.append(TableRow([text_cell(method), *cells, *metric_cells(closed, place, METRICS[2:])]))
    titles = "trained parameters", "fine-tuned blocks", "prototypes", "peak memory", "epoch", "test split", "HM", "AUC"
    note = (
        "Mean over seeds. Memory is the peak of the process in training. Times depend on the machine; they include the "
        "fine-tuned blocks of the encoder, but not its frozen ones."
    )
    return Table(f"Cost and result: {data.name}, closed world", columns("method", *titles), rows, note)


def statistics_table(data: DatasetResults) -> Table | Note:
    """Return a table of a data set's numbers of states, objects, pairs and images; a note if they are not known."""
    stats = data.statistics
    if stats is None:
        return Note("The data set has no statistics.", f"dvc repro prepare@{data.name}")
    places: dict[str, tuple[str, ...]] = {"states": ("states",), "objects": ("objects",)}
    places |= {"train pairs": ("train", "seen"), "train images": ("train", "images")}
    counts = {"seen pairs": "seen", "unseen pairs": "unseen", "images": "images"}
    places |= {f"{split} {title}": (split, key) for split in ("val", "test") for title, key in counts.items()}
    cells = {title: value_cell(stats, data.statistics_file, place, "{:,.0f}") for title, place in places.items()}
    if (tree := data.extraction) is not None:
        cells["feature cache"] = value_cell(tree, data.extraction_file, ("bytes",), "{:,.1f} MB", 1e-6)
        cells["unreadable images"] = value_cell(tree, data.extraction_file, ("bad",), "{:,.0f}")
    rows = [TableRow([text_cell(title), cell]) for title, cell in cells.items()]
    return Table(f"Counts: {data.name}", columns("item", "count"), rows)


def published_table(results: Results, data: DatasetResults, world: str) -> Table | None:
    """Return a table that compares measured with published HM and AUC, for a data set that is a published benchmark.

    None for other data sets, and if no measured method is published.
    """
    benchmark = benchmark_of(data)
    if benchmark is None:
        return None
    rows = []
    here = [name for name, worlds in data.summary.items() if world in worlds]
    for entry in read_package_yaml("quoted.yaml").get(world, ()):
        named = read_package_yaml("quoted.yaml")["names"].get(entry["method"])  # in params.yaml, if it differs
        ours = next(
            (
                n
                for n in here
                if n == named or (named is None and normalised_name(n) == normalised_name(entry["method"]))
            ),
            None,
        )
        if benchmark in entry and ours is not None:
            values, published = data.summary[ours][world], entry[benchmark]
            cells = [text_cell(entry["method"]), text_cell(ours)]
            end = "_by_words" if "auc_by_words" in values else ""  # the published protocol, if the run has its numbers
            for name, number in zip((f"hm{end}", f"auc{end}"), published[2:], strict=True):
                value, source = values.get(name), json_pointer(results.metrics_file, data.name, ours, world, name)
                measured = TableCell(MISSING) if value is None else TableCell(f"{value:.1f}", value, source)
                cells += [TableCell(f"{number:.1f}", number), measured]
            names = (f"auc{end}", f"auc_low{end}", f"auc_high{end}")
            gain, low, high = (None if each is None else each - published[3] for each in map(values.get, names))
            text = MISSING if low is None or high is None else f"{low:+.1f} to {high:+.1f}"
            rows.append(TableRow([*cells, TableCell(f"{gain:+.1f}", gain), TableCell(text, low)]))
    if not rows:
        return None
    header = [
        *columns("method", "name here", "HM published", "HM measured", texts=2),
        Column("AUC published", tip="20-point sweep, which underestimates AUC by up to 0.8 %"),
        Column("AUC measured", tip="exact, mean over seeds"),
        Column("difference", tip="measured AUC minus published AUC"),
        Column("95 %", tip="interval of the difference over test images; the published number counts as exact"),
    ]
    note = f"Published numbers are quoted from {read_package_yaml('quoted.yaml')['source']}."
    if world == "open":
        note += " Both have a feasibility threshold by words, chosen on validation images: the published protocol."
    return Table(f"{data.name}, {world} world: measured and published", header, rows, note)


def recipe_tables(data: DatasetResults) -> list[Block]:
    """Return a table per run with `finetune: auto`, which chooses the number of fine-tuned blocks on validation images.

    A line is a recipe that was tried: number of blocks, learning rate and validation AUC.
    """
    forms = {"rate": "{:g}", "auc": "{:.1f}", "error": "{:.1f}", "gain": "{:+.1f}", "gain_error": "{:.1f}"}
    forms |= {"epoch": "{:.0f}"}
    header = columns("blocks", "chosen", "rate", "val AUC", "standard error", "gain", "its error", "epoch", texts=2)
    tables: list[Block] = []
    for method, runs in data.runs.items():
        for seed, run in runs.items():
            rows = []
            numbered = {int(name.removeprefix(RECIPE)): name for name in run.metrics if name.startswith(RECIPE)}
            for _, key in sorted(numbered.items()):
                recipe = run.metrics[key]
                cells = [mean_cell([(run, (key, name))], form) for name, form in forms.items()]
                chosen = "chosen" if recipe.get("chosen") else ""
                rows.append(TableRow([text_cell(f"{recipe['blocks']:.0f}"), text_cell(chosen), *cells]))
            if rows:
                tables.append(Table(f"Fine-tuned blocks of {method}, seed {seed}", header, rows, RECIPE_NOTE))
    return tables


RECIPE = "recipe_"
RECIPE_NOTE = (
    "A recipe is adopted if its validation AUC exceeds that of the best cheaper one by more than the standard error of "
    "the difference over validation images. More blocks replace fewer ones if their AUC is higher at all."
)
