"""The pages of a project: the report of all runs with its maps, and the page of one data set."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.data.tables import read_manifest
from duplex.errors import DuplexError
from duplex.features.file import open_cache, read_identity
from duplex.project.run import RUN_STAGES, ProjectData, ProjectRun, load_inputs, rows_shown
from duplex.project.runs import best_run, featured_run, load_run
from duplex.report import aggregate, images
from duplex.report.aggregate import DatasetResults, Results, RunRecord, Tree
from duplex.report.answers import example_and_error_parts
from duplex.report.blocks import Block, Note, ReportPart, write_report
from duplex.report.claims import counts_of
from duplex.report.figures import map_figures
from duplex.report.own import OwnData, write_page
from duplex.report.page import build_report
from duplex.report.tables import run_table
from duplex.system.files import replace_file, write_json, write_text
from duplex.system.processes import track
from duplex.training.checkpoint import read_record
from duplex.training.scoring import answer_groups

VALIDATION_OF = {"closed": "val_auc", "open": "val_auc_all"}  # world -> validation AUC of a run for it


def report_stage(
    params: Params,
    paths: ArtifactPaths = ArtifactPaths(),
    *,
    write_metrics: bool = True,
    copies: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write report and mean metrics of all runs under `run:`; returns the HTML page's path.

    copies: method -> another one with the same settings, whose results are shown as its own, too.
    """
    runs, not_evaluated = read_all_metrics(params, paths)
    warn_of_outdated(params, paths)
    if not runs:
        print(f"duplex: {aggregate.NO_RUN}", file=sys.stderr)
    summary = average_runs(params, runs, paths)
    for by_method, (name, other) in product(summary.values(), copies.items()):
        if other in by_method:
            by_method[name] = by_method[other]
    evaluated = {dataset for dataset, _ in runs}
    if shown := tuple(name for name in params.run.datasets if name in evaluated):
        run = params.run.model_copy(update={"datasets": shown})
        params = params.model_copy(update={"run": run})
    results = replace(read_results(params, summary, paths), not_evaluated=not_evaluated)
    table = run_table(results, configured_options(params))
    parts: dict[str, list[ReportPart]] = {}
    numbers: dict[str, object] = {}
    for dataset in track(params.run.datasets, "report", len(params.run.datasets)):
        parts[dataset], more = image_parts(ProjectData(params, dataset, paths))
        numbers |= more
    # the page first: those of a reproduction share its folder, which is replaced
    page = write_report(build_report(results, parts), paths.report, paths.plots / "figures", numbers)
    write_json(paths.summary, summary)
    if write_metrics:
        write_json(paths.metrics, aggregate.headline_numbers(summary))
    write_text(paths.runs, table.to_csv(index=False, lineterminator="\n"))
    tables = {"curves": curve_table(results), "training": auc_by_epoch_table(results)}
    for name, table in tables.items():
        with replace_file(paths.plots / f"{name}.csv") as scratch:
            table.to_csv(scratch, index=False, lineterminator="\n", float_format="%.4f")
    return page


def read_all_metrics(
    params: Params, paths: ArtifactPaths
) -> tuple[dict[tuple[str, str], list[Tree]], dict[str, list[str]]]:
    """Metrics by (data set, method), and the runs without metrics by data set."""
    runs: dict[tuple[str, str], list[Tree]] = {}
    not_evaluated: dict[str, list[str]] = {}
    for dataset in params.run.datasets:
        by_method, missing = read_metrics_of(ProjectData(params, dataset, paths))
        runs |= {(dataset, method): records for method, records in by_method.items()}
        not_evaluated |= {dataset: missing} if missing else {}
    return runs, not_evaluated


def average_runs(params: Params, runs: Mapping[tuple[str, str], Sequence[Tree]], paths: ArtifactPaths) -> Tree:
    """Average metrics over seeds; adds `settings`: kind, options, encoder, counts of the data set, word vectors.

    A method with `shown_as: NAME` is entered under NAME; with `world: open`, its settings are
    named `settings_open`.
    """
    summary: Tree = aggregate.aggregate(runs)
    changed = configured_options(params)
    for (dataset, method), records in runs.items():
        source = params.dataset(dataset)
        encoder = " ".join(filter(None, (source.encoder.name, source.encoder.weights)))
        if source.features is not None:
            encoder = f"features of {source.features}"
        counts = counts_of(aggregate.stored_numbers(paths.statistics(dataset)))
        data = {"encoder": encoder, "counts": counts}
        if words := records[0].get("word_vectors"):
            data["word_vectors"] = words
        for name in params.run.methods:
            entry = params.entry(name)
            if (entry.shown_as or name) == method:
                key = "settings_open" if entry.world == "open" else "settings"
                summary[dataset][method][key] = {**changed[dataset, name], **data}
    return summary


def warn_of_outdated(params: Params, paths: ArtifactPaths) -> None:
    """Print a line for each data set and method whose files do not match params.yaml or code."""
    for dataset in params.run.datasets:
        if found := ProjectData(params, dataset, paths).difference():
            print(f"duplex: the report shows earlier runs, as {found}", file=sys.stderr)
    for dataset, method in product(params.run.datasets, params.run.methods):
        for seed in params.run.seeds:
            run = ProjectRun(dataset, method, seed, params, paths)
            metrics = run.files.metrics
            if metrics.is_file() and (found := run.difference(*RUN_STAGES)):
                print(
                    f"duplex: {metrics} does not match the method {method} in params.yaml: "
                    f"{found}; the report shows the old numbers, and `dvc repro` computes new ones",
                    file=sys.stderr,
                )
                break


def read_metrics_of(data: ProjectData) -> tuple[dict[str, list[Tree]], list[str]]:
    """Each method's metrics of a data set, one per seed, and names of runs without metrics.

    With `shown_as: NAME`, a method's metrics are listed under NAME; with `world: open`, only those
    of this world. If METHOD was also evaluated while it adapted to the test images, the metrics
    are listed as METHOD+stream.
    """
    by_method: dict[str, dict[int, Tree]] = {}
    missing = []
    for name, seed in product(data.params.run.methods, data.params.run.seeds):
        entry = data.params.entry(name)
        record = aggregate.stored_numbers(data.run(name, seed).files.metrics)
        if record is None:
            missing.append(f"{name} seed {seed}")
            continue
        shown = entry.shown_as or name
        names: list[str] = []
        for world in entry.worlds if entry.shown_as and entry.world == "open" else ():
            names += [world, VALIDATION_OF[world]]
        rows = {shown: record, f"{shown}{aggregate.STREAM}": record.get("stream")}
        for row, numbers in rows.items():
            if numbers:
                seeds = by_method.setdefault(row, {})
                chosen = {key: numbers[key] for key in (names or numbers) if key in numbers}
                seeds[seed] = seeds.get(seed, {}) | chosen
    return {name: list(seeds.values()) for name, seeds in by_method.items()}, missing


def read_results(params: Params, summary: Tree, paths: ArtifactPaths) -> Results:
    """Read what the report shows; `summary` has means over seeds (from `average_runs`)."""
    is_reproduction = paths.ablations == paths.summary
    ablations = summary if is_reproduction else aggregate.stored_numbers(paths.ablations) or {}
    datasets = [
        DatasetResults(
            name=dataset,
            summary=summary.get(dataset, {}),
            runs={method: _read_runs(params, dataset, method, paths) for method in params.run.methods},
            shown_as=rows_shown(params)["shown_as"],
            ablations=ablations.get(dataset, {}),
            statistics=aggregate.stored_numbers(paths.statistics(dataset)),
            statistics_file=paths.statistics(dataset).as_posix(),
            extraction=aggregate.stored_numbers(paths.extraction(dataset)),
            extraction_file=paths.extraction(dataset).as_posix(),
            identity=_identity(paths.features(dataset)),
        )
        for dataset in params.run.datasets
    ]
    return Results(tuple(datasets), paths.summary.as_posix(), paths.ablations.as_posix(), params.run.seeds)


def _read_runs(params: Params, dataset: str, method: str, paths: ArtifactPaths) -> dict[int, RunRecord]:
    return {seed: aggregate.read_run(paths.run(dataset, method, seed)) for seed in params.run.seeds}


def configured_options(params: Params) -> dict[tuple[str, str], dict[str, Any]]:
    """Kind, world and options that YAML files set, training and fine-tuning of each method."""
    table = {}
    for dataset, method in product(params.run.datasets, params.run.methods):
        entry = params.entry(method)
        more = {"training": entry.training_for(dataset), "finetune": entry.finetune_for(dataset)}
        options = {"kind": entry.kind, "world": entry.world, **entry.options_for(dataset)}
        table[dataset, method] = options | {key: value for key, value in more.items() if value}
    return table


def _identity(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    with open_cache(path) as file:
        return {key: str(value) for key, value in read_identity(file).items()}


def curve_table(results: Results) -> pd.DataFrame:
    """Mean seen–unseen curves in percent; `dvc plots` draws one curve per value of `series`."""
    rows = []
    for data in results.datasets:
        for world, curves in data.curves.items():
            for method, curve in curves.items():
                for values in zip(curve.seen, curve.unseen, curve.low, curve.high, strict=True):
                    rows.append((f"{data.name} {method} {world}", *values))
    return pd.DataFrame(rows, columns=["series", "seen", "unseen", "low", "high"])


def auc_by_epoch_table(results: Results) -> pd.DataFrame:
    """Table of validation AUC in percent by epoch, of all runs with more than one epoch."""
    rows = []
    for data in results.datasets:
        for method, runs in data.runs.items():
            for seed, run in runs.items():
                if run.history is None or len(run.history) <= 1:
                    continue
                validated = run.history[run.history["val_auc"].notna()]
                for epoch, auc in zip(validated["epoch"], validated["val_auc"], strict=True):
                    rows.append((f"{data.name} {method} seed {seed}", epoch, 100 * auc))
    return pd.DataFrame(rows, columns=["series", "epoch", "val_auc"])


def image_parts(data: ProjectData) -> tuple[list[ReportPart], dict[str, object]]:
    """A run's examples, errors, nearest images and maps; and the JSON files they cite, by name."""
    run = featured_run(data)
    root = data.entry.source.root
    manifest = data.paths.manifest(data.dataset)
    if not manifest.exists():
        note = Note(f"{manifest} does not exist.", f"dvc repro prepare@{data.dataset}")
        return [ReportPart("Examples", [note])], {}
    missing = images.missing_images_note(root, read_manifest(manifest)["image"].tolist(), data.dataset)
    retrieved, texts, numbers = _retrieved(run, missing)
    predictions = aggregate.read_table(run.files.predictions)
    place = run.files.predictions
    parts = [ReportPart("Examples", [Note(f"{place} does not exist.", "dvc repro")])]
    if predictions is not None:
        source = f"Everything below is from {run.method}, seed {run.seed}."
        featured = data.params.report.featured
        if featured not in (None, run.method):
            source += f" report.featured is {featured}, which has no finished run."
        thumbnails = images.thumbnail_reader(root)
        notes = [Note(source), *missing]
        parts = example_and_error_parts(predictions, place.as_posix(), thumbnails, notes, texts)
    return [*parts, *retrieved, _maps(data.dataset, data.paths.maps(data.dataset))], numbers


def _retrieved(
    run: ProjectRun, missing: list[Block]
) -> tuple[list[ReportPart], images.RetrievedTexts, dict[str, object]]:
    name = f"retrieval-{run.dataset}.json"
    try:
        context = load_run(run).retrieval_context()
    except DuplexError as error:
        note = Note(f"Not available: {error}")
        return [ReportPart("Images nearest to prototypes", [note])], images.RetrievedTexts(), {}
    file = (run.paths.report / name).as_posix()
    prototypes, precisions = images.prototype_blocks(context, file)
    swaps, swapped = images.swap_parts(context, file)
    texts = images.retrieve_texts(context, file)
    parts = [
        ReportPart("Images nearest to prototypes", [*missing, *prototypes]),
        ReportPart("Swapped states and objects", [*missing, *swaps]),
    ]
    return parts, texts, {name: {**precisions, **swapped, **texts.numbers}}


def _maps(dataset: str, path: Path) -> ReportPart:
    table = aggregate.read_table(path)
    if table is None:
        return ReportPart("Maps", [Note("The maps have not been drawn.", f"dvc repro maps@{dataset}")])
    none = Note("No method of `run:` has visual prototypes to map.")
    return ReportPart("Maps", map_figures(table, dataset) or [none])


def write_own_page(data: ProjectData) -> Path:
    """Write a data set's page on its run with the best closed-world validation AUC; its path."""
    encoder = data.entry.encoder.name  # raises for an unknown data set
    hint = f"train one with `duplex train --dataset {data.dataset} --method METHOD`"
    chosen = best_run("closed", data.paths, data=data, hint=hint, params=data.params)
    run = data.run(chosen.root.parent.name, int(chosen.root.name))
    record = read_record(chosen.checkpoint)
    trained = load_run(run)
    inputs = trained.inputs
    test = inputs.examples["test"]
    answers = answer_groups(trained.method, test, inputs.labels, record.confidence, "closed")
    frozen = load_inputs(replace(data, params=data.params.model_copy(update={"device": "cpu"})))
    facts = [("encoder", encoder), ("run", f"{run.method}, seed {run.seed}")]
    examples = frozen.examples
    by_share = {"run": answers.by_share()}
    answered = answers.at(answers.stored)
    own = OwnData(
        data.dataset, inputs.labels, inputs.manifest, trained.root, answered, examples, facts=facts, by_share=by_share
    )
    return write_page(own, data.paths.page(data.dataset))
