"""`duplex params`, `train`, `evaluate`, `metrics`: the pipeline's steps one by one, without DVC."""

from __future__ import annotations

from typing import Annotated

import typer

Dataset = Annotated[str, typer.Option("--dataset", "-d", help="A data set of params.yaml.")]
Method = Annotated[str, typer.Option("--method", "-m", help="A method or an ablation of params.yaml.")]
Seed = Annotated[int, typer.Option("--seed", "-s", min=0, help="Seed of initial values, order and dropout.")]
HEADLINE = (("S", "seen"), ("U", "unseen"), ("HM", "hm"), ("AUC", "auc"))
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def register(app: typer.Typer) -> None:
    app.command("params")(show_params)
    app.command("train")(train)
    app.command("evaluate")(evaluate)
    app.command("metrics")(metrics)


def show_params(
    check: Annotated[bool, typer.Option("--check", help="Print nothing; fail where something is wrong.")] = False,
) -> None:
    """Check params.yaml and print it with every default filled in, as JSON."""
    from duplex.params import load_params

    params = load_params()
    if not check:
        typer.echo(params.model_dump_json(indent=2))


def train(dataset: Dataset, method: Method = "duplex", seed: Seed = 0) -> None:
    """Train one method on cached features and keep its best epoch by validation AUC."""
    from duplex.artifacts import ArtifactPaths
    from duplex.params import load_params
    from duplex.stages import train as stage

    outcome = stage.run(load_params(), dataset, method, seed)
    where = ArtifactPaths().run(dataset, method, seed).checkpoint
    typer.echo(f"{where}: epoch {outcome.best_epoch}, validation AUC {100 * outcome.best_auc:.2f}", err=True)


def evaluate(dataset: Dataset, method: Method = "duplex", seed: Seed = 0, as_json: AsJson = False) -> None:
    """Evaluate a trained method on the test split: exact metrics with intervals, closed and open world."""
    import json

    from duplex.params import load_params
    from duplex.stages import evaluate as stage

    found = stage.run(load_params(), dataset, method, seed)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for world in ("closed", "open"):
        if world in found:
            values = found[world]
            interval = f"[{values['auc_low']:.2f}, {values['auc_high']:.2f}]"
            line = "  ".join(
                f"{name} {values[key]:.2f}" for name, key in (("S", "seen"), ("U", "unseen"), ("HM", "hm"))
            )
            typer.echo(f"{world:6}  {line}  AUC {values['auc']:.2f} {interval}")


def metrics(as_json: AsJson = False) -> None:
    """Print the aggregate of all runs, and where the report is."""
    import json

    from rich.console import Console
    from rich.table import Table

    from duplex.artifacts import ArtifactPaths
    from duplex.report.aggregate import metrics_table, read_metrics

    paths = ArtifactPaths()
    table = read_metrics(paths.metrics)
    if as_json:
        typer.echo(json.dumps(table, indent=2))
        return
    header, *rows = metrics_table(table)
    shown = Table(*header)
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)
    typer.echo(f"report: {paths.report / 'index.html'}")
