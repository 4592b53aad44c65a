"""`duplex compare` and `duplex score`: differences between runs, and metrics of score files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from duplex.artifacts import ArtifactPaths
from duplex.cli import METHODS, AsJson, Dataset, app, load_params, log, method_option, print_json, seed_option
from duplex.cli.runs import split_names
from duplex.errors import DuplexError, UsageError, require
from duplex.evaluation.accumulate import ScoreAccumulator, TopCompetitors
from duplex.evaluation.curve import Margins
from duplex.evaluation.intervals import compare_seeds, compare_splits, in_percentage_points
from duplex.evaluation.metrics import METRICS, OWN_ANSWERS, PART_METRICS, aligned, estimate_line, measure, number
from duplex.labels import WORLDS, prompt_name

if TYPE_CHECKING:
    import pandas as pd

    from duplex.config.params import Params
    from duplex.evaluation.score_files import ScoreFile

SHARED_COLUMNS = ["row", "image", "label", "seen"]  # must agree between both runs


@app.command()
def compare(
    dataset: Dataset,
    methods: Annotated[str, method_option(help="FIRST and one or more others, separated by spaces or commas.")],
    others: Annotated[list[str] | None, Argument(help="The methods after FIRST.", autocompletion=METHODS)] = None,
    seed: Annotated[int | None, seed_option("Seed; default: all seeds that both methods have.")] = None,
    world: Annotated[str, Option(help="World to compare in: closed or open.")] = "closed",
    splits: Annotated[int | None, Option(min=2, help="Average over as many splits of `duplex data split`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the differences of two methods' S, U, HM and AUC, second minus first.

    Each further method is compared with the first, too; `--json` then prints a list.

    Differences are in percentage points. Each has a 95 % interval and a p-value, which cover
    variance over test images, seeds and re-splits (other random choices of unseen pairs). Below are
    both methods' accuracy without a bias, and the share of images of unseen pairs that they answer
    by a seen pair. METHOD+stream is a method that adapts to the test images, in the first order of
    `duplex evaluate --stream`. Margins, the biases at which images become right or wrong, are read
    with nine digits; equal margins count as ties.
    """
    from duplex.data.tables import split_name

    params = load_params()
    params.dataset(dataset)
    require(world, WORLDS, "world")
    first, *rest = (split_names(methods) or []) + (others or [])
    if not rest:
        raise UsageError(f"there is nothing to compare {first} with; give two or more methods after --methods")
    names = [dataset]
    if splits is not None:
        names = [split_name(dataset, number + 1) for number in range(splits)]
    missing = next((name for name in names if name not in params.datasets), None)
    if missing is not None:
        command = f"duplex data split {dataset} --splits {splits}"
        raise UsageError(f"there is no data set {missing}; `{command}` adds it")
    log_once = cache(log)  # all pairs have the first method
    reports: list[dict[str, Any]] = []
    for second in rest:
        runs = {name: _read_runs(params, name, (first, second), seed, world, log_once) for name in names}
        differences = _seeds_report(runs[dataset]) if splits is None else _splits_report(runs)
        report = {"dataset": dataset, "world": world, "first": first, "second": second, **differences}
        reports.append({**report, "own_answers": _own_answers(list(runs.values()))})
    if as_json:
        print_json(reports if len(reports) > 1 else reports[0])
    else:
        typer.echo("\n\n".join(map(_text, reports)))


@dataclass(frozen=True)
class ComparedRuns:
    """Margins of two methods' runs with the same seeds, and their `metrics.json` for a world."""

    seeds: list[int]
    first: list[Margins]
    second: list[Margins]
    metrics: tuple[list[dict[str, Any]], list[dict[str, Any]]]  # of the first, of the second


def _own_answers(runs: Sequence[ComparedRuns]) -> dict[str, dict[str, float]]:
    """Each method's `OWN_ANSWERS`: means over seeds, then splits, if all runs have them."""
    found: dict[str, dict[str, float]] = {}
    for place, side in enumerate(("first", "second")):
        for name in OWN_ANSWERS:
            by_split: list[list[Any]] = [[each.get(name) for each in run.metrics[place]] for run in runs]
            if not any(None in values for values in by_split):
                found.setdefault(name, {})[side] = fmean(fmean(values) for values in by_split)
    return {name: sides for name, sides in found.items() if len(sides) == 2}


def _seeds_report(pair: ComparedRuns) -> dict[str, Any]:
    return {
        "seeds": pair.seeds,
        "images_seen": pair.first[0].seen.size,
        "images_unseen": pair.first[0].unseen.size,
        "difference": in_percentage_points(compare_seeds(pair.first, pair.second)),
    }


def _splits_report(runs: Mapping[str, ComparedRuns]) -> dict[str, Any]:
    pairs = runs.values()
    comparison = compare_splits([pair.first for pair in pairs], [pair.second for pair in pairs])
    splits = []
    for (name, pair), gain in zip(runs.items(), comparison.by_split, strict=True):
        difference = {key: 100 * value for key, value in gain.items()}
        splits.append({"dataset": name, "seeds": pair.seeds, "difference": difference})
    return {
        "splits": splits,
        "difference": in_percentage_points(comparison.difference),
        "deviation": {name: 100 * value for name, value in comparison.deviation.items()},
    }


def _read_runs(
    params: Params,
    dataset: str,
    methods: tuple[str, str],
    seed: int | None,
    world: str,
    log_once: Callable[[str], None],
) -> ComparedRuns:
    from duplex.project.run import RUN_STAGES, ProjectData
    from duplex.report.aggregate import STREAM, stored_numbers

    data = ProjectData(params, dataset)
    data.require()
    names = [method.removesuffix(STREAM) for method in methods]
    entries = [params.method_for_world(name, world) for name in names]  # type: ignore[arg-type]
    if entries[0] == entries[1] and methods[0].endswith(STREAM) == methods[1].endswith(STREAM):
        same = f"{methods[0]} and {methods[1]} are the same run ({entries[0]})"
        raise UsageError(f"{same} in the {world} world; give two methods")
    seeds = [seed] if seed is not None else _common_seeds(params, dataset, methods, entries)
    margins: list[list[Margins]] = [[], []]
    metrics: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    first: tuple[Path, str, pd.DataFrame] | None = None
    for name, entry, margins_by_seed, metrics_by_seed in zip(methods, entries, margins, metrics, strict=True):
        for run_seed in seeds:
            files = ArtifactPaths().run(dataset, entry, run_seed)
            path = files.predictions
            run = f"--dataset {dataset} --method {entry} --seed {run_seed}"
            table = _read_predictions(path, run, world, name.endswith(STREAM))
            first = first or (path, run, table)
            differing = [name for name in SHARED_COLUMNS if not first[2][name].equals(table[name])]
            if differing:
                where = f"different data: they differ in the column {differing[0]!r}"
                fix = f"run `duplex evaluate {first[1]}` and then `duplex evaluate {run}`"
                raise UsageError(f"{first[0]} and {path} come from {where}; {fix}")
            is_seen = table["seen"].to_numpy(dtype=bool)
            margin = table["margin"].to_numpy(dtype=float)
            margins_by_seed.append(Margins(margin[is_seen], margin[~is_seen], is_seen))
            # a stream's metrics are means over orders, of which this is the first
            stored = {} if name.endswith(STREAM) else stored_numbers(files.metrics) or {}
            metrics_by_seed.append(stored.get(world, {}))
            if not files.checkpoint.is_file():
                continue
            found = data.run(entry, run_seed).difference(*RUN_STAGES)
            if found:
                wanted = f"{entry} with seed {run_seed} in params.yaml"
                log_once(f"duplex: {files.root} does not match {wanted}: {found}; `dvc repro` makes it again")
    return ComparedRuns(seeds, margins[0], margins[1], metrics)


def _common_seeds(params: Params, dataset: str, methods: Sequence[str], entries: list[str]) -> list[int]:
    from duplex.report.aggregate import STREAM, stored_numbers

    common: set[str] | None = None
    for name, entry in zip(methods, entries, strict=True):
        run = ArtifactPaths().run(dataset, entry, 0)
        seeds = set()
        for file in run.root.parent.glob(f"*/{run.predictions.name}"):
            metrics = stored_numbers(file.parent / run.metrics.name) or {}
            if "stream" in metrics or not name.endswith(STREAM):
                seeds.add(file.parent.name)
        common = seeds if common is None else common & seeds
    numbers = sorted(int(seed) for seed in common or () if seed.isdecimal())
    return numbers or sorted(params.run.seeds)[:1]


def _read_predictions(file: Path, run: str, world: str, streamed: bool) -> pd.DataFrame:
    from duplex.report.aggregate import read_table

    table = read_table(file, f"`duplex evaluate {run}` writes it again")
    if table is None:
        commands = f"`duplex train {run}` and then `duplex evaluate {run}`"
        raise DuplexError(f"{file} does not exist; run {commands}")
    images = table[table["world"] == (f"{world} stream" if streamed else world)]
    if images.empty and streamed:
        problem = f"{file} has no {world}-world results of METHOD+stream"
        raise DuplexError(f"{problem}; run `duplex evaluate {run} --stream`")
    if images.empty:
        fix = f"add {world} to evaluation.worlds in params.yaml and run `duplex evaluate {run}`"
        raise DuplexError(f"{file} has no results for the {world} world; {fix}")
    return images.sort_values("row", kind="stable").reset_index(drop=True)


def _text(report: dict[str, Any]) -> str:
    splits = report.get("splits", [])
    seeds: set[int] = set()
    for part in splits or [report]:
        seeds |= set(part["seeds"])
    seed_list = ", ".join(map(str, sorted(seeds)))
    runs = f"seed {seed_list}" if len(seeds) == 1 else f"mean of seeds {seed_list}"
    if splits:
        runs = f"mean of {len(splits)} splits, seeds {seed_list}"
    what = f"{report['second']} - {report['first']}: {report['dataset']}"
    lines = [f"{what}, {report['world']} world, {runs}"]
    for name, gain in report["difference"].items():
        lines.append(estimate_line(f"{METRICS[name]:<5}", gain))
    for name, sides in report["own_answers"].items():
        both = ", ".join(f"{report[side]} {value:.1f}" for side, value in sides.items())
        lines.append(f"{PART_METRICS[name]}: {both}")
    if not splits:
        images = f"{report['images_seen']} seen and {report['images_unseen']} unseen images"
        return "\n".join([*lines, images])
    gains = {split["dataset"]: split["difference"] for split in splits}
    rows = []
    for name, each in {**gains, "deviation": report["deviation"]}.items():
        rows.append([name, *(f"{METRICS[key]} {number(gain):>6}" for key, gain in each.items())])
    return "\n".join([*lines, aligned(rows)])


PROTOCOLS = ("exact", "sampled")


@app.command()
def score(
    file: Annotated[Path, Argument(help="Score file (.npz, .h5), or CSV of predicted pairs; see docs/metrics.md.")],
    other: Annotated[Path | None, Argument(help="A second score file for the same images, to compare.")] = None,
    k: Annotated[list[int] | None, Option("--k", help="k of top-k accuracy; repeatable; default: FILE's.")] = None,
    protocol: Annotated[str, Option(help="Curve: exact, or sampled at ~20 biases as in papers.")] = "exact",
    rounds: Annotated[int, Option(min=0, help="Bootstrap resamples; 0: only AUC has an interval.")] = 1000,
    seed: Annotated[int, seed_option("Seed of the bootstrap.", "--seed")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print S, U, HM and AUC of a score file, in percent, with 95 % intervals."""
    require(protocol, PROTOCOLS, "protocol")
    if k is not None and min(k) < 1:
        raise UsageError(f"--k is {min(k)}; expected a whole number of at least 1")
    if file.suffix == ".csv":
        if other is not None or k is not None or protocol != "exact":
            problem = f"{file} holds answers, not scores"
            raise UsageError(f"{problem}; give it alone, without --k and --protocol")
        report = _score_answers(file)
    elif other is None:
        report = _score(file, k, protocol, rounds, seed)
    elif protocol == "sampled":
        problem = "two files can only be compared on the exact curve"
        raise UsageError(f"{problem}; leave out --protocol sampled")
    else:
        report = _compare(file, other, k, rounds, seed)
    if as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        typer.echo(_score_text(report))


def _score_answers(path: Path) -> dict[str, Any]:
    from duplex.data.tables import read_table

    columns = ("state", "object", "answer_state", "answer_object")
    table = read_table(path, needed=columns).map(prompt_name)
    state = table["state"] == table["answer_state"]
    thing = table["object"] == table["answer_object"]
    report: dict[str, Any] = {"file": str(path), "images": len(table)}
    for name, right in {"pair": state & thing, "state": state, "object": thing}.items():
        report[name] = 100 * float(right.mean())
    return report


def _score(path: Path, ks: list[int] | None, protocol: str, rounds: int, seed: int) -> dict[str, Any]:
    from duplex.evaluation.metrics import sampled_bias_metrics
    from duplex.evaluation.score_files import open_score_file

    with open_score_file(path) as scores:
        distinct = tuple(dict.fromkeys(ks or scores.ks))
        _check_k(scores, max(distinct))
        if protocol == "exact":
            _, measured = _measure(scores, distinct, rounds, seed)
        else:
            measured = []
            arrays = (scores.target, scores.seen, scores.feasible_mask)
            with _path_in_errors(scores.path):
                for k in distinct:
                    metrics = sampled_bias_metrics(lambda: _blocks(scores), *arrays, k)
                    measured.append(metrics.to_dict())
    report = {"file": str(path), "protocol": protocol, **measured[0]}
    if len(measured) > 1:
        report["top"] = {str(result["k"]): result for result in measured[1:]}
    return report


def _check_k(scores: ScoreFile, k: int) -> None:
    if k > scores.seen.size:
        problem = f"k is {k}, but there are {scores.seen.size} candidates"
        raise UsageError(f"{scores.path}: {problem}; choose a smaller --k")


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
    mask = scores.feasible_mask
    accumulator = ScoreAccumulator(scores.target, scores.seen, k=max(ks), feasible_mask=mask)
    if mask is not None and not mask[scores.target].all():
        lost = int((~mask[scores.target]).sum())
        excluded = f"feasible_mask excludes the labels of {lost} images"
        log(f"{scores.path}: {excluded}; these count as wrong")
    with _path_in_errors(scores.path):
        for rows, block in _blocks(scores):
            accumulator.add(block, rows)
    competitors = accumulator.competitors()
    names = {"states": scores.states, "objects": scores.objects}
    measured = [measure(competitors, k, **names, rounds=rounds, seed=seed) for k in ks]
    return competitors, [metrics.to_dict() for metrics in measured]


def _compare(first: Path, second: Path, ks: list[int] | None, rounds: int, seed: int) -> dict[str, Any]:
    from duplex.evaluation.intervals import compare
    from duplex.evaluation.score_files import open_score_file, require_same_columns

    with open_score_file(first) as first_scores, open_score_file(second) as second_scores:
        require_same_columns(first_scores, second_scores)
        k = (ks or first_scores.ks)[0]
        second_k = (ks or second_scores.ks)[0]
        if k != second_k:
            problem = f"k is {k} for {first} and {second_k} for {second} (default: 1)"
            raise UsageError(f"{problem}; set both with --k {k}")
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
    for name in METRICS:
        estimate = {"value": metrics[name], "interval": metrics[f"{name}_interval"]}
        lines.append(estimate_line(f"{name:<10}", estimate))
    if metrics["state_accuracy"] is not None or metrics["object_accuracy"] is not None:
        lines += [f"{name:<10}{number(metrics[f'{name}_accuracy']):>6}" for name in ("state", "object")]
    for name in OWN_ANSWERS:
        if metrics.get(name) is not None:
            lines.append(f"{PART_METRICS[name]:<10}{number(metrics[name]):>6}")
    images = f"{metrics['images_seen']} seen and {metrics['images_unseen']} unseen images"
    tied = f", {metrics['tied']:.1f} % with a tied label" if metrics["tied"] else ""
    return "\n".join([*lines, images + tied])
