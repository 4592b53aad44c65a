"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from duplex.system.script import LARGEST_SEED

ENGINES = ("local", "ray")
Dataset = Annotated[str, typer.Option("--dataset", "-d", help="A data set of params.yaml.")]
DatasetName = Annotated[str, typer.Argument(help="A data set of params.yaml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Engine = Annotated[str, typer.Option("--engine", help="local, or ray for a cluster.")]


def seed_option(text: str) -> Any:
    """Return the option `--seed`, `-s` with its valid range; `text` is its help."""
    return typer.Option("--seed", "-s", min=0, max=LARGEST_SEED, help=text)
