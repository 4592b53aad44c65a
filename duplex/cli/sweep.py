"""`duplex sweep`: train and evaluate many runs at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from duplex.cli import app
from duplex.cli.options import ENGINES, AsJson, load_params
from duplex.cli.options import Engine as EngineOption
from duplex.errors import UsageError, require
from duplex.system.entry import LARGEST_SEED

if TYPE_CHECKING:
    from duplex.runs.sweep import Engine, SweepReport

MAX_SEEDS = 10_000  # of a range


@app.command()
def sweep(
    datasets: Annotated[str | None, typer.Option(help="Data sets, comma-separated; default: run.datasets.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, comma-separated; default: run.methods of params.yaml.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, comma-separated, or a range such as 0-4; default: run.seeds.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of worker processes; default: one per GPU, or CPU cores / threads per run."),
    ] = None,
    ablations: Annotated[
        str | None,
        typer.Option(
            help="Ablations to run instead, comma-separated, or all; data sets and seeds: ablation_run in params.yaml."
        ),
    ] = None,
    engine: EngineOption = "local",
    as_json: AsJson = False,
) -> None:
    """Train and evaluate all missing runs (data set × method × seed) in parallel, and commit them to DVC.

    Writes the same files as `dvc repro`, byte for byte, so `dvc repro` repeats no run. An interrupted sweep is
    resumed by the same command. A failed run does not stop the others; failures are listed at the end, and the command
    exits with 1.
    """
    from dataclasses import asdict

    from duplex.cli.formatting import print_json

    params = load_params()
    kind: Engine = "ray" if require(engine, ENGINES, "engine") == "ray" else "local"
    if ablations is not None:
        if datasets or methods or seeds:
            raise UsageError(
                "--ablations cannot be combined with --datasets, --methods or --seeds; set ablation_run in params.yaml"
            )
        from duplex.runs.ablation_sweep import sweep_ablations

        report = sweep_ablations(params, None if ablations == "all" else split_names(ablations), jobs, kind)
    else:
        from duplex.runs import sweep as stage

        runs = stage.grid(params, split_names(datasets), split_names(methods), parse_seeds(seeds))
        report = stage.sweep(params, runs, jobs, kind)
    typer.echo(summary(report), err=True)
    for run, error in report.failed.items():
        typer.echo(f"{run}: {' '.join(error.split())}", err=True)
    if as_json:
        print_json(asdict(report))
    if report.not_committed:
        typer.echo(f"duplex: {report.not_committed}", err=True)
    if report.failed or report.not_committed:
        raise typer.Exit(1)


def summary(report: SweepReport) -> str:
    """A line such as `40 runs: 12 complete, 27 trained and evaluated in 61 s, 1 failed; 27 committed to DVC`."""
    trained = f"trained and evaluated in {report.seconds:.0f} s"
    runs = [(report.complete, "complete"), (report.executed, trained), (len(report.failed), "failed")]
    outside = (report.outside_pipeline, "not tracked by DVC, since `run` of params.yaml lacks them")
    parts = (runs, [(report.committed, "committed to DVC"), outside])
    texts = [", ".join(f"{count} {text}" for count, text in part if count) for part in parts]
    return f"{report.runs} runs: {'; '.join(filter(None, texts))}"


def split_names(text: str | None) -> list[str] | None:
    """The names in a comma-separated text; None for None."""
    return None if text is None else [name.strip() for name in text.split(",")]


def parse_seeds(text: str | None) -> list[int] | None:
    """The seeds in a text such as `0,2,5-9`; None for None."""
    seeds: list[int] = []
    for part in split_names(text) or []:
        ends = re.fullmatch(r"([0-9]{1,19})(?:-([0-9]{1,19}))?", part)
        first, last = (int(end or ends[1]) for end in ends.groups()) if ends else (1, 0)
        if last > LARGEST_SEED or not 0 <= last - first < MAX_SEEDS:
            raise UsageError(
                f"--seeds has {part!r}; expected whole numbers, or a range of at most {MAX_SEEDS:,} such as 0-4"
            )
        seeds += range(first, last + 1)
    return seeds or None
