"""Read the files of all runs for the report; missing files give None or empty tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

import pandas as pd

from duplex.artifacts import RunPaths
from duplex.errors import DuplexError
from duplex.labels import WORLDS
from duplex.report.aggregate import Tree, read_numbers
from duplex.report.curves import MeanCurve, margins_of, mean_curve

REPEAT_ALL = "`dvc repro -f` writes it again"


@dataclass(frozen=True)
class RunRecord:
    """Contents of the files of one run (data set, method, seed); `files`: name of a field -> path of its file."""

    metrics: Tree
    history: pd.DataFrame | None = None
    timing: Tree = field(default_factory=dict)
    evaluation_timing: Tree = field(default_factory=dict)
    predictions: pd.DataFrame | None = None
    files: Mapping[str, str] = field(default_factory=dict)


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
        """Seen–unseen curves, averaged over seeds: world (`closed`, `open`) -> method -> curve.

        Methods whose runs have no predictions are left out.
        """
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
        metrics=read_tree(files.metrics) or {},
        history=_checked(files.history, (), ("epoch", "val_auc")),
        timing=read_tree(files.timing) or {},
        evaluation_timing=read_tree(files.evaluation_timing) or {},
        predictions=read_predictions(files.predictions),
        files={name: getattr(files, name).as_posix() for name in names},
    )


def read_tree(path: Path, *, names: int = 0) -> Tree | None:
    return read_numbers(path, "dvc repro", names=names)


def read_predictions(path: Path) -> pd.DataFrame | None:
    """Read a run's predictions on test images, `predictions.csv`; None if the file does not exist.

    Raise `DuplexError` if the predictions are of another run than the metrics in the same folder.

    path: `artifacts/DATASET/METHOD/SEED/predictions.csv`; error messages name the run.
    """
    options = zip(("--dataset", "--method", "--seed"), path.absolute().parts[-4:-1], strict=False)
    advice = f"`duplex evaluate {' '.join(map(' '.join, options))}` writes it again"
    table = _checked(path, ("image", "label", "world", "top1"), ("row", "seen", "right", "margin"), advice)
    if table is not None:
        require_own(table, path, advice)
    return table


def require_own(predictions: pd.DataFrame, path: Path, advice: str) -> None:
    """Raise `DuplexError` if predictions are of another run than the file metrics.json in the same folder.

    path: file of the predictions.
    advice: what to do about it, the end of the message.

    The accuracies at the bias chosen on validation are compared; if all are equal, the runs count as the same.
    Without metrics.json nothing is checked.
    """
    metrics = read_tree(path.with_name("metrics.json")) or {}
    for world, (is_seen, name) in product(WORLDS, enumerate(("unseen_at_val_bias", "seen_at_val_bias"))):
        right = predictions["right"][(predictions["world"] == world) & (predictions["seen"] == is_seen)]
        stated = metrics.get(world, {}).get(name)
        measured = 100 * pd.to_numeric(right, errors="coerce").mean()
        if len(right) and stated is not None and not abs(measured - stated) < 1e-6:
            raise DuplexError(f"{path} is of another run than the metrics.json beside it; {advice}")


def read_tsne_maps(path: Path) -> pd.DataFrame | None:
    """Read the CSV file with the points of a data set's t-SNE maps; None if it does not exist."""
    return _checked(path, ("map", "kind", "label", "object"), ("seen", "x", "y"))


def _checked(path: Path, texts: Sequence[str], numbers: Sequence[str], advice: str = REPEAT_ALL) -> pd.DataFrame | None:
    """Read a CSV file and check its columns; None if the file does not exist.

    texts: names of columns that must exist.
    numbers: names of columns that must exist and hold numbers.
    advice: how to write the file again, the end of error messages.

    Raise `DuplexError` for other files.
    """
    table = read_table(path, advice)
    if table is None:
        return None
    for column in (*texts, *numbers):
        if column not in table:
            raise DuplexError(f"{path} has no column {column!r}; {advice}")
    for column in numbers:
        if len(table) and not pd.api.types.is_numeric_dtype(table[column]):
            raise DuplexError(f"{path} has a value that is no number in column {column!r}; {advice}")
    return table


def read_table(path: Path, advice: str = REPEAT_ALL) -> pd.DataFrame | None:
    """Read a CSV file of predictions, histories or maps; None if it does not exist.

    Names of states and objects stay text, even a state called `NA` or `1`. Raise `DuplexError` for other files.

    advice: how to write the file again, the end of error messages.
    """
    text = ("image", "label", "object", "map", "kind", "world", "top1", "top2", "top3")
    missing = {"margin": ["", "nan"]}
    try:
        return pd.read_csv(path, dtype=dict.fromkeys(text, str), keep_default_na=False, na_values=missing)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DuplexError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, OverflowError, pd.errors.ParserError) as error:
        raise DuplexError(f"{path} is not a table ({error}); {advice}") from error
