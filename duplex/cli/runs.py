"""`duplex params`, `methods`, `prepare`, `train`, `evaluate`, `metrics`: single steps of the pipeline, without DVC.

`duplex sweep` and `reproduce` make many runs, `tune` searches settings, `compare` and `score` compare results.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from duplex.evaluation.accumulate import ScoreAccumulator, TopCompetitors
from duplex.evaluation.curve import Margins
from duplex.evaluation.intervals import compare_seeds, compare_splits, in_percentage_points
from duplex.evaluation.metrics import METRICS, aligned, estimate_line, measure, metrics_line, number
from duplex.labels import WORLDS, prompt_name
from duplex.system.entry import LARGEST_SEED

if TYPE_CHECKING:
    import pandas as pd

    from duplex.config.params import Params
    from duplex.evaluation.score_files import ScoreFile
    from duplex.project.sweep import SweepResult, TuningRow

Method = Annotated[str, method_option("--method", "-m", help="Name of a method in params.yaml.")]
Methods = Annotated[str | None, method_option(help="Methods, comma-separated; default: run.methods of params.yaml.")]
Seed = Annotated[int, seed_option("Seed of the run, for initial values, batches and dropout.")]
Jobs = Annotated[
    int | None, Option(min=1, help="Worker processes; default: one per GPU; without GPUs, cores / (threads per run).")
]


@app.command("params")
def show_params(
    check: Annotated[bool, Option("--check", help="Only check params.yaml; print nothing if it is valid.")] = False,
    schema: Annotated[bool, Option("--schema", help="Print the JSON Schema of params.yaml, for text editors.")] = False,
) -> None:
    """Check params.yaml and print it as JSON, with all defaults filled in."""
    if schema:
        from duplex.config.params import json_schema

        print_json(json_schema())
        return
    params = load_params()
    params.check_entries()
    if not check:
        record = json.loads(params.model_dump_json(exclude={"methods"}))
        print_json({**record, "methods": {name: _entry(params, name) for name in params.methods}})


def _entry(params: Params, name: str) -> dict[str, Any]:
    entry = params.entry(name)
    overrides = entry.model_dump(include={"training", "finetune", "per_dataset", "shown_as"}, exclude_defaults=True)
    overrides = {key: value for key, value in overrides.items() if value}
    return {"kind": entry.kind, "world": entry.world, **params.method(name).to_dict(), **overrides}


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the installed kinds (classes) of methods: the inputs they need, their options, and their packages."""
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
            typer.echo(f"  {option['name']}: {option['type']} = {json.dumps(option['default'])}")


@app.command()
def prepare(dataset: Dataset) -> None:
    """Write a data set's manifest (table of images), labels, statistics and a record of its source.

    For the built-in data set `shapes`, draw its images first. Later commands use the record to notice that the source
    was edited.
    """
    from duplex.project import stages

    stages.prepare(load_params(), dataset)
    log(f"wrote {ArtifactPaths().manifest(dataset)}")


@app.command()
def train(dataset: Dataset, method: Method = "duplex", seed: Seed = 0) -> None:
    """Train a method on cached features and write the checkpoint of the epoch that `training.select` chooses.

    The same command resumes interrupted training.
    """
    from duplex.project.train import train_stage

    outcome = train_stage(load_params(), dataset, method, seed)
    checkpoint = ArtifactPaths().run(dataset, method, seed).checkpoint
    chosen = "" if outcome.selected_by == "auc" else f" (chosen by {outcome.selected_by})"
    log(f"{checkpoint}: epoch {outcome.best_epoch}{chosen}, validation AUC {100 * outcome.best_auc:.2f}")


@app.command()
def evaluate(
    dataset: Dataset,
    method: Method = "duplex",
    seed: Seed = 0,
    stream: Annotated[bool, Option("--stream", help="Also evaluate while adapting to unlabelled test images.")] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained method on the test split, and write and print its metrics with 95 % intervals."""
    from duplex.config.params import StreamParams
    from duplex.project.stages import evaluate_stage

    params = load_params()
    if stream and params.evaluation.stream is None:
        evaluation = params.evaluation.model_copy(update={"stream": StreamParams()})
        params = params.model_copy(update={"evaluation": evaluation})
    record = evaluate_stage(params, dataset, method, seed)
    if as_json:
        print_json(record)
    for world in () if as_json else [world for world in WORLDS if world in record]:
        typer.echo(f"{world:6}  {metrics_line(record[world])}")
        if adapted := record.get("stream", {}).get(world):
            spread = f" ± {adapted['auc_sd']:.2f}" if "auc_sd" in adapted else ""
            kind = f"adapted by {record['stream']['adapter']}"
            typer.echo(f"{world:6}  {metrics_line(adapted)}{spread} over {record['stream']['orders']} orders, {kind}")
    if stream and "stream" not in record:
        raise UsageError("--stream had no effect on this run, as said above; choose a run with prompts")


@app.command()
def metrics(as_json: AsJson = False) -> None:
    """Print the metrics of all runs, averaged over seeds, and the path of the report."""
    from duplex.project.report import average_runs, read_all_metrics, warn_of_outdated
    from duplex.report.aggregate import NO_RUN, read_metrics
    from duplex.report.tables import metrics_as_text

    paths, params = ArtifactPaths(), load_params()
    runs, _ = read_all_metrics(params, paths)
    table = read_metrics(paths.summary, "dvc repro report") if runs or paths.summary.is_file() else {}
    if not table and not runs:
        raise DuplexError(NO_RUN)
    if average_runs(params, runs, paths) != table:
        log(f"{paths.summary} does not match the runs in {paths.root}; `duplex report` writes it again")
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
    """Train and evaluate all missing runs (data set × method × seed) in parallel, and commit them to DVC.

    Writes the same files as `dvc repro`, byte for byte, so `dvc repro` repeats no run. The same command
    resumes an interrupted sweep. A failed run does not stop the others; failures are listed at the end, and the command
    exits with 1.
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
        str, Argument(help="Name of a data set in ablations/params.yaml; with --methods, in params.yaml.")
    ] = "shapes",
    methods: Annotated[str | None, Option(help="Comma-separated methods to run with their published settings.")] = None,
    seeds: Annotated[str | None, Option(help="Seeds, such as 0-4; default: run.seeds (0-4 with --methods).")] = None,
    jobs: Jobs = None,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Only time a step of each method; print rows, disk space and hours."),
    ] = False,
) -> None:
    """Reproduce the rows of the paper's tables for a data set, and write a page that judges the paper's claims.

    Each row is a method of ablations/params.yaml. The command prepares the data set, extracts its features, and trains
    and evaluates the rows by the exact and the published protocol; the same command resumes it. With `--methods`, the
    rows are published methods, trained with their published settings on a data set of params.yaml.
    """
    from duplex.project.reproduce import PROJECT, PUBLISHED, plan_reproduction, published_params, published_settings
    from duplex.project.reproduce import reproduce as run

    folder, paths = Path(), ArtifactPaths()
    show = typer.echo if dry_run else log
    if names := split_names(methods):
        params, paths = published_params(dataset, names, parse_seeds(seeds) or range(5)), ArtifactPaths(PUBLISHED)
        show("\n".join(published_settings(params, dataset)))
    elif (PROJECT / "params.yaml").is_file():
        os.chdir(PROJECT)
        params, folder = load_params(), PROJECT
    else:
        raise UsageError(
            f"{PROJECT / 'params.yaml'}, which lists the paper's table rows, does not exist here; "
            "run the command in the project's folder"
        )
    plan = plan_reproduction(params, dataset, parse_seeds(seeds), jobs, paths)
    show("\n".join(plan.lines()))
    if dry_run:
        return
    report, page = run(plan, jobs, paths)
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
    """Outcome of a sweep on one line: `40 runs: 12 complete, 27 trained and evaluated in 61 s, 1 failed`."""
    trained = f"trained and evaluated in {report.seconds:.0f} s"
    runs = [(report.complete, "complete"), (report.executed, trained), (len(report.failed), "failed")]
    outside = (report.outside_pipeline, "not tracked by DVC, since `run` of params.yaml lacks them")
    parts = (runs, [(report.committed, "committed to DVC"), outside])
    texts = [", ".join(f"{count} {text}" for count, text in part if count) for part in parts]
    return f"{report.runs} runs: {'; '.join(filter(None, texts))}"


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
            raise UsageError(
                f"--seeds has {part!r}; expected numbers, or ranges such as 0-4 (ascending, up to {MAX_SEEDS:,} seeds)"
            )
        seeds += range(first, last + 1)
    return seeds or None


@app.command()
def tune(
    grid: Annotated[list[str], Option(help="Setting of all methods, such as learning_rate=3e-4,1e-3; repeatable.")],
    methods: Methods = None,
    dataset: Annotated[str | None, dataset_option("Data set; default: the first of run.datasets.")] = None,
    seeds: Annotated[str, Option(help="Seeds to tune with, such as 100-104; use none of run.seeds.")] = "100,101",
    jobs: Jobs = None,
    engine: Engine = "local",
    write: Annotated[bool, Option("--write", help="Write each method's best settings to datasets/NAME.yaml.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train methods with every combination of settings and list their validation AUC. Test images are not scored.

    Settings are training options, such as learning_rate and epochs, and options of the methods' kinds. Each method's
    best row is marked with *; --write saves its settings under `methods:` of datasets/NAME.yaml, unless other settings
    have the same AUC. Exits with 1 if a trial failed.
    """
    from duplex.config.datasets import write_settings
    from duplex.project.sweep import best_rows
    from duplex.project.sweep import tune as search

    params = load_params()
    name = require(dataset or params.run.datasets[0], params.datasets, "data set")
    chosen = split_names(methods) or [each for each in params.run.methods if not params.entry(each).members]
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
        tied = [other for other in rows if other.method == row.method and other.val_auc == row.val_auc]
        if len(tied) > 1:
            del best[row.method]
            ends = "none of them is written" if write else "* marks the first"
            log(f"{row.method}: {len(tied)} settings have the same best AUC, {row.val_auc:.2f}; {ends}")
    for method, row in best.items() if write else ():
        before = load_params().methods
        write_settings(params, method, name, row.settings)
        heirs = [each for each, entry in load_params().methods.items() if entry != before[each] and each != method]
        more = f"; also in effect for {', '.join(heirs)}, by `extends`" if heirs else ""
        log(f"datasets/{name}.yaml: methods.{method}: {dict(row.settings)}{more}")
    if any(row.errors for row in rows):
        raise typer.Exit(1)


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read texts such as `learning_rate=3e-4,1e-3`, values in YAML; returns a dict: setting -> list of values."""
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
            raise UsageError(f"--grid is {text!r}; expected a setting and its values, such as learning_rate=3e-4,1e-3")
        if name in choices:
            raise UsageError(f"--grid has {name} twice; give all its values in one --grid")
        choices[name] = parsed
    return choices


def tuning_table(rows: Sequence[TuningRow], best: Sequence[TuningRow]) -> str:
    """Results of `duplex tune` as a text table that marks the rows in `best` with *."""
    lines = [["", "method", "settings", "val AUC", "±", "all pairs", "epoch", "seconds"]]
    forms = {"val_auc": ".2f", "val_auc_se": ".2f", "val_auc_all": ".2f", "epoch": ".1f", "seconds": ".1f"}
    for row in rows:
        record = row.to_dict()
        values = {key: f"{value:g}" if isinstance(value, float) else value for key, value in row.settings.items()}
        settings = ", ".join(f"{name} {value}" for name, value in values.items())
        numbers = ["failed", "", "", "", ""]
        if "error" not in record:
            numbers = [number(record[name], form) for name, form in forms.items()]
        lines.append(["*" if row in best else "", row.method, settings, *numbers])
    return aligned(lines)


SHARED_COLUMNS = ["row", "image", "label", "seen"]  # must agree between both runs


@app.command()
def compare(
    dataset: Dataset,
    methods: Annotated[tuple[str, str], method_option(help="Two methods to compare: FIRST SECOND.")],
    seed: Annotated[int | None, seed_option("Seed of the runs; default: all seeds that both methods have.")] = None,
    world: Annotated[str, Option(help="World to compare in: closed or open.")] = "closed",
    splits: Annotated[int | None, Option(min=2, help="Average over this many splits from `duplex data split`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print how far the second method's S, U, HM and AUC exceed the first's, in percentage points.

    Each difference has a 95 % interval and a p-value, which cover variance over test images, seeds and re-splits (other
    random choices of unseen pairs). METHOD+stream is a method that adapts to the test images, in the first of the
    orders that `duplex evaluate --stream` tries. Margins, the biases at which images become right or wrong, are read
    from predictions.csv with nine digits; equal margins count as ties.
    """
    from duplex.data.tables import split_name

    params = load_params()
    params.dataset(dataset)
    require(world, WORLDS, "world")
    names = [dataset] if splits is None else [split_name(dataset, number + 1) for number in range(splits)]
    if missing := next((name for name in names if name not in params.datasets), None):
        raise UsageError(f"there is no data set {missing}; `duplex data split {dataset} --splits {splits}` adds it")
    runs = {name: _margins_of_runs(params, name, methods, seed, world) for name in names}
    report: dict[str, Any] = {"dataset": dataset, "world": world, "first": methods[0], "second": methods[1]}
    if splits is None:
        seeds, first, second = runs[dataset]
        images = {"images_seen": first[0].seen.size, "images_unseen": first[0].unseen.size}
        report |= {"seeds": seeds, **images, "difference": in_percentage_points(compare_seeds(first, second))}
    else:
        report |= _splits_report(runs)
    if as_json:
        print_json(report)
    else:
        typer.echo(_text(report))


def _splits_report(runs: Mapping[str, tuple[list[int], list[Margins], list[Margins]]]) -> dict[str, Any]:
    comparison = compare_splits([first for _, first, _ in runs.values()], [second for _, _, second in runs.values()])
    return {
        "splits": [
            {"dataset": name, "seeds": seeds, "difference": {key: 100 * value for key, value in gain.items()}}
            for (name, (seeds, _, _)), gain in zip(runs.items(), comparison.by_split, strict=True)
        ],
        "difference": in_percentage_points(comparison.difference),
        "deviation": {name: 100 * value for name, value in comparison.deviation.items()},
    }


def _margins_of_runs(
    params: Params, dataset: str, methods: tuple[str, str], seed: int | None, world: str
) -> tuple[list[int], list[Margins], list[Margins]]:
    from duplex.project.stamps import RUN_STAGES, require_data, run_difference
    from duplex.report.aggregate import STREAM

    require_data(params, dataset)
    entries = [params.method_for_world(method.removesuffix(STREAM), world) for method in methods]  # type: ignore[arg-type]
    seeds = [seed] if seed is not None else _common_seeds(params, dataset, methods, entries)
    margins: list[list[Margins]] = [[], []]
    first: tuple[Path, str, pd.DataFrame] | None = None
    for name, entry, margins_by_seed in zip(methods, entries, margins, strict=True):
        for run_seed in seeds:
            files = ArtifactPaths().run(dataset, entry, run_seed)
            path = files.predictions
            run = f"--dataset {dataset} --method {entry} --seed {run_seed}"
            table = _read_predictions(path, run, world, name.endswith(STREAM))
            first = first or (path, run, table)
            if differing := next((name for name in SHARED_COLUMNS if not first[2][name].equals(table[name])), None):
                message = f"{first[0]} and {path} come from different data: they differ in the column {differing!r}"
                raise UsageError(f"{message}; run `duplex evaluate {first[1]}` and then `duplex evaluate {run}`")
            is_seen = table["seen"].to_numpy(dtype=bool)
            margin = table["margin"].to_numpy(dtype=float)
            margins_by_seed.append(Margins(margin[is_seen], margin[~is_seen], is_seen))
            if not files.checkpoint.is_file():
                continue
            if found := run_difference(params, dataset, entry, run_seed, stages=RUN_STAGES):
                message = f"{files.root} does not match {entry} with seed {run_seed} in params.yaml: {found}"
                log(f"duplex: {message}; `dvc repro` makes it again")
    return seeds, margins[0], margins[1]


def _common_seeds(params: Params, dataset: str, methods: Sequence[str], entries: list[str]) -> list[int]:
    from duplex.report.aggregate import STREAM, stored_numbers

    names = []
    for name, run in zip(methods, (ArtifactPaths().run(dataset, entry, 0) for entry in entries), strict=True):
        roots = {file.parent for file in run.root.parent.glob(f"*/{run.predictions.name}")}
        known = {root.name: stored_numbers(root / run.metrics.name) or {} for root in roots}
        names.append({each for each in known if "stream" in known[each] or not name.endswith(STREAM)})
    return sorted(int(name) for name in set.intersection(*names) if name.isdecimal()) or sorted(params.run.seeds)[:1]


def _read_predictions(file: Path, run: str, world: str, streamed: bool) -> pd.DataFrame:
    from duplex.report.aggregate import read_table

    table = read_table(file, f"`duplex evaluate {run}` writes it again")
    if table is None:
        raise DuplexError(f"{file} does not exist; run `duplex train {run}` and then `duplex evaluate {run}`")
    images = table[table["world"] == (f"{world} stream" if streamed else world)]
    if images.empty and streamed:
        raise DuplexError(f"{file} has no {world}-world results of METHOD+stream; run `duplex evaluate {run} --stream`")
    if images.empty:
        raise DuplexError(
            f"{file} has no results for the {world} world; "
            f"add {world} to evaluation.worlds in params.yaml and run `duplex evaluate {run}`"
        )
    return images.sort_values("row", kind="stable").reset_index(drop=True)


def _text(report: dict[str, Any]) -> str:
    splits = report.get("splits")
    seeds = sorted({seed for split in splits or [report] for seed in split["seeds"]})
    seed_list = ", ".join(map(str, seeds))
    if splits:
        runs = f"mean of {len(splits)} splits, seeds {seed_list}"
    else:
        runs = f"seed {seed_list}" if len(seeds) == 1 else f"mean of seeds {seed_list}"
    lines = [f"{report['second']} - {report['first']}: {report['dataset']}, {report['world']} world, {runs}"]
    lines += [estimate_line(f"{METRICS[name]:<5}", gain) for name, gain in report["difference"].items()]
    if not splits:
        return "\n".join([*lines, f"{report['images_seen']} seen and {report['images_unseen']} unseen images"])
    gains = {split["dataset"]: split["difference"] for split in splits} | {"deviation": report["deviation"]}
    rows = [
        [name, *(f"{METRICS[key]} {number(gain):>6}" for key, gain in each.items())] for name, each in gains.items()
    ]
    return "\n".join([*lines, aligned(rows)])


PROTOCOLS = ("exact", "sampled")


@app.command()
def score(
    file: Annotated[Path, Argument(help="Score file (.npz, .h5), or CSV of predicted pairs; formats: docs/scores.md.")],
    other: Annotated[Path | None, Argument(help="A second score file for the same images, to compare.")] = None,
    k: Annotated[list[int] | None, Option("--k", help="k of top-k accuracy; repeatable; default: as in FILE.")] = None,
    protocol: Annotated[str, Option(help="Seen-unseen curve: exact, or sampled at ~20 biases as in papers.")] = "exact",
    rounds: Annotated[
        int, Option(min=0, help="Bootstrap resamples for intervals; with 0, only AUC has an interval.")
    ] = 1000,
    seed: Annotated[int, seed_option("Seed of the bootstrap.", "--seed")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print seen and unseen accuracy, best harmonic mean and AUC of a score file, in percent, with 95 % intervals."""
    require(protocol, PROTOCOLS, "protocol")
    if k is not None and min(k) < 1:
        raise UsageError(f"--k is {min(k)}; expected a whole number of at least 1")
    if file.suffix == ".csv":
        if other is not None or k is not None or protocol != "exact":
            raise UsageError(f"{file} holds answers, not scores; give it alone, without --k and --protocol")
        report = _score_answers(file)
    elif other is None:
        report = _score(file, k, protocol, rounds, seed)
    elif protocol == "sampled":
        raise UsageError("two files can only be compared on the exact curve; leave out --protocol sampled")
    else:
        report = _compare(file, other, k, rounds, seed)
    typer.echo(json.dumps(report, indent=2, allow_nan=False) if as_json else _score_text(report))


def _score_answers(path: Path) -> dict[str, Any]:
    from duplex.data.tables import read_table

    table = read_table(path, needed=("state", "object", "answer_state", "answer_object")).map(prompt_name)
    state, thing = table["state"] == table["answer_state"], table["object"] == table["answer_object"]
    shares = {"pair": state & thing, "state": state, "object": thing}
    return {"file": str(path), "images": len(table)} | {name: 100 * float(each.mean()) for name, each in shares.items()}


def _score(path: Path, ks: list[int] | None, protocol: str, rounds: int, seed: int) -> dict[str, Any]:
    from duplex.evaluation.metrics import sampled_bias_metrics
    from duplex.evaluation.score_files import open_score_file

    with open_score_file(path) as scores:
        distinct = tuple(dict.fromkeys(ks or scores.ks))
        _check_k(scores, max(distinct))
        if protocol == "exact":
            _, (first, *more) = _measure(scores, distinct, rounds, seed)
        else:
            arrays = (scores.target, scores.seen, scores.feasible_mask)
            with _path_in_errors(scores.path):
                first, *more = [sampled_bias_metrics(lambda: _blocks(scores), *arrays, k).to_dict() for k in distinct]
    report = {"file": str(path), "protocol": protocol, **first}
    return report | ({"top": {str(result["k"]): result for result in more}} if more else {})


def _check_k(scores: ScoreFile, k: int) -> None:
    if k > scores.seen.size:
        raise UsageError(f"{scores.path}: k is {k}, but there are {scores.seen.size} candidates; choose a smaller --k")


@contextmanager
def _path_in_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except DuplexError as error:
        raise UsageError(f"{path}: {error}") from error


def _blocks(scores: ScoreFile) -> Iterable[tuple[slice, Any]]:
    from duplex.system.processes import track

    return track(scores.blocks(), scores.path.name, len(scores.steps))


def _measure(
    scores: ScoreFile, ks: tuple[int, ...], rounds: int, seed: int
) -> tuple[TopCompetitors, list[dict[str, Any]]]:
    accumulator = ScoreAccumulator(scores.target, scores.seen, k=max(ks), feasible_mask=scores.feasible_mask)
    if scores.feasible_mask is not None and not scores.feasible_mask[scores.target].all():
        lost = int((~scores.feasible_mask[scores.target]).sum())
        log(f"{scores.path}: feasible_mask excludes the labels of {lost} images; these count as wrong")
    with _path_in_errors(scores.path):
        for rows, block in _blocks(scores):
            accumulator.add(block, rows)
    competitors = accumulator.competitors()
    options: dict[str, Any] = {"states": scores.states, "objects": scores.objects, "rounds": rounds, "seed": seed}
    return competitors, [measure(competitors, k, **options).to_dict() for k in ks]


def _compare(first: Path, second: Path, ks: list[int] | None, rounds: int, seed: int) -> dict[str, Any]:
    from duplex.evaluation.intervals import compare
    from duplex.evaluation.score_files import open_score_file, require_same_columns

    with open_score_file(first) as first_scores, open_score_file(second) as second_scores:
        require_same_columns(first_scores, second_scores)
        k = (ks or first_scores.ks)[0]
        second_k = (ks or second_scores.ks)[0]
        if k != second_k:
            raise UsageError(f"k is {k} for {first} and {second_k} for {second} (default: 1); set both with --k {k}")
        _check_k(first_scores, k)
        if ks and len(ks) > 1:
            raise UsageError(f"--k is given {len(ks)} times; give it once to compare two files")
        before, first_metrics = _measure(first_scores, (k,), rounds, seed)
        after, second_metrics = _measure(second_scores, (k,), rounds, seed)
    difference = compare(Margins.of(before, k), Margins.of(after, k), rounds=rounds, seed=seed)
    return {
        "first": {"file": str(first), **first_metrics[0]},
        "second": {"file": str(second), **second_metrics[0]},
        "difference": in_percentage_points(difference),
    }


def _score_text(report: dict[str, Any]) -> str:
    if "difference" in report:
        lines = [f"{report[name]['file']}\n{_table(report[name])}" for name in ("first", "second")]
        gains = (estimate_line(f"{name:<10}", gain) for name, gain in report["difference"].items())
        return "\n".join([*lines, "second - first", *gains])
    if "pair" in report:
        return "\n".join(f"{name:<10}{number(report[name]):>6}" for name in ("pair", "state", "object"))
    return "\n".join(map(_table, [report, *report.get("top", {}).values()]))


def _table(metrics: dict[str, Any]) -> str:
    lines = [f"top-{metrics['k']}"]
    lines += [
        estimate_line(f"{name:<10}", {"value": metrics[name], "interval": metrics[f"{name}_interval"]})
        for name in METRICS
    ]
    if metrics["state_accuracy"] is not None or metrics["object_accuracy"] is not None:
        lines += [f"{name:<10}{number(metrics[f'{name}_accuracy']):>6}" for name in ("state", "object")]
    images = f"{metrics['images_seen']} seen and {metrics['images_unseen']} unseen images"
    tied = f", {metrics['tied']:.1f} % with a tied label" if metrics["tied"] else ""
    return "\n".join([*lines, images + tied])
