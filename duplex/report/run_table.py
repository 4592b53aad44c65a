"""Table of all runs, one line per run and world (closed, open), for spreadsheets and `pandas.read_csv`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from duplex.labels import WORLDS, World
from duplex.report.results import Results, RunRecord

COLUMNS = ("dataset", "method", "seed", "world", "options", "val_auc", "val_auc_all", "epoch", "auc", "hm", "seen",
           "unseen", "seconds")  # fmt: skip
TEST = ("auc", "hm", "seen", "unseen")  # metrics of the test images, in percent


def run_table(results: Results, options: Mapping[tuple[str, str], Mapping[str, Any]]) -> pd.DataFrame:
    """Return a table with a line per run and world: options, validation and test metrics, seconds of training.

    options: (data set, method) -> kind and options that params.yaml changes; the table holds them as JSON.

    Runs without metrics are left out.
    """
    lines = [
        {
            "dataset": data.name,
            "method": method,
            "seed": seed,
            "world": world,
            "options": json.dumps(options.get((data.name, method), {})),
            **_numbers(run, world),
        }
        for data in results.datasets
        for method, runs in data.runs.items()
        for seed, run in runs.items()
        for world in WORLDS
        if world in run.metrics
    ]
    return pd.DataFrame(lines, columns=list(COLUMNS))


def _numbers(run: RunRecord, world: World) -> dict[str, Any]:
    """Return a run's validation and test metrics in one world, and its training time; missing numbers are None."""
    validation = {name: run.metrics.get(name) for name in ("val_auc", "val_auc_all", "epoch")}
    return {**validation, **{name: run.metrics[world].get(name) for name in TEST}, "seconds": _seconds(run)}


def _seconds(run: RunRecord) -> float | None:
    """Return a run's training time in seconds; None if the run's files do not record it."""
    per_epoch = run.timing.get("seconds_per_epoch")
    return None if run.history is None or per_epoch is None else per_epoch * (len(run.history) - 1)
