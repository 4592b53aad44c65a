"""`duplex params`, `methods`, `prepare`, `train`, `evaluate`, `metrics`: single steps of the pipeline, without DVC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.cli import app
from duplex.cli.formatting import print_json
from duplex.cli.options import AsJson, Dataset, load_params, seed_option
from duplex.errors import DuplexError
from duplex.metric_table import aligned, headline

Method = Annotated[str, typer.Option("--method", "-m", help="A method or an ablation of params.yaml.")]
Seed = Annotated[int, seed_option("Seed of the run: of initial values, batches and dropout.")]
if TYPE_CHECKING:
    from duplex.config.params import Params


@app.command("params")
def show_params(
    check: Annotated[
        bool, typer.Option("--check", help="Only check params.yaml; print nothing if it is valid.")
    ] = False,
) -> None:
    """Check params.yaml and print it as JSON, with all defaults filled in."""
    import json

    params = load_params()
    params.check_entries()
    if not check:
        record = json.loads(params.model_dump_json(exclude={"methods", "ablations"}))
        for section in ("methods", "ablations"):
            record[section] = {name: _entry(params, name) for name in getattr(params, section)}
        print_json(record)


def _entry(params: Params, name: str) -> dict[str, Any]:
    """A method's entry in params.yaml with default options filled in; `training` and `per_dataset` stay as written."""
    entry = params.entry(name)
    overrides = {"training": dict(entry.training), "per_dataset": dict(entry.per_dataset), "shown_as": entry.shown_as}
    overrides = {key: value for key, value in overrides.items() if value}
    return {"kind": entry.kind, "world": entry.world, **params.method(name).to_dict(), **overrides}


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the installed kinds (classes) of methods: the inputs they need, their options, and their packages."""
    import json

    from duplex.methods.registry import describe_method, installed_methods

    kinds = [describe_method(kind) for kind in installed_methods()]
    if as_json:
        print_json(kinds)
        return
    for kind in kinds:
        typer.echo(f"{kind['kind']}  ({kind['source']})")
        if "error" in kind:
            typer.echo(f"  {kind['error']}")
            continue
        typer.echo(f"  needs {', '.join(kind['needs'])}")
        for option in kind["options"]:
            typer.echo(f"  {option['name']}: {option['type']} = {json.dumps(option['default'])}")


@app.command()
def prepare(dataset: Dataset) -> None:
    """Write a data set's manifest (table of images), labels, statistics and a record of its source.

    For the built-in data set `shapes`, draw its images first. By the record, later commands notice that the source
    was edited.
    """
    from duplex.artifacts import ArtifactPaths
    from duplex.stages import prepare as stage

    stage.prepare(load_params(), dataset)
    typer.echo(f"wrote {ArtifactPaths().manifest(dataset)}", err=True)


@app.command()
def train(dataset: Dataset, method: Method = "duplex", seed: Seed = 0) -> None:
    """Train a method on cached features and write the checkpoint of its best epoch by validation AUC.

    An interrupted training is resumed by the same command.
    """
    from duplex.artifacts import ArtifactPaths
    from duplex.stages import train as stage

    outcome = stage.run(load_params(), dataset, method, seed)
    checkpoint = ArtifactPaths().run(dataset, method, seed).checkpoint
    chosen = "" if outcome.selected_by == "auc" else f" by {outcome.selected_by}"
    typer.echo(
        f"{checkpoint}: epoch {outcome.best_epoch}{chosen}, validation AUC {100 * outcome.best_auc:.2f}", err=True
    )


@app.command()
def evaluate(dataset: Dataset, method: Method = "duplex", seed: Seed = 0, as_json: AsJson = False) -> None:
    """Evaluate a trained method on the test split, and write and print its metrics with 95 % intervals."""
    from duplex.stages import evaluate as stage

    record = stage.run(load_params(), dataset, method, seed)
    if as_json:
        print_json(record)
        return
    for world in ("closed", "open"):
        if world in record:
            typer.echo(f"{world:6}  {headline(record[world])}")


@app.command()
def metrics(as_json: AsJson = False) -> None:
    """Print the metrics of all runs, averaged over seeds, and the path of the report."""
    from duplex.artifacts import ArtifactPaths
    from duplex.report.aggregate import NO_RUN, aggregate, metrics_table, read_metrics
    from duplex.stages.report import evaluated_runs, warn_of_outdated

    paths, params = ArtifactPaths(), load_params()
    runs, _ = evaluated_runs(params, paths)
    table = read_metrics(paths.summary, "dvc repro report") if runs or paths.summary.is_file() else {}
    if not table and not runs:
        raise DuplexError(NO_RUN)
    if aggregate(runs) != table:
        typer.echo(
            f"{paths.summary} does not match the runs in {paths.root}; `duplex report` writes it again", err=True
        )
    warn_of_outdated(params, paths)
    if as_json:
        print_json(table)
        return
    typer.echo(aligned(metrics_table(table)))
    typer.echo(f"report: {paths.report / 'index.html'}")
