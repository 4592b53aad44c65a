"""`duplex score`: print the metrics of a file of scores, from any model; with two files, also compare them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.cli import app
from duplex.cli.options import AsJson, seed_option
from duplex.errors import DuplexError, UsageError, require
from duplex.metric_table import METRICS, estimate_line, number, to_points

if TYPE_CHECKING:
    from duplex.evaluation.accumulator import TopCompetitors
    from duplex.evaluation.scores import ScoreFile

PROTOCOLS = ("exact", "sampled")


@app.command()
def score(
    file: Annotated[
        Path,
        typer.Argument(
            help="Score file, .npz or .h5, of N images and C candidates: scores [N, C], target [N], seen [C]; "
            "optional: feasible_mask [C], k."
        ),
    ],
    other: Annotated[Path | None, typer.Argument(help="A second score file for the same images, to compare.")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", help="k of top-k; repeatable; default: the k in FILE.")] = None,
    protocol: Annotated[
        str, typer.Option(help="Seen-unseen curve: exact, or sampled at about 20 biases, as in published tables.")
    ] = "exact",
    rounds: Annotated[
        int,
        typer.Option(min=0, help="Number of bootstrap resamples for intervals; 0: only AUC gets one, by a formula."),
    ] = 1000,
    seed: Annotated[int, seed_option("Seed of the bootstrap.", "--seed")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print seen and unseen accuracy, best harmonic mean and AUC of a score file, in percent, with 95 % intervals."""
    require(protocol, PROTOCOLS, "protocol")
    if k is not None and min(k) < 1:
        raise UsageError(f"--k is {min(k)}; expected a whole number from 1 on")
    if other is None:
        report = _score(file, k, protocol, rounds, seed)
    elif protocol == "sampled":
        raise UsageError("two files are compared on the exact curve; leave out --protocol sampled")
    else:
        report = _compare(file, other, k, rounds, seed)
    typer.echo(json.dumps(report, indent=2, allow_nan=False) if as_json else _text(report))


def _score(path: Path, ks: list[int] | None, protocol: str, rounds: int, seed: int) -> dict[str, Any]:
    """Metrics of the top k answers, k = `ks[0]`; those for the further k are under the key `top`."""
    from duplex.evaluation.sampled import sampled_metrics
    from duplex.evaluation.scores import open_scores

    with open_scores(path) as scores:
        distinct = tuple(dict.fromkeys(ks or scores.ks))
        _check_k(scores, max(distinct))
        if protocol == "exact":
            _, (first, *more) = _measure(scores, distinct, rounds, seed)
        else:
            arrays = (scores.target, scores.seen, scores.feasible_mask)
            with _path_in_errors(scores.path):
                first, *more = [sampled_metrics(lambda: _blocks(scores), *arrays, k).to_dict() for k in distinct]
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
    from duplex.system.progress import track

    return track(scores.blocks(), scores.path.name, len(scores.steps))


def _measure(
    scores: ScoreFile, ks: tuple[int, ...], rounds: int, seed: int
) -> tuple[TopCompetitors, list[dict[str, Any]]]:
    """Score statistics (numbers per image) of a score file, and top-k metrics for each k in `ks`."""
    from duplex.evaluation.accumulator import ScoreAccumulator
    from duplex.evaluation.metrics import measure

    accumulator = ScoreAccumulator(scores.target, scores.seen, k=max(ks), feasible_mask=scores.feasible_mask)
    if scores.feasible_mask is not None and not scores.feasible_mask[scores.target].all():
        lost = int((~scores.feasible_mask[scores.target]).sum())
        typer.echo(f"{scores.path}: feasible_mask excludes the labels of {lost} images; they count as wrong", err=True)
    with _path_in_errors(scores.path):
        for rows, block in _blocks(scores):
            accumulator.add(block, rows)
    competitors = accumulator.competitors()
    options: dict[str, Any] = {"states": scores.states, "objects": scores.objects, "rounds": rounds, "seed": seed}
    return competitors, [measure(competitors, k, **options).to_dict() for k in ks]


def _compare(first: Path, second: Path, ks: list[int] | None, rounds: int, seed: int) -> dict[str, Any]:
    from duplex.evaluation.curve import Margins
    from duplex.evaluation.scores import open_scores, require_same_columns
    from duplex.evaluation.uncertainty import compare

    with open_scores(first) as first_scores, open_scores(second) as second_scores:
        require_same_columns(first_scores, second_scores)
        first_k, second_k = ((ks or scores.ks)[0] for scores in (first_scores, second_scores))
        if first_k != second_k:
            raise UsageError(f"k is {first_k} in {first} and {second_k} in {second}; choose one with --k")
        k = first_k
        _check_k(first_scores, k)
        if ks and len(ks) > 1:
            raise UsageError(f"--k is given {len(ks)} times; give it once to compare two files")
        competitors, metrics = zip(
            *(_measure(scores, (k,), rounds, seed) for scores in (first_scores, second_scores)), strict=True
        )
    before, after = (Margins.of(statistics, k) for statistics in competitors)
    return {
        "first": {"file": str(first), **metrics[0][0]},
        "second": {"file": str(second), **metrics[1][0]},
        "difference": to_points(compare(before, after, rounds=rounds, seed=seed)),
    }


def _text(report: dict[str, Any]) -> str:
    if "difference" in report:
        lines = [f"{report[name]['file']}\n{_table(report[name])}" for name in ("first", "second")]
        gains = (estimate_line(f"{name:<10}", gain) for name, gain in report["difference"].items())
        return "\n".join([*lines, "second - first", *gains])
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
