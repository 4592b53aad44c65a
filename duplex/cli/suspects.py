"""`duplex data suspects` and `relabel`: labels that are likely wrong, and a corrected copy of a data set's list."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from duplex.cli.data import group
from duplex.errors import UsageError, require

WAYS = ("run", "knn")
SHOWN = 20


def register(app: typer.Typer) -> None:
    """They belong to `duplex data`."""
    group.command("suspects")(suspects)
    group.command("relabel")(relabel)


def suspects(
    name: Annotated[str, typer.Argument(help="A data set of params.yaml whose features are cached.")],
    method: Annotated[
        str, typer.Option("--method", help="run: a trained run's features; knn: the nearest images.")
    ] = "run",
    run: Annotated[Path | None, typer.Option(help="Which run; default: the best one of the data set.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for the list and the page.")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="On the page.")] = 200,
) -> None:
    """Rank a data set's labels by how likely they are wrong.

    Writes suspects.csv, to be edited, and suspects.html, to look at.
    """
    from duplex.config.params import load_params
    from duplex.recognition.suspects_html import write_sheet
    from duplex.stages.suspects import suspects as stage
    from duplex.system.files import sha256, write_text

    require(method, WAYS, "method")
    params, folder = load_params(), out or Path("suspects") / name
    listed, page = folder / "suspects.csv", folder / "suspects.html"
    _refuse_edited(listed, page)
    table = stage(params, name, method, run)  # type: ignore[arg-type]
    write_text(listed, table.to_csv(index=False, lineterminator="\n"))
    rows, root = table.head(pictures).to_dict("records"), params.dataset(name).source.root
    write_sheet(page, f"Suspicious labels of {name}", rows, root, sha256(listed))  # type: ignore[arg-type]
    for row in rows[:SHOWN]:
        label, better = f"{row['state']} {row['object']}", f"{row['better_state']} {row['better_object']}"
        typer.echo(f"{row['rank']:>5}  {label:<28} rather {better:<28} {row['image']}")
    typer.echo(
        f"{listed} and suspects.html rank {len(table)} images; put the right labels into state and "
        f"object, delete the other lines, then `duplex data relabel {name} {listed}`",
        err=True,
    )


def _refuse_edited(listed: Path, page: Path) -> None:
    """A list is replaced as long as it is what this command wrote: corrections are its user's work."""
    from duplex.recognition.suspects_html import shows
    from duplex.system.files import sha256

    there = [path for path in (listed, page) if os.path.lexists(path)]
    ours = all(path.is_file() and not path.is_symlink() for path in (listed, page)) and shows(page, sha256(listed))
    if there and not ours:
        raise UsageError(f"{there[0]} is there already, edited or of something else; move it or choose another --out")


def relabel(
    name: Annotated[str, typer.Argument(help="The data set.")],
    edited: Annotated[Path, typer.Argument(help="CSV: image, state, object of the images whose labels change.")],
    out: Annotated[Path | None, typer.Option(help="The new list; default: NAME-relabelled.csv.")] = None,
) -> None:
    """Write the data set's list with corrected labels to a new table; the original stays as it is."""
    from duplex.config.params import load_params
    from duplex.data.manifest import write_manifest
    from duplex.stages.suspects import relabelled

    params, target = load_params(), out or Path(f"{name}-relabelled.csv")
    if target.exists():
        raise UsageError(f"{target} is there already; choose another --out")
    table = relabelled(params, name, edited)
    write_manifest(table, target)
    root = params.dataset(name).source.root
    typer.echo(f"{target} is written; `duplex data add {name}-relabelled {target} --images {root}` uses it", err=True)
