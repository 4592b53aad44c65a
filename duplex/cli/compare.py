"""`duplex compare`: two trained methods on the same test images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.cli.report import AsJson, Dataset
from duplex.errors import DuplexError, UsageError, require
from duplex.labels import WORLDS
from duplex.system.script import LARGEST_SEED

if TYPE_CHECKING:
    import pandas as pd

    from duplex.config.params import Params
    from duplex.evaluation.curve import Margins

IMAGES = ["row", "image", "label", "seen"]  # columns that must agree
NAMES = {"seen": "S", "unseen": "U", "hm": "HM", "auc": "AUC"}


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


def compare(
    dataset: Dataset,
    methods: Annotated[tuple[str, str], typer.Option("--methods", help="Two methods or ablations: FIRST SECOND.")],
    seed: Annotated[
        int | None, typer.Option("--seed", "-s", min=0, max=LARGEST_SEED, help="One seed; default: all that both have.")
    ] = None,
    world: Annotated[str, typer.Option("--world", help="closed or open")] = "closed",
    splits: Annotated[
        int | None, typer.Option("--splits", min=2, help="Over so many of `duplex data split`; default: its own alone.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Second minus first in S, U, HM and AUC, in percentage points, with 95 % intervals and p-values: over seeds and
    images, over the images of one seed, or over splits, seeds and images.

    Both are read from the runs' predictions.csv. It keeps nine digits of a margin, so that margins equal in all of them
    count as ties.
    """
    import json

    from duplex.config.params import load_params

    params = load_params()
    params.dataset(dataset)
    world = require(world, WORLDS, "world")
    report = (
        _on_one(params, dataset, methods, seed, world)
        if splits is None
        else _over_splits(params, dataset, splits, methods, seed, world)
    )
    typer.echo(json.dumps(report, indent=2, allow_nan=False) if as_json else _text(report))


def _on_one(params: Params, dataset: str, methods: tuple[str, str], seed: int | None, world: str) -> dict[str, Any]:
    from dataclasses import asdict

    from duplex.cli.differences import points
    from duplex.evaluation.seeds import compare_seeds

    seeds, before, after = _runs(params, dataset, methods, seed, world)
    gains = compare_seeds(before, after)
    return {
        "dataset": dataset,
        "world": world,
        "seeds": seeds,
        "first": methods[0],
        "second": methods[1],
        "images_seen": before[0].seen.size,
        "images_unseen": before[0].unseen.size,
        "difference": {name: points(asdict(gain)) for name, gain in gains.items()},
    }


def _over_splits(
    params: Params, dataset: str, splits: int, methods: tuple[str, str], seed: int | None, world: str
) -> dict[str, Any]:
    from dataclasses import asdict

    from duplex.cli.differences import points
    from duplex.data.resplit import split_name
    from duplex.evaluation.splits import compare_splits

    names = [split_name(dataset, number) for number in range(1, splits + 1)]
    absent = next((name for name in names if name not in params.datasets), None)
    if absent:
        raise UsageError(f"params.yaml has no {absent}; `duplex data split {dataset} --splits {splits}` adds it")
    found = [_runs(params, name, methods, seed, world) for name in names]
    over = compare_splits([before for _, before, _ in found], [after for _, _, after in found])
    return {
        "dataset": dataset,
        "world": world,
        "splits": [
            {"dataset": name, "seeds": seeds, "difference": {key: 100 * value for key, value in gain.items()}}
            for name, (seeds, _, _), gain in zip(names, found, over.by_split, strict=True)
        ],
        "first": methods[0],
        "second": methods[1],
        "difference": {name: points(asdict(gain)) for name, gain in over.difference.items()},
        "deviation": {name: 100 * value for name, value in over.deviation.items()},
    }


def _runs(
    params: Params, dataset: str, methods: tuple[str, str], seed: int | None, world: str
) -> tuple[list[int], list[Margins], list[Margins]]:
    """The seeds of two methods on one data set, and their runs, which are of the same images."""
    rows = [params.shown(method, world) for method in methods]  # type: ignore[arg-type]
    seeds = [seed] if seed is not None else _common_seeds(params, dataset, rows)
    files = [[_file(params, dataset, row, one) for one in seeds] for row in rows]
    tables = [
        [
            _predictions(file, f"--dataset {dataset} --method {row} --seed {one}", world)
            for file, one in zip(paths, seeds, strict=True)
        ]
        for row, paths in zip(rows, files, strict=True)
    ]
    first = tables[0][0]
    for paths, found in zip(files, tables, strict=True):
        for path, table in zip(paths, found, strict=True):
            if not first[IMAGES].equals(table[IMAGES]):
                raise UsageError(f"{files[0][0]} and {path} are of different images; `duplex evaluate` both runs again")
    before, after = ([_margins(table) for table in found] for found in tables)
    return seeds, before, after


def _common_seeds(params: Params, dataset: str, rows: list[str]) -> list[int]:
    """Seeds that both were evaluated with; of what was not evaluated at all, the first seed, whose absence has a
    sentence of its own."""
    asked = [params.ablation_run.seeds if row in params.ablations else params.run.seeds for row in rows]
    every = sorted({*asked[0], *asked[1]})
    there = [seed for seed in every if all(_file(params, dataset, row, seed).exists() for row in rows)]
    return there or every[:1]


def _file(params: Params, dataset: str, row: str, seed: int) -> Path:
    """Predictions of a run: an ablation's own where the table has been made, else as `duplex evaluate` leaves them."""
    from duplex.config.artifacts import ArtifactPaths

    paths = ArtifactPaths()
    kept = paths.ablation_run(row, dataset, seed).predictions
    return kept if row in params.ablations and kept.exists() else paths.run(dataset, row, seed).predictions


def _predictions(file: Path, run: str, world: str) -> pd.DataFrame:
    """One world's images, in the order of their rows in the feature cache."""
    from duplex.report.results import read_table

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

    place = f"{report['dataset']}, {report['world']} world, {_over(report)}"
    head = f"{report['second']} - {report['first']}: {place}"
    lines = [f"{NAMES[name]:<5}{span(gain)}   {p_value(gain['p'])}" for name, gain in report["difference"].items()]
    return "\n".join([head, *(line.rstrip() for line in lines), *_remarks(report)])


def _over(report: dict[str, Any]) -> str:
    if "splits" in report:
        seeds = sorted({seed for split in report["splits"] for seed in split["seeds"]})
        return f"mean of {len(report['splits'])} splits, seeds {', '.join(map(str, seeds))}"
    seeds = report["seeds"]
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of seeds {', '.join(map(str, seeds))}"


def _remarks(report: dict[str, Any]) -> list[str]:
    """How many images there were, or how far the splits lie apart."""
    from duplex.cli.differences import number

    if "splits" not in report:
        return [f"{report['images_seen']} seen and {report['images_unseen']} unseen images"]
    width = max(len(split["dataset"]) for split in report["splits"])
    apart = ((split["dataset"], split["difference"]) for split in report["splits"])
    rows = [*apart, ("deviation", report["deviation"])]
    return [
        f"{name:<{width}}  " + "  ".join(f"{NAMES[key]} {number(value)}" for key, value in gains.items())
        for name, gains in rows
    ]
