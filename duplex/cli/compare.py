"""`duplex compare`: paired comparison of two trained methods on the same test images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.cli import app
from duplex.cli.formatting import print_json
from duplex.cli.options import AsJson, Dataset, load_params, seed_option
from duplex.errors import DuplexError, UsageError, require
from duplex.labels import WORLDS
from duplex.metric_table import METRICS, aligned, estimate_line, number, to_points

if TYPE_CHECKING:
    import pandas as pd

    from duplex.config.params import Params
    from duplex.evaluation.curve import Margins

SHARED_COLUMNS = ["row", "image", "label", "seen"]  # must agree between both runs
ROUNDING = 0.01  # percentage points by which nine digits of a margin may change an AUC


@app.command()
def compare(
    dataset: Dataset,
    methods: Annotated[
        tuple[str, str], typer.Option("--methods", help="Two methods or ablations to compare: FIRST SECOND.")
    ],
    seed: Annotated[
        int | None, seed_option("Seed of the runs to compare; default: all seeds that both methods have.")
    ] = None,
    world: Annotated[str, typer.Option("--world", help="World to compare in: closed or open.")] = "closed",
    splits: Annotated[
        int | None,
        typer.Option(
            "--splits",
            min=2,
            help="Average over this many data sets NAME-split1, NAME-split2, … that `duplex data split` made.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print how far the second method's S, U, HM and AUC exceed the first's, in percentage points.

    Each difference has a 95 % interval and a p-value, which cover variance over test images, seeds and re-splits (other
    random choices of unseen pairs). Margins, the biases at which images turn right or wrong, are read from the runs'
    predictions.csv with nine digits; equal margins count as ties.
    """
    from duplex.data.dataset import split_name
    from duplex.evaluation.uncertainty import compare_seeds

    params = load_params()
    params.dataset(dataset)
    require(world, WORLDS, "world")
    names = [dataset] if splits is None else [split_name(dataset, number + 1) for number in range(splits)]
    if missing := next((name for name in names if name not in params.datasets), None):
        raise UsageError(
            f"params.yaml has no data set {missing}; `duplex data split {dataset} --splits {splits}` adds it"
        )
    runs = {name: _margins_of_runs(params, name, methods, seed, world) for name in names}
    report: dict[str, Any] = {"dataset": dataset, "world": world, "first": methods[0], "second": methods[1]}
    if splits is None:
        seeds, first, second = runs[dataset]
        images = {"images_seen": first[0].seen.size, "images_unseen": first[0].unseen.size}
        report |= {"seeds": seeds, **images, "difference": to_points(compare_seeds(first, second))}
    else:
        report |= _splits_report(runs)
    if as_json:
        print_json(report)
    else:
        typer.echo(_text(report))


def _splits_report(runs: Mapping[str, tuple[list[int], list[Margins], list[Margins]]]) -> dict[str, Any]:
    from duplex.evaluation.uncertainty import compare_splits

    comparison = compare_splits([first for _, first, _ in runs.values()], [second for _, _, second in runs.values()])
    return {
        "splits": [
            {"dataset": name, "seeds": seeds, "difference": {key: 100 * value for key, value in gain.items()}}
            for (name, (seeds, _, _)), gain in zip(runs.items(), comparison.by_split, strict=True)
        ],
        "difference": to_points(comparison.difference),
        "deviation": {name: 100 * value for name, value in comparison.deviation.items()},
    }


def _margins_of_runs(
    params: Params, dataset: str, methods: tuple[str, str], seed: int | None, world: str
) -> tuple[list[int], list[Margins], list[Margins]]:
    """The seeds to compare and, per method, the `Margins` of its test images for each seed."""
    from duplex.artifacts import ArtifactPaths
    from duplex.data.prepared_source import require_prepared
    from duplex.evaluation.curve import Margins

    require_prepared(params.dataset(dataset).source, ArtifactPaths().source(dataset))
    entries = [params.method_for_world(method, world) for method in methods]  # type: ignore[arg-type]
    seeds = [seed] if seed is not None else _common_seeds(params, dataset, entries)
    margins: list[list[Margins]] = [[], []]
    first: tuple[Path, pd.DataFrame] | None = None
    for entry, margins_by_seed in zip(entries, margins, strict=True):
        for run_seed in seeds:
            path = _predictions_file(params, dataset, entry, run_seed)
            table = _read_predictions(path, f"--dataset {dataset} --method {entry} --seed {run_seed}", world)
            first = first or (path, table)
            if not first[1][SHARED_COLUMNS].equals(table[SHARED_COLUMNS]):
                raise UsageError(f"{first[0]} and {path} have different images; `duplex evaluate` both runs again")
            is_seen = table["seen"].to_numpy(dtype=bool)
            margin = table["margin"].to_numpy(dtype=float)
            found = Margins(margin[is_seen], margin[~is_seen], is_seen)
            _check_run(params, dataset, entry, run_seed, path, world, found)
            margins_by_seed.append(found)
    return seeds, margins[0], margins[1]


def _check_run(
    params: Params, dataset: str, entry: str, seed: int, predictions: Path, world: str, margins: Margins
) -> None:
    """Warn if a run was trained with other settings than params.yaml has now.

    Raises `DuplexError` if the AUC computed from the margins in its predictions.csv differs from its metrics.json.
    """
    from duplex.artifacts import ArtifactPaths, RunPaths
    from duplex.evaluation.uncertainty import Components
    from duplex.report.aggregate import read_numbers
    from duplex.stages.ablate import is_outdated
    from duplex.stages.outdated_runs import metrics_difference, run_difference
    from duplex.training.checkpoint import read_record

    paths, files = ArtifactPaths(), RunPaths(predictions.parent)
    metrics = read_numbers(files.metrics) or {}
    if files.root == paths.run(dataset, entry, seed).root and files.checkpoint.is_file():
        record = read_record(files.checkpoint)
        difference = run_difference(record, params, dataset, entry, seed, paths)
        if difference := difference or metrics_difference(record, metrics, params, entry):
            message = f"{files.root} does not match {entry} with seed {seed} in params.yaml: {difference}"
            typer.echo(f"duplex: {message}; `dvc repro` makes it again", err=True)
    elif files.root == paths.ablation_run(entry, dataset, seed).root and is_outdated(params, entry, dataset, files):
        typer.echo(
            f"duplex: {files.root} was run with other settings of {entry} than params.yaml has; "
            "`make ablations` runs it again",
            err=True,
        )
    stated, auc = metrics.get(world, {}), Components.of(margins).auc
    if "tied" in stated and auc is not None and abs(100 * auc - stated["auc"]) > ROUNDING:
        run = f"--dataset {dataset} --method {entry} --seed {seed}"
        raise DuplexError(
            f"{predictions} gives an AUC of {100 * auc:.2f}, but metrics.json says {stated['auc']:.2f}; "
            f"`duplex evaluate {run}` writes both again"
        )


def _common_seeds(params: Params, dataset: str, entries: list[str]) -> list[int]:
    """The seeds that both methods were evaluated with; if none, one seed, which the message on a missing run names."""
    planned = [params.ablation_run.seeds if entry in params.ablations else params.run.seeds for entry in entries]
    seeds = sorted({*planned[0], *planned[1]})
    evaluated = [
        seed for seed in seeds if all(_predictions_file(params, dataset, entry, seed).exists() for entry in entries)
    ]
    return evaluated or seeds[:1]


def _predictions_file(params: Params, dataset: str, entry: str, seed: int) -> Path:
    from duplex.artifacts import ArtifactPaths

    paths = ArtifactPaths()
    ablation = paths.ablation_run(entry, dataset, seed).predictions
    is_tabulated = entry in params.ablations and ablation.exists()
    return ablation if is_tabulated else paths.run(dataset, entry, seed).predictions


def _read_predictions(file: Path, run: str, world: str) -> pd.DataFrame:
    """Read a run's predictions in one world, one row per test image in the order of the feature cache.

    Raises `DuplexError` if the file is missing or incomplete. `run`: the command-line options that name the run.
    """
    import pandas as pd

    from duplex.report.results import read_table, require_own

    table = read_table(file, f"`duplex evaluate {run}` writes it again")
    if table is None:
        raise DuplexError(f"{file} does not exist; `duplex train {run}` and `duplex evaluate {run}` write it")
    missing = [column for column in (*SHARED_COLUMNS, "right", "margin", "world") if column not in table]
    if missing:
        raise DuplexError(f"{file} has no column {missing[0]!r}; `duplex evaluate {run}` writes it again")
    require_own(table, file, f"`duplex evaluate {run}` writes both again")
    images = table[table["world"] == world]
    if images.empty:
        raise DuplexError(
            f"{file} has no images of the {world} world; "
            f"add {world} to evaluation.worlds in params.yaml and run `duplex evaluate {run}`"
        )
    margin, row = (pd.to_numeric(images[name], errors="coerce") for name in ("margin", "row"))
    if (margin.isna() & images["margin"].notna()).any() or row.isna().any():
        raise DuplexError(f"{file} has values that are not numbers; `duplex evaluate {run}` writes it again")
    if row.duplicated().any():
        raise DuplexError(f"{file} lists an image twice; `duplex evaluate {run}` writes it again")
    return images.assign(margin=margin, row=row).sort_values("row", kind="stable").reset_index(drop=True)


def _text(report: dict[str, Any]) -> str:
    splits = report.get("splits")
    seeds = sorted({seed for split in splits or [report] for seed in split["seeds"]})
    seed_list = ", ".join(map(str, seeds))
    if splits:
        runs = f"mean of {len(splits)} splits, seeds {seed_list}"
    else:
        runs = f"seed {seed_list}" if len(seeds) == 1 else f"mean of seeds {seed_list}"
    lines = [f"{report['second']} - {report['first']}: {report['dataset']}, {report['world']} world, {runs}"]
    lines += [estimate_line(f"{METRICS[name]:<5}", gain) for name, gain in report["difference"].items()]
    if not splits:
        return "\n".join([*lines, f"{report['images_seen']} seen and {report['images_unseen']} unseen images"])
    gains = {split["dataset"]: split["difference"] for split in splits} | {"deviation": report["deviation"]}
    rows = [
        [name, *(f"{METRICS[key]} {number(gain):>6}" for key, gain in each.items())] for name, each in gains.items()
    ]
    return "\n".join([*lines, aligned(rows)])
