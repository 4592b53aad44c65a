"""`duplex report`, `retrieve`, `init` and `doctor`: show results of runs; start and check a project."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from duplex.cli import AsJson, Dataset, app, dataset_option, load_params, log, method_option, print_json, seed_option
from duplex.evaluation.metrics import aligned

if TYPE_CHECKING:
    from duplex.report.images import Hit


Method = Annotated[str | None, method_option("--method", "-m", help="Method; default: the last with prototypes.")]
Seed = Annotated[int | None, seed_option("Seed of the run; default: the first of run.seeds.")]


@app.command()
def report(
    dataset: Annotated[str | None, dataset_option("Write a page on this data set's best run instead.")] = None,
) -> None:
    """Write the report of all evaluated runs, or the page of one data set, and print its path.

    Does not write artifacts/metrics.json, which git tracks; `dvc repro report` does.
    """
    from duplex.project.report import own_page_stage, report_stage

    params = load_params()
    typer.echo(own_page_stage(params, dataset) if dataset else report_stage(params, write_metrics=False))


@app.command()
def retrieve(
    pair: Annotated[str, Argument(help="A state and an object, such as 'striped heart'.")],
    dataset: Dataset,
    method: Method = None,
    seed: Seed = None,
    top: Annotated[int, Option(min=1, help="Number of nearest images to show per prototype.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Print two lists: the test images nearest to a pair's semantic prototype (from text) and to its visual one."""
    from duplex.project import runs
    from duplex.report.images import prototype_hits

    context = runs.load_queried_run(load_params(), dataset, method, seed).retrieval_context()
    hits_by_prototype = prototype_hits(context, runs.find_pair(context.labels, pair), top)
    if as_json:
        print_json({kind: _records(hits) for kind, hits in hits_by_prototype.items()})
        return
    columns = []
    for kind, hits in hits_by_prototype.items():
        lines = (f"{hit.cosine:.3f} {'+' if hit.right else '-'} {hit.label}  {hit.image}" for hit in hits)
        columns.append([f"{kind} prototype", *lines])
    typer.echo(aligned(list(zip(*columns, strict=True))))


def _records(hits: list[Hit]) -> list[dict[str, object]]:
    return [
        {"image": hit.image, "label": hit.label, "cosine": round(hit.cosine, 6), "right": hit.right} for hit in hits
    ]


@app.command()
def init(folder: Annotated[Path, Argument(help="Folder of the new project; it must be empty or absent.")]) -> None:
    """Start a project: write params.yaml, dvc.yaml, stage scripts, .gitignore and README; set up git and DVC."""
    from duplex.project.doctor import init as init_project

    for line in init_project(folder):
        log(line)
    log(f"next: cd {shlex.quote(str(folder))} && dvc repro && duplex metrics")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check versions, device, disk, weights, data and caches; print a remedy for each problem.

    Changes and downloads nothing. Exits with 1 if there is a problem.
    """
    from dataclasses import asdict

    from duplex.project.doctor import examine

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        width = 2 + max(len(finding.topic) for finding in findings)
        for finding in findings:
            typer.echo(f"{'!' if finding.remedy else ' '} {finding.topic:<{width}}{finding.message}")
            if finding.remedy:
                typer.echo(f"{'':{width + 2}}-> {finding.remedy}")
    if any(finding.remedy for finding in findings):
        raise typer.Exit(1)
