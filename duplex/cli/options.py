"""What several commands share: options, loading of params.yaml, and printing of JSON and of a data set's issues."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.system.entry import LARGEST_SEED, escape_unprintable

if TYPE_CHECKING:
    from duplex.config.params import Params
    from duplex.data.check import DataIssue


ENGINES = ("local", "ray")
Dataset = Annotated[str, typer.Option("--dataset", "-d", help="A data set of params.yaml.")]
DatasetName = Annotated[str, typer.Argument(help="A data set of params.yaml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what exists at the place of the output.")]
ImageFolder = Annotated[
    Path | None, typer.Option("--images", help="For a table: the folder that its image paths are relative to.")
]
Weights = Annotated[str | None, typer.Option(help="Weights of the encoder: a published tag or a file.")]
Engine = Annotated[str, typer.Option("--engine", help="Where runs execute: local, or ray for a Ray cluster.")]


def seed_option(text: str, *names: str) -> Any:
    """A typer option for a seed, by default `--seed` or `-s`."""
    return typer.Option(*(names or ("--seed", "-s")), min=0, max=LARGEST_SEED, help=text)


def load_params() -> Params:
    """Load params.yaml in the current folder; the import happens in the call, to keep `--help` fast."""
    from duplex.config.params import load_params as load

    return load()


def print_json(record: object) -> None:
    typer.echo(json.dumps(record, indent=2, ensure_ascii=False))


def issue_lines(name: str, issues: Iterable[DataIssue], notes: dict[str, int], differences: Iterable[str]) -> str:
    """The result of checking a data set as text; `notes`: what was left out while reading it -> count."""
    lines = [f"{'problem' if issue.problem else 'remark'}: {issue}" for issue in issues]
    lines += [f"note: {note}: {count:,}" for note, count in notes.items()]
    lines += [f"differs from the published table: {line}" for line in differences]
    return "\n".join(map(escape_unprintable, lines)) or f"{name}: no problems found"
