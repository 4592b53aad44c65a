"""`duplex score`: every metric from a file of anyone's scores; two files give the paired comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.cli.differences import number, p_value, points, span
from duplex.errors import DuplexError, UsageError, require
from duplex.system.script import LARGEST_SEED

if TYPE_CHECKING:
    from duplex.evaluation.accumulator import Rivals
    from duplex.evaluation.scores import ScoreFile

PROTOCOLS = ("exact", "sampled")
SHOWN = ("seen", "unseen", "hm", "auc")


def register(app: typer.Typer) -> None:
    """Add `score` to the `duplex` command."""

    @app.command()
    def score(
        file: Annotated[Path, typer.Argument(help=".npz or .h5 with scores [N, C], target [N], seen [C]; live [C], k")],
        other: Annotated[Path | None, typer.Argument(help="a second method's scores of the same images")] = None,
        *,
        k: Annotated[list[int] | None, typer.Option("--k", help="top-k; may be repeated (default: the file's)")] = None,
        protocol: Annotated[str, typer.Option(help="exact, or sampled: the sweep behind published tables")] = "exact",
        rounds: Annotated[int, typer.Option(min=0, help="bootstrap rounds; 0: AUC intervals only")] = 1000,
        seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="of the bootstrap")] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    ) -> None:
        """Seen and unseen accuracy, best harmonic mean and AUC of a score matrix, in percent, with 95 % intervals."""
        require(protocol, PROTOCOLS, "protocol")
        if k is not None and min(k) < 1:
            raise UsageError(f"--k {min(k)} is not a whole number from 1 on")
        if other is None:
            report = _score(file, k, protocol, rounds, seed)
        elif protocol == "sampled":
            raise UsageError("two files are compared on the exact curve; leave out --protocol sampled")
        else:
            report = _compare(file, other, k, rounds, seed)
        typer.echo(json.dumps(report, indent=2, allow_nan=False) if as_json else _text(report))


def _score(path: Path, ks: list[int] | None, protocol: str, rounds: int, seed: int) -> dict[str, Any]:
    """Metrics at the first k; further ones under `top`."""
    from duplex.evaluation.scores import open_scores

    with open_scores(path) as scores:
        asked = tuple(dict.fromkeys(ks or scores.ks))
        _check_k(scores, max(asked))
        results = _sampled(scores, asked) if protocol == "sampled" else _exact(scores, asked, rounds, seed)
    first, *more = results
    report = {"file": str(path), "protocol": protocol, **first}
    return report | ({"top": {str(result["k"]): result for result in more}} if more else {})


def _check_k(scores: ScoreFile, k: int) -> None:
    if k > scores.seen.size:
        raise UsageError(f"{scores.path}: top-{k} of {scores.seen.size} columns; choose a smaller --k")


def _exact(scores: ScoreFile, ks: tuple[int, ...], rounds: int, seed: int) -> list[dict[str, Any]]:
    from duplex.evaluation.metrics import measure

    rivals, names = _read(scores, max(ks)), {"states": scores.states, "objects": scores.objects}
    return [measure(rivals, k, **names, rounds=rounds, seed=seed).to_dict() for k in ks]


def _sampled(scores: ScoreFile, ks: tuple[int, ...]) -> list[dict[str, Any]]:
    from duplex.evaluation.sampled import sampled

    try:
        found = [sampled(lambda: _blocks(scores), scores.target, scores.seen, scores.live, k) for k in ks]
    except DuplexError as error:
        raise UsageError(f"{scores.path}: {error}") from error
    return [metrics.to_dict() for metrics in found]


def _blocks(scores: ScoreFile) -> Iterable[tuple[slice, Any]]:
    """One pass over the file, its progress on stderr."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(scores.blocks(), scores.path.name, len(scores.steps), console=console, disable=not console.is_terminal)


def _read(scores: ScoreFile, k: int) -> Rivals:
    from duplex.evaluation.accumulator import Evidence

    evidence = Evidence(scores.target, scores.seen, k=k, live=scores.live)
    if scores.live is not None and not scores.live[scores.target].all():
        lost = int((~scores.live[scores.target]).sum())
        typer.echo(f"{scores.path}: the labels of {lost} images are not live; these images count as wrong", err=True)
    try:
        for rows, block in _blocks(scores):
            evidence.add(block, rows)
    except DuplexError as error:
        raise UsageError(f"{scores.path}: {error}") from error
    return evidence.rivals()


def _compare(first: Path, second: Path, ks: list[int] | None, rounds: int, seed: int) -> dict[str, Any]:
    from duplex.evaluation.curve import Margins
    from duplex.evaluation.metrics import measure
    from duplex.evaluation.scores import open_scores
    from duplex.evaluation.uncertainty import compare

    with open_scores(first) as one, open_scores(second) as two:
        _same_images(one, two)
        k = (ks or one.ks)[0]
        _check_k(one, k)
        if ks and len(ks) > 1:
            raise UsageError("two files are compared at one --k")
        read = [(scores, _read(scores, k)) for scores in (one, two)]
        metrics = [
            measure(rivals, k, states=scores.states, objects=scores.objects, rounds=rounds, seed=seed).to_dict()
            for scores, rivals in read
        ]
    before, after = (Margins.of(rivals, k) for _, rivals in read)
    gains = compare(before, after, rounds=rounds, seed=seed)
    return {
        "first": {"file": str(first), **metrics[0]},
        "second": {"file": str(second), **metrics[1]},
        "difference": {name: points(asdict(gain)) for name, gain in gains.items()},
    }


def _same_images(one: ScoreFile, two: ScoreFile) -> None:
    for name in ("target", "seen"):
        a, b = getattr(one, name), getattr(two, name)
        if a.shape != b.shape or (a != b).any():
            raise UsageError(f"{one.path} and {two.path} differ in {name!r}; only the same images can be compared")


def _text(report: dict[str, Any]) -> str:
    """What a person reads: the four numbers with their intervals."""
    if "difference" in report:
        lines = [f"{report[name]['file']}\n{_table(report[name])}" for name in ("first", "second")]
        gains = (f"{name:<10}{span(gain)}   {p_value(gain['p'])}" for name, gain in _gains(report))
        return "\n".join([*lines, "second - first", *gains])
    tops = report.get("top", {}).values()
    return "\n".join([_table(report), *(f"top-{top['k']}\n{_table(top)}" for top in tops)])


def _gains(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(report["difference"].items())


def _table(metrics: dict[str, Any]) -> str:
    rows = [
        f"{name:<10}{span({'value': metrics[name], 'interval': metrics[f'{name}_interval']})}".rstrip()
        for name in SHOWN
    ]
    parts = [f"{name:<10}{number(metrics[f'{name}_accuracy'])}" for name in ("state", "object")]
    rows += parts if metrics["state_accuracy"] is not None or metrics["object_accuracy"] is not None else []
    images = f"{metrics['images_seen']} seen and {metrics['images_unseen']} unseen images"
    tied = f", {metrics['tied']:.1f} % with a tied label" if metrics["tied"] else ""
    return "\n".join([*rows, images + tied])
