"""`duplex tune`: search for settings of methods on validation images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.cli import app
from duplex.cli.options import AsJson
from duplex.cli.sweep import parse_seeds, split_names
from duplex.errors import UsageError, require
from duplex.metric_table import aligned, number

if TYPE_CHECKING:
    from duplex.runs.tuning import TuningRow


@app.command()
def tune(
    grid: Annotated[
        list[str], typer.Option(help="Setting and its values to try, such as learning_rate=3e-4,1e-3; repeatable.")
    ],
    methods: Annotated[
        str | None, typer.Option(help="Methods, comma-separated; default: run.methods of params.yaml.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", "-d", help="Data set; default: the first of run.datasets.")
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Seeds, comma-separated, or a range such as 100-104; do not reuse run.seeds.")
    ] = "100,101",
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of worker processes; default: one per GPU; without GPU, by cores and threads."
        ),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write each method's best settings to params.yaml.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train methods with every combination of settings and list their validation AUC. Test images are not scored.

    Settings are training options, such as learning_rate and epochs, and options of the methods' kinds. Each method's
    best row is marked with *; --write saves its settings under `per_dataset` of the method in params.yaml, unless other
    settings have the same AUC. Exits with 1 if a trial failed.
    """
    from duplex.cli.formatting import print_json
    from duplex.config.params import load_params
    from duplex.runs.tuning import best_rows
    from duplex.runs.tuning import tune as search

    params = load_params()
    name = require(dataset or params.run.datasets[0], params.datasets, "data set")
    chosen = split_names(methods) or list(params.run.methods)
    rows = search(params, name, chosen, parse_grid(grid), parse_seeds(seeds) or [], jobs)
    best = best_rows(rows)
    if as_json:
        print_json([{**row.to_dict(), "best": row is best.get(row.method)} for row in rows])
    else:
        typer.echo(tuning_table(rows, list(best.values())))
    for row in rows:
        for error in row.errors[:1]:
            typer.echo(f"{row.method} {dict(row.settings)}: {error}", err=True)
    for row in list(best.values()):
        tied = [other for other in rows if other.method == row.method and other.val_auc == row.val_auc]
        if len(tied) > 1:
            del best[row.method]
            ends = "none of them is written" if write else "* marks the first"
            typer.echo(
                f"{row.method}: {len(tied)} settings have the same best AUC, {row.val_auc:.2f}; {ends}", err=True
            )
    if write:
        write_best(name, best)
    if any(row.errors for row in rows):
        raise typer.Exit(1)


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse texts such as `learning_rate=3e-4,1e-3` to a dictionary from settings to lists of values.

    Values are read as in params.yaml. Raises `UsageError` for other texts.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    choices: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        try:
            parsed = YAML(typ="safe", pure=True).load(f"[{values}]") if name and equals else None
        except YAMLError:
            parsed = None
        if not parsed:
            raise UsageError(f"--grid is {text!r}; expected a setting and its values, such as learning_rate=3e-4,1e-3")
        if name in choices:
            raise UsageError(f"--grid names {name} twice; give all its values at once")
        choices[name] = parsed
    return choices


def tuning_table(rows: Sequence[TuningRow], best: Sequence[TuningRow]) -> str:
    """The results of tuning as a table: method, settings, validation AUC with its standard error over seeds.

    Rows in `best` are marked with *.
    """
    lines = [["", "method", "settings", "val AUC", "±", "all pairs", "epoch", "seconds"]]
    for row in rows:
        record = row.to_dict()
        settings = ", ".join(f"{name} {_short(value)}" for name, value in row.settings.items())
        lines.append(["*" if row in best else "", row.method, settings, *_numbers(record)])
    return aligned(lines)


def _numbers(record: dict[str, Any]) -> list[str]:
    if "error" in record:
        return ["failed", "", "", "", ""]
    forms = {"val_auc": ".2f", "val_auc_se": ".2f", "val_auc_all": ".2f", "epoch": ".1f", "seconds": ".1f"}
    return [number(record[name], form) for name, form in forms.items()]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def write_best(dataset: str, best: dict[str, TuningRow]) -> None:
    """Write each method's best settings to params.yaml, as `per_dataset.DATASET` of the method.

    best: method -> its best row of the tuning results.
    """
    from dataclasses import fields

    from duplex.cli.params_file import set_method
    from duplex.options import TrainingOptions

    training = {field.name for field in fields(TrainingOptions)}
    for method, row in best.items():
        options = {key: value for key, value in row.settings.items() if key not in training}
        of_training = {key: value for key, value in row.settings.items() if key in training}
        set_method(method, dataset, options, of_training)
        typer.echo(f"params.yaml: {method}, per_dataset.{dataset}: {dict(row.settings)}", err=True)
