"""Options that several commands share, and the function with which they load params.yaml."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.system.entry import LARGEST_SEED

if TYPE_CHECKING:
    from duplex.config.params import Params

ENGINES = ("local", "ray")
Dataset = Annotated[str, typer.Option("--dataset", "-d", help="A data set of params.yaml.")]
DatasetName = Annotated[str, typer.Argument(help="A data set of params.yaml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what exists at the place of the output.")]
Engine = Annotated[str, typer.Option("--engine", help="Where runs execute: local, or ray for a Ray cluster.")]


def seed_option(text: str, *names: str) -> Any:
    """Return a typer option for a seed with its valid range, by default named `--seed` and `-s`.

    text: help text. names: other names of the option.
    """
    return typer.Option(*(names or ("--seed", "-s")), min=0, max=LARGEST_SEED, help=text)


def load_params() -> Params:
    """Load and check params.yaml in the current folder; the import happens in the call, to keep `--help` fast."""
    from duplex.config.params import load_params as load

    return load()
