"""The `duplex` command, and what its modules share: options, loading params.yaml, printing.

Each module adds commands to `app`; heavy imports happen inside commands, so `--help` is fast.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from duplex.errors import DuplexError, UsageError, require
from duplex.system.entry import DEBUG, LARGEST_SEED, escape_unprintable, report_errors, run_command
from duplex.system.version import __version__

if TYPE_CHECKING:
    from duplex.config.params import Params
    from duplex.data.check import DataIssue

MODULES = ["data", "features", "runs", "compare", "model"]
PANELS = {  # of `duplex --help`: its commands, the most used first
    "Pictures": ("fit", "predict", "serve", "update", "next", "export"),
    "Methods": ("compare", "score", "methods", "tune", "reproduce", "retrieve"),
    "Data": ("data", "suspects", "relabel", "encoders", "cache"),
    "Pipeline": (
        *("prepare", "extract", "train", "evaluate", "sweep"),
        *("metrics", "report", "init", "params", "doctor"),
    ),
}


def _completed(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A function for the shell that completes a name, or the last of names separated by commas."""

    def complete(incomplete: str) -> list[str]:
        before = incomplete[: incomplete.rfind(",") + 1]
        try:
            return [before + name for name in names() if (before + name).startswith(incomplete)]
        except DuplexError:  # such as a folder without params.yaml
            return []

    return complete


def _encoder_names() -> list[str]:
    from duplex.encoders.base import all_families

    names = []
    for family in all_families():
        names += [entry.name for entry in family.catalog()]
    return names


DATASETS = _completed(lambda: load_params().datasets)
METHODS = _completed(lambda: load_params().methods)
method_option = partial(Option, autocompletion=METHODS)
encoder_option = partial(Option, autocompletion=_completed(_encoder_names))
Dataset = Annotated[str, Option("--dataset", "-d", help="Name of a data set in params.yaml.", autocompletion=DATASETS)]
DatasetName = Annotated[str, Argument(help="Name of a data set in params.yaml.", autocompletion=DATASETS)]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
Force = Annotated[bool, Option("--force", help="Replace the output if it exists.")]
ImageFolder = Annotated[Path | None, Option("--images", help="Folder of a table's image paths.")]
Weights = Annotated[str | None, Option(help="Encoder weights: published tag, file, or random:SEED.")]
Resize = Annotated[
    str | None,
    Option(
        callback=lambda resize: resize and require(resize, ("crop", "squash", "pad"), "resize"),
        help="How images become square: crop, squash or pad; default: as the encoder's weights.",
    ),
]
Engine = Annotated[
    str,
    Option(
        callback=lambda engine: require(engine, ("local", "ray"), "engine"),
        help="Where the work runs: on this machine (local) or on a Ray cluster (ray).",
    ),
]


def dataset_option(text: str) -> Any:
    return Option("--dataset", "-d", help=text, autocompletion=DATASETS)


def seed_option(text: str, *names: str) -> Any:
    """A typer option for a seed with the help `text`, called `--seed` or `-s` without `names`."""
    return Option(*(names or ("--seed", "-s")), min=0, max=LARGEST_SEED, help=text)


def load_params() -> Params:
    """Load params.yaml from the current folder."""
    from duplex.config.params import load_params as load

    return load()


def print_json(record: object) -> None:
    typer.echo(json.dumps(record, indent=2, ensure_ascii=False))


def log(text: str) -> None:
    typer.echo(text, err=True)


def issue_lines(name: str, issues: Iterable[DataIssue], notes: dict[str, int], differences: Iterable[str]) -> str:
    """Lines: issues, notes (reason -> number of rows), differences from published counts."""
    lines = [f"{'problem' if issue.problem else 'remark'}: {issue}" for issue in issues]
    lines += [f"note: {note}: {count:,}" for note, count in notes.items()]
    lines += [f"differs from the published table: {line}" for line in differences]
    return "\n".join(map(escape_unprintable, lines)) or f"{name}: no problems found"


class CommandGroup(TyperGroup):
    """Typer's command group in panels; Ctrl-C and closed pipes get the exit codes that shells expect."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        panels: dict[str, str] = {}
        for panel, names in PANELS.items():
            panels |= dict.fromkeys(names, panel)
        commands: dict[str, Any] = {name: self.commands[name] for name in sorted(self.commands, key=list(panels).index)}
        for name, command in commands.items():
            command.rich_help_panel = panels[name]
        self.commands = commands

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError):
            with report_errors():
                raise


app = typer.Typer(
    cls=CommandGroup,
    help="Sort pictures by state and object, also in new pairs: compositional zero-shot learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in MODULES:
    importlib.import_module(f"duplex.cli.{module}")


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"duplex {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, Option("--debug", help=f"Add tracebacks to errors; {DEBUG}=1 does the same.")] = False,
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
        before = sys.argv[sys.argv.index("", 1) - 1]
        problem = f"the argument after {before!r} is empty (an unset variable?)"
        raise UsageError(f"{problem}; give it a value, or leave out both it and its option")
    app()
