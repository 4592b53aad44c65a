"""`duplex compare`: two trained methods on the same test images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.cli.report import AsJson, Dataset
from duplex.cli.usage import LAST_SEED
from duplex.errors import DuplexError, UsageError, pick
from duplex.labels import WORLDS

if TYPE_CHECKING:
    import pandas as pd

    from duplex.evaluation.curve import Margins

IMAGES = ["row", "image", "label", "seen"]  # columns that must agree
NAMES = {"seen": "S", "unseen": "U", "hm": "HM", "auc": "AUC"}


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


def compare(
    dataset: Dataset,
    methods: Annotated[tuple[str, str], typer.Option("--methods", help="Two methods: FIRST SECOND.")],
    seed: Annotated[int, typer.Option("--seed", "-s", min=0, max=LAST_SEED, help="Of both runs.")] = 0,
    world: Annotated[str, typer.Option("--world", help="closed or open")] = "closed",
    as_json: AsJson = False,
) -> None:
    """Second minus first in S, U, HM and AUC, in percentage points, with 95 % intervals and p-values.

    Both are read from the runs' predictions.csv. It keeps nine digits of a margin, so that margins equal in all of them
    count as ties.
    """
    import json

    from duplex.params import load_params

    pick(world, WORLDS, "world")
    params = load_params()
    params.dataset(dataset)
    for method in methods:
        params.method(method)
    report = {"dataset": dataset, "world": world, "seed": seed, **_compare(dataset, methods, seed, world)}
    typer.echo(json.dumps(report, indent=2, allow_nan=False) if as_json else _text(report))


def _compare(dataset: str, methods: tuple[str, str], seed: int, world: str) -> dict[str, Any]:
    from dataclasses import asdict

    from duplex.artifacts import ArtifactPaths
    from duplex.cli.differences import points
    from duplex.evaluation import uncertainty

    files = [ArtifactPaths().run(dataset, method, seed).predictions for method in methods]
    first, second = (
        _predictions(file, f"--dataset {dataset} --method {method} --seed {seed}", world)
        for file, method in zip(files, methods, strict=True)
    )
    if not first[IMAGES].equals(second[IMAGES]):
        raise UsageError(f"{files[0]} and {files[1]} are of different images; `duplex evaluate` both runs again")
    before, after = _margins(first), _margins(second)
    gains = uncertainty.compare(before, after)
    return {
        "first": methods[0],
        "second": methods[1],
        "images_seen": before.seen.size,
        "images_unseen": before.unseen.size,
        "difference": {name: points(asdict(gain)) for name, gain in gains.items()},
    }


def _predictions(file: Path, run: str, world: str) -> pd.DataFrame:
    """One world's images, in the order of their rows in the feature cache."""
    from duplex.report.material import read_table

    table = read_table(file)
    if table is None:
        raise DuplexError(f"{file} does not exist; `duplex train {run}` and `duplex evaluate {run}` write it")
    missing = [column for column in (*IMAGES, "margin", "world") if column not in table]
    if missing:
        raise DuplexError(f"{file} has no column {missing[0]!r}; `duplex evaluate {run}` writes it again")
    chosen = table[table["world"] == world]
    if chosen.empty:
        raise DuplexError(
            f"{file} has no images of the {world} world; "
            f"add {world} to evaluation.worlds in params.yaml and run `duplex evaluate {run}`"
        )
    return chosen.sort_values("row", kind="stable").reset_index(drop=True)


def _margins(predictions: pd.DataFrame) -> Margins:
    """The biases at which the images turn; NaN for those that are never right."""
    from duplex.evaluation.curve import Margins

    is_seen = predictions["seen"].to_numpy(dtype=bool)
    margin = predictions["margin"].to_numpy(dtype=float)
    return Margins(margin[is_seen], margin[~is_seen], is_seen)


def _text(report: dict[str, Any]) -> str:
    from duplex.cli.differences import p_value, span

    place = f"{report['dataset']}, {report['world']} world, seed {report['seed']}"
    head = f"{report['second']} - {report['first']}: {place}"
    lines = [f"{NAMES[name]:<5}{span(gain)}   {p_value(gain['p'])}" for name, gain in report["difference"].items()]
    images = f"{report['images_seen']} seen and {report['images_unseen']} unseen images"
    return "\n".join([head, *(line.rstrip() for line in lines), images])
