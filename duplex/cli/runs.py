"""`duplex params`, `methods`, `prepare`, `train`, `evaluate`, `metrics`, `sweep`, `reproduce`, `tune`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from duplex.artifacts import ArtifactPaths
from duplex.cli import (
    AsJson,
    Dataset,
    Engine,
    app,
    dataset_option,
    load_params,
    log,
    method_option,
    print_json,
    seed_option,
)
from duplex.errors import DuplexError, UsageError, require
from duplex.evaluation.metrics import aligned, metrics_line, number
from duplex.labels import WORLDS
from duplex.system.entry import LARGEST_SEED

if TYPE_CHECKING:
    from duplex.config.params import Params
    from duplex.project.sweep import SweepResult
    from duplex.project.tune import TuningRow

Method = Annotated[str, method_option("--method", "-m", help="Name of a method in params.yaml.")]
Methods = Annotated[str | None, method_option(help="Methods, comma-separated; default: run.methods.")]
Seed = Annotated[int, seed_option("Seed of the run, for initial values, batches and dropout.")]
Jobs = Annotated[int | None, Option(min=1, help="Worker processes; default: by GPUs, or cores and threads.")]

Rows = Annotated[
    str | None,
    Option(
        callback=lambda rows: rows and require(rows, ("main", "ablations", "readings", "all"), "group of rows"),
        help="main (comparison tables), ablations (default), readings, or all.",
    ),
]


@app.command("params")
def show_params(
    check: Annotated[bool, Option("--check", help="Print nothing if params.yaml is valid.")] = False,
    schema: Annotated[bool, Option("--schema", help="Print the JSON Schema of params.yaml.")] = False,
) -> None:
    """Check params.yaml and print it as JSON, with all defaults filled in."""
    if schema:
        from duplex.config.schema import json_schema

        print_json(json_schema())
        return
    params = load_params()
    params.check_entries()
    if not check:
        record = json.loads(params.model_dump_json(exclude={"methods"}))
        print_json({**record, "methods": {name: _entry(params, name) for name in params.methods}})


def _entry(params: Params, name: str) -> dict[str, Any]:
    entry = params.entry(name)
    fields = {"training", "finetune", "per_dataset", "shown_as"}
    overrides = entry.model_dump(include=fields, exclude_defaults=True)
    overrides = {key: value for key, value in overrides.items() if value}
    return {"kind": entry.kind, "world": entry.world, **params.method(name).to_dict(), **overrides}


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the installed kinds of methods with their inputs, options and packages."""
    from duplex.methods.registry import describe_method, installed_methods

    kinds = [describe_method(kind) for kind in installed_methods()]
    if as_json:
        print_json(kinds)
        return
    for kind in kinds:
        typer.echo(f"{kind['kind']}  ({kind['source']})")
        if "error" in kind:
            typer.echo(f"  {kind['error']}")
            continue
        typer.echo(f"  needs {', '.join(kind['needs'])}")
        for option in kind["options"]:
            default = json.dumps(option["default"])
            typer.echo(f"  {option['name']}: {option['type']} = {default}")


@app.command()
def prepare(dataset: Dataset) -> None:
    """Write a data set's manifest, labels, statistics and a record of its source.

    For the data set `shapes`, draw its images first. The record reveals later edits of the source.
    """
    from duplex.project.prepare import prepare as prepare_stage
    from duplex.project.run import ProjectData

    prepare_stage(ProjectData(load_params(), dataset))
    log(f"wrote {ArtifactPaths().manifest(dataset)}")


@app.command()
def train(dataset: Dataset, method: Method = "duplex", seed: Seed = 0) -> None:
    """Train a method on cached features, and write its checkpoint.

    The option `training.select` chooses the epoch. The same command resumes interrupted training.
    """
    from duplex.project.run import ProjectRun
    from duplex.project.train import train_stage

    run = ProjectRun(dataset, method, seed, load_params())
    outcome = train_stage(run)
    chosen = "" if outcome.selected_by == "auc" else f" (chosen by {outcome.selected_by})"
    auc = f"validation AUC {100 * outcome.best_auc:.2f}"
    log(f"{run.files.checkpoint}: epoch {outcome.best_epoch}{chosen}, {auc}")


@app.command()
def evaluate(
    dataset: Dataset,
    method: Method = "duplex",
    seed: Seed = 0,
    stream: Annotated[bool, Option("--stream", help="Also adapt to the unlabelled test images.")] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained method on the test split, with 95 % intervals."""
    from duplex.config.params import StreamParams
    from duplex.project.evaluate import evaluate_stage
    from duplex.project.run import ProjectRun

    params = load_params()
    if stream and params.evaluation.stream is None:
        evaluation = params.evaluation.model_copy(update={"stream": StreamParams()})
        params = params.model_copy(update={"evaluation": evaluation})
    record = evaluate_stage(ProjectRun(dataset, method, seed, params))
    adapted = record.get("stream", {})
    if as_json:
        print_json(record)
    for world in () if as_json else [world for world in WORLDS if world in record]:
        typer.echo(f"{world:6}  {metrics_line(record[world])}")
        if world in adapted:
            spread = f" ± {adapted[world]['auc_sd']:.2f}" if "auc_sd" in adapted[world] else ""
            how = f"over {adapted['orders']} orders, adapted by {adapted['adapter']}"
            typer.echo(f"{world:6}  {metrics_line(adapted[world])}{spread} {how}")
    if stream and "stream" not in record:
        raise UsageError("--stream had no effect on this run, as said above; choose a run with prompts")


@app.command()
def metrics(as_json: AsJson = False) -> None:
    """Print the metrics of all runs, averaged over seeds, and the path of the report."""
    from duplex.project.report import average_runs, read_all_metrics, warn_of_outdated
    from duplex.report.aggregate import NO_RUN, read_metrics
    from duplex.report.tables import metrics_as_text  # which has the columns

    paths = ArtifactPaths()
    params = load_params()
    runs, _ = read_all_metrics(params, paths)
    is_written = runs or paths.summary.is_file()
    table = read_metrics(paths.summary, "dvc repro report") if is_written else {}
    if not table and not runs:
        raise DuplexError(NO_RUN)
    if average_runs(params, runs, paths) != table:
        problem = f"{paths.summary} does not match the runs in {paths.root}"
        log(f"{problem}; `duplex report` writes it again")
    warn_of_outdated(params, paths)
    if as_json:
        print_json(table)
        return
    typer.echo(aligned(metrics_as_text(table)))
    typer.echo(f"report: {paths.report / 'index.html'}")


MAX_SEEDS = 10_000  # of a range


@app.command()
def sweep(
    datasets: Annotated[str | None, Option(help="Data sets, comma-separated; default: run.datasets.")] = None,
    methods: Methods = None,
    seeds: Annotated[str | None, Option(help="Seeds, such as 0,2 or 0-4; default: run.seeds.")] = None,
    jobs: Jobs = None,
    engine: Engine = "local",
    as_json: AsJson = False,
) -> None:
    """Train and evaluate all missing runs of params.yaml, and commit them to DVC.

    A run is a data set, a method and a seed. Writes the same files as `dvc repro`, byte for byte,
    so `dvc repro` repeats no run. The same command resumes an interrupted sweep. A failed run does
    not stop the others; failures are listed at the end, and the command exits with 1.
    """
    from duplex.project import sweep as stage

    params = load_params()
    runs = stage.grid(params, split_names(datasets), split_names(methods), parse_seeds(seeds))
    report = stage.sweep(params, runs, jobs, engine)  # type: ignore[arg-type]
    _log_sweep(report)
    if as_json:
        print_json(asdict(report))
    if report.failed or report.not_committed:
        raise typer.Exit(1)


@app.command()
def reproduce(
    dataset: Annotated[
        str, Argument(help="Data set of ablations/params.yaml or, with --methods, params.yaml.")
    ] = "shapes",
    methods: Annotated[str | None, Option(help="Methods to run with published settings, comma-separated.")] = None,
    rows: Rows = None,
    seeds: Annotated[str | None, Option(help="Seeds, such as 0-4; default: run.seeds (0-4 with --methods).")] = None,
    jobs: Jobs = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only time a step of each method; print the plan.")] = False,
) -> None:
    """Run the rows of the paper's tables on a data set, and judge its claims on a page.

    Each row is a method of ablations/params.yaml. The command prepares the data set, extracts its
    features, and trains and evaluates the rows by the exact and the published protocol; the same
    command resumes it. With `--methods`, rows are published methods on a data set of params.yaml.
    """
    from duplex.project import reproduce as stage
    from duplex.project.run import ProjectData

    folder = Path()
    paths = ArtifactPaths()
    show = typer.echo if dry_run else log
    names = split_names(methods)
    if names and rows:
        raise UsageError("--methods names the rows itself; leave --rows out")
    if names:
        params = stage.published_params(dataset, names, parse_seeds(seeds) or range(5))
        paths = ArtifactPaths(stage.PUBLISHED)
        show("\n".join(stage.published_settings(params, dataset)))
    elif (stage.PROJECT / "params.yaml").is_file():
        folder = stage.PROJECT
        os.chdir(folder)
        params = load_params()
    else:
        file = stage.PROJECT / "params.yaml"
        problem = f"{file}, which lists the paper's table rows, does not exist here"
        raise UsageError(f"{problem}; run the command in the project's folder")
    project = ProjectData(params, dataset, paths)
    plan = stage.plan_reproduction(project, parse_seeds(seeds), jobs, rows or "ablations")  # type: ignore[arg-type]
    show("\n".join(plan.lines()))
    if dry_run:
        return
    report, page = stage.reproduce(plan, jobs)
    _log_sweep(report)
    typer.echo(folder / page)
    if report.failed or report.not_committed:
        raise typer.Exit(1)


def _log_sweep(report: SweepResult) -> None:
    log(sweep_summary(report))
    for run, error in report.failed.items():
        log(f"{run}: {' '.join(error.split())}")
    if report.not_committed:
        log(f"duplex: {report.not_committed}")


def sweep_summary(report: SweepResult) -> str:
    """A sweep on one line: `40 runs: 12 complete, 27 trained and evaluated in 61 s, 1 failed`."""
    made = {"complete": report.complete}
    made[f"trained and evaluated in {report.seconds:.0f} s"] = report.executed
    made["failed"] = len(report.failed)
    tracked = {"committed to DVC": report.committed}
    tracked["not tracked by DVC, since `run` of params.yaml lacks them"] = report.outside_pipeline
    parts = []
    for counts in (made, tracked):
        parts.append(", ".join(f"{count} {text}" for text, count in counts.items() if count))
    return f"{report.runs} runs: {'; '.join(filter(None, parts))}"


def split_names(text: str | None) -> list[str] | None:
    """Split a comma-separated text into names; None stays None."""
    return None if text is None else [name.strip() for name in text.split(",")]


def parse_seeds(text: str | None) -> list[int] | None:
    """Read the seeds from a text such as `0,2,5-9`; None stays None."""
    seeds: list[int] = []
    for part in split_names(text) or []:
        ends = re.fullmatch(r"([0-9]{1,19})(?:-([0-9]{1,19}))?", part)
        first, last = (int(end or ends[1]) for end in ends.groups()) if ends else (1, 0)
        if last > LARGEST_SEED or not 0 <= last - first < MAX_SEEDS:
            ranges = f"ranges such as 0-4 (ascending, up to {MAX_SEEDS:,} seeds)"
            raise UsageError(f"--seeds has {part!r}; expected numbers, or {ranges}")
        seeds += range(first, last + 1)
    return seeds or None


@app.command()
def tune(
    grid: Annotated[list[str], Option(help="Setting, such as learning_rate=3e-4,1e-3; repeatable.")],
    methods: Methods = None,
    dataset: Annotated[str | None, dataset_option("Data set; default: the first of run.datasets.")] = None,
    seeds: Annotated[str, Option(help="Seeds, such as 100-104; use none of run.seeds.")] = "100,101",
    jobs: Jobs = None,
    engine: Engine = "local",
    write: Annotated[bool, Option("--write", help="Write the best settings to datasets/NAME.yaml.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train methods with every combination of settings, and list their validation AUC.

    Settings are training options, such as learning_rate and epochs, and options of the methods'
    kinds. Each method's best row is marked with *; --write saves its settings under `methods:` of
    datasets/NAME.yaml, unless other settings have the same AUC. Exits with 1 if a trial failed.
    Test images are not scored.
    """
    from duplex.config.datasets import write_settings
    from duplex.project.tune import best_rows
    from duplex.project.tune import tune as search

    params = load_params()
    name = require(dataset or params.run.datasets[0], params.datasets, "data set")
    single = [each for each in params.run.methods if not params.entry(each).members]
    chosen = split_names(methods) or single
    numbers = parse_seeds(seeds) or []
    rows = search(params, name, chosen, parse_grid(grid), numbers, jobs, engine=engine)  # type: ignore[arg-type]
    best = best_rows(rows)
    if as_json:
        print_json([{**row.to_dict(), "best": row is best.get(row.method)} for row in rows])
    else:
        typer.echo(tuning_table(rows, list(best.values())))
    for row in rows:
        for error in row.errors[:1]:
            log(f"{row.method} {dict(row.settings)}: {error}")
    for row in list(best.values()):
        tied = [each for each in rows if (each.method, each.val_auc) == (row.method, row.val_auc)]
        if len(tied) > 1:
            del best[row.method]
            tie = f"{len(tied)} settings have the same best AUC, {row.val_auc:.2f}"
            log(f"{row.method}: {tie}; {'none of them is written' if write else '* marks the first'}")
    for method, row in best.items() if write else ():
        before = load_params().methods
        write_settings(params, method, name, row.settings)
        after = load_params().methods
        heirs = [each for each in after if after[each] != before[each] and each != method]
        more = f"; also in effect for {', '.join(heirs)}, by `extends`" if heirs else ""
        log(f"datasets/{name}.yaml: methods.{method}: {dict(row.settings)}{more}")
    if any(row.errors for row in rows):
        raise typer.Exit(1)


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Setting -> values, read from texts such as `learning_rate=3e-4,1e-3` (YAML)."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    choices: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        try:
            parsed = YAML(typ="safe", pure=True).load(f"[{values}]") if name and equals else None
        except YAMLError:
            parsed = None
        if not parsed:
            expected = "a setting and its values, such as learning_rate=3e-4,1e-3"
            raise UsageError(f"--grid is {text!r}; expected {expected}")
        if name in choices:
            raise UsageError(f"--grid has {name} twice; give all its values in one --grid")
        choices[name] = parsed
    return choices


def tuning_table(rows: Sequence[TuningRow], best: Sequence[TuningRow]) -> str:
    """Results of `duplex tune` as a text table that marks the rows in `best` with *."""
    lines = [["", "method", "settings", "val AUC", "±", "all pairs", "epoch", "seconds"]]
    forms = dict.fromkeys(("val_auc", "val_auc_se", "val_auc_all"), ".2f")
    forms |= dict.fromkeys(("epoch", "seconds"), ".1f")
    for row in rows:
        record = row.to_dict()
        settings = []
        for name, value in row.settings.items():
            settings.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
        numbers = ["failed", "", "", "", ""]
        if "error" not in record:
            numbers = [number(record[name], form) for name, form in forms.items()]
        lines.append(["*" if row in best else "", row.method, ", ".join(settings), *numbers])
    return aligned(lines)
