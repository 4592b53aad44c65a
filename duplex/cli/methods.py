"""`duplex params`, `methods`, `prepare`, `train`, `evaluate`, `metrics`: the pipeline's steps, without DVC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.system.script import LARGEST_SEED

Dataset = Annotated[str, typer.Option("--dataset", "-d", help="A data set of params.yaml.")]
Method = Annotated[str, typer.Option("--method", "-m", help="A method or an ablation of params.yaml.")]
Seed = Annotated[
    int, typer.Option("--seed", "-s", min=0, max=LARGEST_SEED, help="Seed of initial values, order and dropout.")
]
if TYPE_CHECKING:
    from duplex.config.params import Params

HEADLINE = (("S", "seen"), ("U", "unseen"), ("HM", "hm"), ("AUC", "auc"))
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def register(app: typer.Typer) -> None:
    app.command("params")(show_params)
    app.command("methods")(methods)
    app.command("prepare")(prepare)
    app.command("train")(train)
    app.command("evaluate")(evaluate)
    app.command("metrics")(metrics)


def show_params(
    check: Annotated[bool, typer.Option("--check", help="Print nothing; fail where something is wrong.")] = False,
) -> None:
    """Check params.yaml and print it with every default filled in, as JSON."""
    import json

    from duplex.config.params import load_params

    params = load_params()
    params.check_rows()
    if not check:
        record = json.loads(params.model_dump_json(exclude={"methods", "ablations"}))
        for section in ("methods", "ablations"):
            record[section] = {name: _row(params, name) for name in getattr(params, section)}
        typer.echo(json.dumps(record, indent=2, ensure_ascii=False))


def _row(params: Params, name: str) -> dict[str, Any]:
    """A row with the options that it leaves out; what it says of training and of single data sets as it is written."""
    row = params.row(name)
    changes = {"training": dict(row.training), "on": dict(row.on), "shown_as": row.shown_as}
    said = {key: value for key, value in changes.items() if value}
    return {"kind": row.kind, "world": row.world, **params.method(name).to_dict(), **said}


def methods(as_json: AsJson = False) -> None:
    """The kinds of methods that are installed: what they read, their options with defaults, and who brings them."""
    import json

    from duplex.methods.registry import describe, sources

    found = [describe(kind) for kind in sources()]
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for one in found:
        typer.echo(f"{one['kind']}  ({one['source']})")
        if "error" in one:
            typer.echo(f"  {one['error']}")
            continue
        typer.echo(f"  reads {', '.join(one['needs'])}")
        for option in one["options"]:
            typer.echo(f"  {option['name']}: {option['type']} = {json.dumps(option['default'])}")


def prepare(dataset: Dataset) -> None:
    """Write a data set's manifest, labels and statistics; draw its pictures if it is a drawn one."""
    from duplex.config.artifacts import ArtifactPaths
    from duplex.config.params import load_params
    from duplex.stages import prepare as stage

    stage.prepare(load_params(), dataset)
    typer.echo(f"{ArtifactPaths().manifest(dataset)} is written", err=True)


def train(dataset: Dataset, method: Method = "duplex", seed: Seed = 0) -> None:
    """Train one method on cached features and keep its best epoch by validation AUC."""
    from duplex.config.artifacts import ArtifactPaths
    from duplex.config.params import load_params
    from duplex.stages import train as stage

    outcome = stage.run(load_params(), dataset, method, seed)
    where = ArtifactPaths().run(dataset, method, seed).checkpoint
    typer.echo(f"{where}: epoch {outcome.best_epoch}, validation AUC {100 * outcome.best_auc:.2f}", err=True)


def evaluate(dataset: Dataset, method: Method = "duplex", seed: Seed = 0, as_json: AsJson = False) -> None:
    """Evaluate a trained method on the test split: exact metrics with intervals, closed and open world."""
    import json

    from duplex.config.params import load_params
    from duplex.stages import evaluate as stage

    found = stage.run(load_params(), dataset, method, seed)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for world in ("closed", "open"):
        if world in found:
            typer.echo(f"{world:6}  {headline(found[world])}")


def headline(values: Mapping[str, Any]) -> str:
    """`S 41.30  U 20.00  HM 18.20  AUC 6.90 [6.10, 7.80]`; what is undefined is a dash, and the sampled protocol has
    no interval."""
    line = "  ".join(
        f"{name} {values[key]:.2f}" if values.get(key) is not None else f"{name} –" for name, key in HEADLINE
    )
    low, high = values.get("auc_low"), values.get("auc_high")
    return line if low is None or high is None else f"{line} [{low:.2f}, {high:.2f}]"


def metrics(as_json: AsJson = False) -> None:
    """Print the aggregate of all runs, and where the report is."""
    import json

    from duplex.config.artifacts import ArtifactPaths
    from duplex.report.aggregate import metrics_table, read_metrics

    paths = ArtifactPaths()
    table = read_metrics(paths.summary, "dvc repro report")
    if as_json:
        typer.echo(json.dumps(table, indent=2))
        return
    rows = metrics_table(table)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # never wrapped or cut, however narrow the terminal
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    typer.echo(f"report: {paths.report / 'index.html'}")
