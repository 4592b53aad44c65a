"""`duplex report`, `retrieve`, `swap`: the page, and single questions to a trained network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duplex.system.script import LARGEST_SEED

if TYPE_CHECKING:
    from duplex.report.retrieved import Hit

Dataset = Annotated[str, typer.Option("--dataset", "-d", help="A data set of params.yaml.")]
Method = Annotated[str | None, typer.Option("--method", "-m", help="Default: the method that the report shows.")]
Seed = Annotated[
    int | None, typer.Option("--seed", "-s", min=0, max=LARGEST_SEED, help="Default: the first seed of run:.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def register(app: typer.Typer) -> None:
    app.command("report")(report)
    app.command("retrieve")(retrieve)
    app.command("swap")(swap)


def report(show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False) -> None:
    """Make the report of all runs from what they left, and print where it is."""
    from duplex.config.params import load_params
    from duplex.stages import report as stage

    page = stage.run(load_params())
    typer.echo(page)
    if show:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            typer.echo("no browser could be started; open the file above", err=True)


def retrieve(
    pair: Annotated[str, typer.Argument(help="A state and an object, such as 'striped heart'.")],
    dataset: Dataset,
    method: Method = None,
    seed: Seed = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Images of each kind.")] = 4,
    as_json: AsJson = False,
) -> None:
    """The test images nearest to a pair's semantic and visual prototype, side by side."""
    from duplex.config.params import load_params
    from duplex.stages import queries

    source = queries.shown(load_params(), dataset, method, seed)
    found = queries.retrieve(source, pair, top)
    if as_json:
        _print_json({kind: _records(hits) for kind, hits in found.items()})
        return
    columns = [[f"{kind} prototype", *map(_said, hits)] for kind, hits in found.items()]
    width = max(map(len, columns[0])) + 2
    for line in zip(*columns, strict=True):
        typer.echo("".join(cell.ljust(width) for cell in line).rstrip())


def swap(
    state_from: Annotated[Path, typer.Argument(help="The picture whose state is taken.")],
    object_from: Annotated[Path, typer.Argument(help="The picture whose object is taken.")],
    dataset: Dataset,
    method: Method = None,
    seed: Seed = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many test images.")] = 5,
    as_json: AsJson = False,
) -> None:
    """The test images nearest to the state of one picture and the object of another."""
    from duplex.config.params import load_params
    from duplex.stages import queries

    params = load_params()
    source = queries.shown(params, dataset, method, seed)
    found = queries.swap(params, dataset, source, (state_from, object_from), top)
    if as_json:
        _print_json([{key: value for key, value in row.items() if key != "right"} for row in _records(found)])
        return
    for hit in found:
        typer.echo(f"{hit.cosine:.3f}  {hit.label}  {hit.image}")


def _said(hit: Hit) -> str:
    return f"{hit.cosine:.3f} {'+' if hit.right else '-'} {hit.label}  {hit.image}"


def _records(hits: list[Hit]) -> list[dict[str, object]]:
    return [{"image": h.image, "label": h.label, "cosine": round(h.cosine, 6), "right": h.right} for h in hits]


def _print_json(record: object) -> None:
    import json

    typer.echo(json.dumps(record, indent=2, ensure_ascii=False))
