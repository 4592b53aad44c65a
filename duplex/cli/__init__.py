"""The `duplex` command. Each group of commands is a module here; heavy imports happen inside commands only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import typer

from duplex.allocator import keep_freed_memory
from duplex.cli.usage import arguments
from duplex.errors import DuplexError

__all__ = ["app", "arguments", "guarded", "main"]

GROUPS = ("data", "features", "methods", "score", "compare", "report")

app = typer.Typer(
    help="Compositional zero-shot learning over cached CLIP features.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in GROUPS:
    importlib.import_module(f"duplex.cli.{group}").register(app)


def main() -> None:
    """The console script."""
    guarded(app)


def guarded(work: Callable[[], object]) -> None:
    """Do some work; a person's mistake is one line on stderr and an exit code, never a traceback."""
    keep_freed_memory()
    try:
        work()
    except DuplexError as error:
        print(f"duplex: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
