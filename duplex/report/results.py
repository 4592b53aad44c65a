"""What the report is made of: the files of every run, read once; what does not exist is simply absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import pandas as pd

from duplex.errors import DuplexError
from duplex.labels import WORLDS
from duplex.report.curves import MeanCurve, margins_of, mean_curve
from duplex.report.numbers import Tree, read_numbers
from duplex.system.files import reason


class RunFiles(Protocol):
    """Where the files of one run lie."""

    @property
    def metrics(self) -> Path: ...
    @property
    def history(self) -> Path: ...
    @property
    def timing(self) -> Path: ...
    @property
    def evaluation_timing(self) -> Path: ...
    @property
    def predictions(self) -> Path: ...


@dataclass(frozen=True)
class Run:
    """One data set x method x seed. `files` names where each part was read, as the page cites it."""

    metrics: Tree
    history: pd.DataFrame | None = None
    timing: Tree = field(default_factory=dict)
    evaluation_timing: Tree = field(default_factory=dict)
    predictions: pd.DataFrame | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetResults:
    """One data set: its runs by method and seed, the aggregate over seeds, and what describes it."""

    name: str
    summary: Mapping[str, Tree]  # method -> world -> seen, seen_se, ...; -> "groups" -> accuracies
    runs: Mapping[str, Mapping[int, Run]] = field(default_factory=dict)
    shown_as: Mapping[str, str] = field(default_factory=dict)  # row -> the method that it is in another world
    ablations: Mapping[str, Tree] = field(default_factory=dict)  # name -> world -> ..., as `summary`
    statistics: Tree | None = None
    statistics_file: str = ""
    extraction: Tree | None = None
    extraction_file: str = ""
    identity: Mapping[str, str] = field(default_factory=dict)  # of the feature cache

    @cached_property
    def curves(self) -> dict[str, dict[str, MeanCurve]]:
        """World -> method -> its mean curve, where its predictions are there."""
        return {world: self._curves(world) for world in WORLDS}

    def _curves(self, world: str) -> dict[str, MeanCurve]:
        found = {}
        for method, runs in self.runs.items():
            margins = [margins_of(run.predictions, world) for run in runs.values() if run.predictions is not None]
            if sound := [one for one in margins if one is not None]:
                found[self.shown_as.get(method, method)] = mean_curve(sound)
        return found


@dataclass(frozen=True)
class Results:
    datasets: tuple[DatasetResults, ...]
    metrics_file: str = "artifacts/summary.json"
    ablations_file: str = "ablations/metrics.json"
    seeds: tuple[int, ...] = ()
    absent: Mapping[str, Sequence[str]] = field(default_factory=dict)  # data set -> runs that were not evaluated


def read_run(files: RunFiles) -> Run:
    """A run's files. Its metrics must exist; the rest may not."""
    places = {
        name: getattr(files, name).as_posix()
        for name in ("metrics", "history", "timing", "evaluation_timing", "predictions")
    }
    return Run(
        metrics=read_tree(files.metrics) or {},
        history=_checked(files.history, (), ("epoch", "val_auc")),
        timing=read_tree(files.timing) or {},
        evaluation_timing=read_tree(files.evaluation_timing) or {},
        predictions=read_predictions(files.predictions),
        files=places,
    )


def read_tree(path: Path, *, names: int = 0) -> Tree | None:
    """A table of numbers in JSON, or None where there is no such file."""
    return read_numbers(path, "dvc repro", names=names)


def read_predictions(path: Path) -> pd.DataFrame | None:
    """A run's `predictions.csv`, or None."""
    return _checked(path, ("image", "label", "world", "top1"), ("row", "seen", "right", "margin"))


def read_maps(path: Path) -> pd.DataFrame | None:
    """A data set's maps, or None."""
    return _checked(path, ("map", "kind", "label", "object"), ("seen", "x", "y"))


def _checked(path: Path, texts: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame | None:
    """A table with these columns at least, of which `numbers` are that in every row."""
    table = read_table(path)
    if table is None:
        return None
    missing = [column for column in (*texts, *numbers) if column not in table]
    if missing:
        raise DuplexError(f"{path} has no column {missing[0]!r}; `dvc repro -f` writes it again")
    strange = [column for column in numbers if len(table) and not pd.api.types.is_numeric_dtype(table[column])]
    if strange:
        raise DuplexError(f"{path} has what is no number under {strange[0]!r}; `dvc repro -f` writes it again")
    return table


def read_table(path: Path) -> pd.DataFrame | None:
    """A CSV, or None. Names stay text: a state called `NA` or `1` is no number."""
    text = ("image", "label", "object", "map", "kind", "world", "top1", "top2", "top3")
    try:
        frame = pd.read_csv(
            path, dtype=dict.fromkeys(text, str), keep_default_na=False, na_values={"margin": ["", "nan"]}
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DuplexError(f"{path} cannot be read: {reason(error)}") from error
    except (ValueError, OverflowError, pd.errors.ParserError) as error:
        raise DuplexError(f"{path} is not a table ({error}); `dvc repro -f` writes it again") from error
    return frame
