"""`duplex sweep`: train and evaluate of many cells at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from duplex.errors import UsageError, require
from duplex.system.script import LARGEST_SEED

if TYPE_CHECKING:
    from duplex.runs.sweep import Engine, Swept

ENGINES = ("local", "ray")


def register(app: typer.Typer) -> None:
    app.command("sweep")(sweep)


def sweep(
    datasets: Annotated[str | None, typer.Option(help="Data sets, with commas between; default: those of run.")] = None,
    methods: Annotated[str | None, typer.Option(help="Rows of methods, with commas; default: those of run.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, with commas; 0-4 are five; default: those of run.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one a GPU, or as many as the cores have threads for.")
    ] = None,
    ablations: Annotated[
        str | None,
        typer.Option(
            help="Rows of ablations instead, with commas, or all; on the data sets and seeds of ablation_run."
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Train and evaluate whatever is missing of data sets x methods x seeds, several at a time, and hand it to DVC.

    The files are those of `dvc repro`, byte for byte, and it runs none of them again. Stopped or killed, the same
    command goes on. A cell that fails stops no other; it is named at the end, with exit code 2.
    """
    import json
    from dataclasses import asdict

    from duplex.config.params import load_params

    params = load_params()
    kind: Engine = "ray" if require(engine, ENGINES, "engine") == "ray" else "local"
    if ablations is not None:
        if datasets or methods or seeds:
            raise UsageError(
                "--ablations goes with no other choice: ablation_run in params.yaml has data sets and seeds"
            )
        from duplex.runs.ablation_sweep import sweep_ablations

        report = sweep_ablations(params, None if ablations == "all" else _words(ablations), jobs, kind)
    else:
        from duplex.runs import sweep as stage

        cells = stage.grid(params, _words(datasets), _words(methods), _numbers(seeds))
        report = stage.sweep(params, cells, jobs, kind)
    typer.echo(summary(report), err=True)
    for cell, why in report.failed.items():
        typer.echo(f"{cell}: {' '.join(why.split())}", err=True)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    if report.failed:
        raise typer.Exit(2)


def summary(report: Swept) -> str:
    """`40 cells: 12 were there, 27 made in 61 s, 1 failed; 27 handed to DVC`"""
    parts = [
        f"{report.there} were there" if report.there else "",
        f"{report.made} made in {report.seconds:.0f} s" if report.made else "",
        f"{len(report.failed)} failed" if report.failed else "",
    ]
    handed = [
        f"{report.handed} handed to DVC" if report.handed else "",
        f"{report.apart} are not in run, and DVC has no stage for them" if report.apart else "",
    ]
    said = [", ".join(filter(None, some)) for some in (parts, handed)]
    return f"{report.cells} cells: {'; '.join(filter(None, said))}"


def _words(given: str | None) -> list[str] | None:
    return None if given is None else [word.strip() for word in given.split(",")]


def _numbers(given: str | None) -> list[int] | None:
    """`0,2,5-9`"""
    found: list[int] = []
    for word in _words(given) or []:
        first, dash, last = word.partition("-")
        ends = [first, last] if dash else [first, first]
        if (
            not all(end.isascii() and end.isdigit() and int(end) <= LARGEST_SEED for end in ends)
            or not 0 <= int(ends[1]) - int(ends[0]) < 10000
        ):
            raise UsageError(f"--seeds has {word!r}; it takes whole numbers such as 0,1,2 or 0-4")
        found += range(int(ends[0]), int(ends[1]) + 1)
    return found or None
