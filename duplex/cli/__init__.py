"""The `duplex` command. Each group of commands is a module here; heavy imports happen inside commands only."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from duplex.errors import UsageError
from duplex.system.error_report import DEBUG, guarded, sentences
from duplex.system.version import __version__

__all__ = ["app", "main"]

GROUPS = (
    "data",
    "features",
    "methods",
    "score",
    "compare",
    "report",
    "predict",
    "export",
    "serve",
    "doctor",
    "suspects",
    "project",
    "sweep",
)


class Guarded(TyperGroup):
    """Commands that tell of Ctrl-C and of a reader that left as scripts do; typer has answers of its own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError):
            with sentences():
                raise


app = typer.Typer(
    cls=Guarded,
    help="Compositional zero-shot learning over cached CLIP features.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in GROUPS:
    importlib.import_module(f"duplex.cli.{group}").register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"duplex {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show where an error came from; {DEBUG}=1 does too.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


def main() -> None:
    """The console script."""
    guarded(_answer)


def _answer() -> None:
    if "" in sys.argv[1:]:  # an empty path would be the current folder
        raise UsageError("an argument is empty, perhaps a variable that is not set; name something or leave it out")
    app()
