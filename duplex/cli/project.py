"""`duplex init` and `duplex doctor`: start a project, and check the machine and the project."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from duplex.cli import app
from duplex.cli.formatting import print_json
from duplex.cli.options import AsJson


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the new project; it must be empty or absent.")],
) -> None:
    """Start a project: write params.yaml, dvc.yaml, stage scripts, .gitignore and README; set up git and DVC."""
    from duplex.stages.init_project import init as init_project

    for line in init_project(folder):
        typer.echo(line, err=True)
    typer.echo(f"next: cd {shlex.quote(str(folder))} && dvc repro && duplex metrics", err=True)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check versions, device, number formats, disk, weights, data and caches; print a remedy for each problem.

    Changes and downloads nothing. Exits with 1 if there is a problem.
    """
    from dataclasses import asdict

    from duplex.stages.doctor import examine

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            typer.echo(f"{'!' if finding.remedy else ' '} {finding.topic:<12}{finding.message}")
            if finding.remedy:
                typer.echo(f"{'':14}-> {finding.remedy}")
    if any(finding.remedy for finding in findings):
        raise typer.Exit(1)
