"""The `duplex` command. Each module adds commands to `app`; heavy imports happen inside commands only."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from duplex import __version__
from duplex.errors import UsageError
from duplex.system.entry import DEBUG, report_errors, run_command

__all__ = ["app", "main"]

MODULES = ["data", "features", "runs", "report", "model"]


class CommandGroup(TyperGroup):
    """Typer's command group; Ctrl-C and closed pipes get the exit code that shells expect, not click's."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError):
            with report_errors():
                raise


app = typer.Typer(
    cls=CommandGroup,
    help="Compositional zero-shot learning over cached CLIP features.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in MODULES:
    importlib.import_module(f"duplex.cli.{module}")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"duplex {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help=f"Add the traceback to errors, as {DEBUG}=1 does.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


def main() -> None:
    """Run the `duplex` command."""
    run_command(_run)


def _run() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold bytes that are not text
    if "" in sys.argv[1:]:  # an empty path would mean the current folder
        raise UsageError("an argument is empty, perhaps an unset shell variable; give a value or leave it out")
    app()
