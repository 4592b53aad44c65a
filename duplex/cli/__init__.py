"""The `duplex` command. Each module adds commands to `app`; heavy imports happen inside commands only."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from duplex.errors import DuplexError, UsageError
from duplex.system.error_report import DEBUG, report_errors, run_command
from duplex.system.version import __version__

__all__ = ["app", "main"]

MODULES = ["data", "own_data", "features", "methods", "score", "compare", "report", "fit", "predict", "export", "serve",
           "suspects", "project", "sweep", "tune"]  # fmt: skip


class CommandGroup(TyperGroup):
    """Typer's command group with this package's handling of Ctrl-C, closed pipes and a plug-in's `sys.exit`.

    An error is one line on stderr; a stop by Ctrl-C or a closed pipe has the exit code that shells expect.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError):
            with report_errors():
                raise
        except SystemExit as error:  # commands return or raise; an exit comes from a method's or encoder's own code
            with report_errors():
                if isinstance(error.__context__, BrokenPipeError):  # or from rich, which prints help
                    raise error.__context__ from None
                raise DuplexError(
                    f"a method or encoder called sys.exit({error.code!r}), which ended the command; fix its code"
                ) from error


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
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries that look for their files would end the program
        raise UsageError("the current folder has been deleted; change to another one") from None
    for word in sys.argv[1:]:
        if word == "":  # an empty path would mean the current folder
            raise UsageError("an argument is empty, perhaps an unset shell variable; give a value or leave it out")
    app()
