"""`duplex data suspects` lists images whose labels are likely wrong (*suspects*); `relabel` applies corrections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from duplex.cli.data import group
from duplex.cli.options import DatasetName, Force, load_params
from duplex.errors import UsageError, require

WAYS = ("run", "knn")
PRINTED = 20  # lines on stdout


@group.command()
def suspects(
    name: Annotated[str, typer.Argument(help="A data set of params.yaml whose features are cached.")],
    by: Annotated[
        str,
        typer.Option(
            help="Judge labels by class means of a run's features (run), or by labels of the nearest images (knn).",
        ),
    ] = "run",
    run: Annotated[
        Path | None,
        typer.Option(help="Folder of the run whose features --by run uses; default: the best run of NAME."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default: suspects/NAME.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Number of images in suspects.html.")] = 200,
    force: Force = False,
) -> None:
    """Rank a data set's images by how likely their labels are wrong.

    Writes suspects.csv, for editing, and suspects.html with the most suspicious images.
    """
    from duplex.stages.suspects import rank_suspects as rank
    from duplex.stages.suspects import write_suspects_page
    from duplex.system.files import refuse_existing, replace_file

    require(by, WAYS, "value of --by")
    params = load_params()
    folder = out or Path("suspects") / name
    csv, page = folder / "suspects.csv", folder / "suspects.html"
    for path in (csv, page):
        refuse_existing(path, force=force)
    table = rank(params, name, by, run)  # type: ignore[arg-type]
    rows, root = table.head(images).to_dict("records"), params.dataset(name).source.root
    with replace_file(csv) as scratch:  # renamed once the page is written too
        table.to_csv(scratch, index=False, lineterminator="\n")
        write_suspects_page(page, f"Suspicious labels of {name}", rows, root)  # type: ignore[arg-type]
    for row in rows[:PRINTED]:
        label = f"{row['state']} {row['object']}"
        better = f"{row['better_state']} {row['better_object']}"
        typer.echo(f"{row['rank']:>5}  {label:<28} rather {better:<28} {row['image']}")
    typer.echo(
        f"wrote {csv} and suspects.html with {len(table)} images; correct the columns state and object, "
        f"delete the other lines, then run `duplex data relabel {name} {csv}`",
        err=True,
    )


@group.command()
def relabel(
    name: DatasetName,
    edited: Annotated[
        Path, typer.Argument(help="CSV file with the labels that you corrected, in the columns image,state,object.")
    ],
    out: Annotated[Path | None, typer.Option(help="File to write; default: NAME-relabelled.csv.")] = None,
    force: Force = False,
) -> None:
    """Write a new table of a data set's images, with labels corrected by a CSV file. The original stays unchanged."""
    from duplex.data.check import SHOWN
    from duplex.data.manifest import write_manifest
    from duplex.stages.suspects import relabelled_manifest
    from duplex.system.files import refuse_existing

    params = load_params()
    target = out or Path(f"{name}-relabelled.csv")
    if target.suffix.lower() != ".csv":
        raise UsageError(f"{target} is not named .csv; choose another --out")
    refuse_existing(target, force=force)
    result = relabelled_manifest(params, name, edited)
    write_manifest(result.manifest, target)
    root = params.dataset(name).source.root
    hint = f"`duplex data add {name}-relabelled {target} --images {root}` adds it"
    typer.echo(f"wrote {target} with {result.changed} corrected labels; {hint}", err=True)
    if result.outdated:
        why = f"their labels in {name} have changed since the list was made"
        named = ", ".join(result.outdated[:SHOWN]) + (", ..." if len(result.outdated) > SHOWN else "")
        typer.echo(f"{len(result.outdated):,} images keep their labels, since {why}: {named}", err=True)
    if result.new:
        typer.echo(f"new states or objects, perhaps misspelt: {', '.join(result.new)}", err=True)
