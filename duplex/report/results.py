"""Read the files of all runs for the report; missing files give None or empty tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from duplex.artifacts import RunPaths
from duplex.errors import DuplexError
from duplex.evaluation.accumulator import Floats
from duplex.evaluation.curve import Curve, Margins
from duplex.labels import WORLDS
from duplex.report.aggregate import Tree, read_numbers

POINTS, ROUNDS = 81, 200  # of a mean curve: its points, and bootstrap rounds of its interval
REPEAT_ALL = "`dvc repro -f` writes it again"
RUN_COLUMNS = ("dataset", "method", "seed", "world", "options", "val_auc", "val_auc_all", "epoch", "auc", "hm", "seen",
               "unseen", "seconds")  # fmt: skip


@dataclass(frozen=True)
class MeanCurve:
    """Seen–unseen curve, averaged over seeds: unseen accuracy at G evenly spaced seen accuracies, in percent.

    `low` to `high` is the 95 % interval of unseen accuracy over test images.
    """

    seen: Floats
    unseen: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class RunRecord:
    """Contents of the files of one run (data set, method, seed); `files`: name of a field -> path of its file."""

    metrics: Tree
    history: pd.DataFrame | None = None
    timing: Tree = field(default_factory=dict)
    evaluation_timing: Tree = field(default_factory=dict)
    predictions: pd.DataFrame | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        """Training time; None if the run's files do not record it."""
        per_epoch = self.timing.get("seconds_per_epoch")
        return None if self.history is None or per_epoch is None else per_epoch * (len(self.history) - 1)


@dataclass(frozen=True)
class DatasetResults:
    """Results of one data set for the report: runs by method and seed, means over seeds, ablations, data counts."""

    name: str
    summary: Mapping[str, Tree]  # method -> world -> seen, seen_se, ...; -> "groups" -> accuracies
    runs: Mapping[str, Mapping[int, RunRecord]] = field(default_factory=dict)
    shown_as: Mapping[str, str] = field(default_factory=dict)  # method -> the method that it is shown as
    ablations: Mapping[str, Tree] = field(default_factory=dict)  # name -> world -> ..., as `summary`
    statistics: Tree | None = None
    statistics_file: str = ""
    extraction: Tree | None = None
    extraction_file: str = ""
    identity: Mapping[str, str] = field(default_factory=dict)  # of the feature cache

    @cached_property
    def curves(self) -> dict[str, dict[str, MeanCurve]]:
        """Seen–unseen curves: world (`closed`, `open`) -> method -> curve, for the methods that have predictions."""
        curves: dict[str, dict[str, MeanCurve]] = {world: {} for world in WORLDS}
        for world, (method, runs) in product(WORLDS, self.runs.items()):
            margins = [margins_of(run.predictions, world) for run in runs.values() if run.predictions is not None]
            if known := [seed for seed in margins if seed is not None]:
                curves[world][self.shown_as.get(method, method)] = mean_curve(known)
        return curves


@dataclass(frozen=True)
class Results:
    """Results of all data sets, and the paths of the files that the report cites."""

    datasets: tuple[DatasetResults, ...]
    metrics_file: str = "artifacts/summary.json"
    ablations_file: str = "ablations/metrics.json"
    seeds: tuple[int, ...] = ()
    not_evaluated: Mapping[str, Sequence[str]] = field(default_factory=dict)  # data set -> names of runs


def read_run(files: RunPaths) -> RunRecord:
    """Read the files of a run (data set, method, seed); a missing file gives an empty table or None."""
    names = ("metrics", "history", "timing", "evaluation_timing", "predictions")
    return RunRecord(
        metrics=read_numbers(files.metrics) or {},
        history=read_table(files.history),
        timing=read_numbers(files.timing) or {},
        evaluation_timing=read_numbers(files.evaluation_timing) or {},
        predictions=read_predictions(files.predictions),
        files={name: getattr(files, name).as_posix() for name in names},
    )


def read_predictions(path: Path) -> pd.DataFrame | None:
    """Read a run's predictions on test images, `predictions.csv`; None if the file does not exist.

    Args:
        path: `artifacts/DATASET/METHOD/SEED/predictions.csv`; error messages name the run.

    Raises:
        DuplexError: if the file is damaged, or of another run than the metrics in the same folder.
    """
    options = zip(("--dataset", "--method", "--seed"), path.absolute().parts[-4:-1], strict=False)
    advice = f"`duplex evaluate {' '.join(map(' '.join, options))}` writes it again"
    table = read_table(path, advice)
    if table is not None:
        if missing := {"row", "image", "label", "seen", "right", "margin", "top1", "world"} - set(table):
            raise DuplexError(f"{path} has no column {min(missing)!r}; {advice}")
        require_own(table, path, advice)
    return table


def require_own(predictions: pd.DataFrame, path: Path, advice: str) -> None:
    """Raise `DuplexError` if predictions are of another run than the file metrics.json in the same folder.

    The accuracies at the bias chosen on validation are compared; if all are equal, the runs count as the same.
    Without metrics.json nothing is checked.

    Args:
        predictions: contents of the file `path`.
        advice: what to do about it, the end of the message.
    """
    metrics = read_numbers(path.with_name("metrics.json")) or {}
    for world, (is_seen, name) in product(WORLDS, enumerate(("unseen_at_val_bias", "seen_at_val_bias"))):
        right = predictions["right"][(predictions["world"] == world) & (predictions["seen"] == is_seen)]
        stated = metrics.get(world, {}).get(name)
        measured = 100 * pd.to_numeric(right, errors="coerce").mean()
        if len(right) and stated is not None and not abs(measured - stated) < 1e-6:
            raise DuplexError(f"{path} is of another run than the metrics.json beside it; {advice}")


def read_table(path: Path, advice: str = REPEAT_ALL) -> pd.DataFrame | None:
    """Read a CSV file of predictions, histories or maps; None if it does not exist.

    Names of states and objects stay text, even a state called `NA` or `1`. `advice`: how to write the file again.
    """
    text = ("image", "label", "object", "map", "kind", "world", "top1", "top2", "top3")
    missing = {"margin": ["", "nan"]}
    try:
        return pd.read_csv(path, dtype=dict.fromkeys(text, str), keep_default_na=False, na_values=missing)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DuplexError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, OverflowError) as error:
        raise DuplexError(f"{path} is not a table ({error}); {advice}") from error


def run_table(results: Results, options: Mapping[tuple[str, str], Mapping[str, Any]]) -> pd.DataFrame:
    """Table of all runs with metrics, for spreadsheets: a line per run and world (closed, open).

    Args:
        options: (data set, method) -> kind and options that params.yaml changes; the table holds them as JSON.
    """
    lines = []
    for data in results.datasets:
        for method, runs in data.runs.items():
            changed = json.dumps(options.get((data.name, method), {}))
            for seed, run in runs.items():
                for world in WORLDS:
                    if world in run.metrics:
                        place = {"dataset": data.name, "method": method, "seed": seed, "world": world}
                        numbers = {**run.metrics, **run.metrics[world]}
                        lines.append({**numbers, **place, "options": changed, "seconds": run.seconds})
    return pd.DataFrame(lines, columns=list(RUN_COLUMNS))


def margins_of(predictions: pd.DataFrame, world: str) -> Margins | None:
    """Margins (biases at which images become right or wrong) from a run's closed- or open-world predictions.

    None unless there are images of both seen and unseen pairs.
    """
    rows = predictions[predictions["world"] == world]
    is_seen = rows["seen"].to_numpy(dtype=bool)
    margin = rows["margin"].to_numpy(dtype=np.float64)
    if not is_seen.any() or is_seen.all():
        return None
    return Margins(margin[is_seen], margin[~is_seen], is_seen)


def mean_curve(seeds: Sequence[Margins], points: int = POINTS, rounds: int = ROUNDS) -> MeanCurve:
    """The seen–unseen curve, averaged over seeds: best unseen accuracy for each minimum of seen accuracy.

    A bootstrap round draws the same images for all seeds. Seeds with different test sets get no interval.
    """
    curves = [Curve.of(margins) for margins in seeds]
    top = max(float(curve.seen_accuracies[0]) for curve in curves)
    grid = np.linspace(0.0, top, points)
    centre = np.mean([unseen_at(c.seen_accuracies, c.unseen_accuracies, grid) for c in curves], axis=0)
    if len({(c.seen_until.size, c.unseen_from.size) for c in curves}) > 1:
        return MeanCurve(100 * grid, 100 * centre, 100 * centre, 100 * centre)
    rng = np.random.default_rng(0)
    drawn = np.empty((rounds, points))
    for turn in range(rounds):
        seen = rng.integers(0, curves[0].seen_until.size, curves[0].seen_until.size)
        unseen = rng.integers(0, curves[0].unseen_from.size, curves[0].unseen_from.size)
        drawn[turn] = np.mean([unseen_at(*curve.resampled(seen, unseen), grid) for curve in curves], axis=0)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return MeanCurve(100 * grid, 100 * centre, 100 * low, 100 * high)


def unseen_at(seen: Floats, unseen: Floats, grid: Floats) -> Floats:
    """The best unseen accuracy [G] on a seen–unseen curve for each minimum of seen accuracy; 0 if not reached.

    Args:
        seen, unseen: accuracies at the curve's points, seen accuracy falling.
        grid: minima of seen accuracy [G].
    """
    last = seen.size - np.searchsorted(seen[::-1], grid - 1e-12, side="left") - 1
    return np.where(last >= 0, unseen[last], 0.0)
