"""`duplex init`: a new project."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("init")(init)


def init(folder: Annotated[Path, typer.Argument(help="A new or empty folder.")]) -> None:
    """Start a project: params.yaml, dvc.yaml, stage scripts, .gitignore, README, git and DVC where they are absent."""
    from duplex.stages.init_project import init as stage

    for line in stage(folder):
        typer.echo(line, err=True)
    typer.echo(f"next: cd {shlex.quote(str(folder))} && dvc repro && duplex metrics", err=True)
