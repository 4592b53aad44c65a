"""What the report is made of: the files of every run, read once; what does not exist is simply absent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from duplex.errors import DuplexError
from duplex.labels import WORLDS
from duplex.report.curves import MeanCurve, margins_of, mean_curve

Tree = dict[str, Any]


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
class DatasetMaterial:
    """One data set: its runs by method and seed, the aggregate over seeds, and what describes it."""

    name: str
    summary: Mapping[str, Tree]  # method -> world -> seen, seen_se, ...; -> "groups" -> accuracies
    runs: Mapping[str, Mapping[int, Run]] = field(default_factory=dict)
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
                found[method] = mean_curve(sound)
        return found


@dataclass(frozen=True)
class Material:
    datasets: tuple[DatasetMaterial, ...]
    metrics_file: str = "artifacts/metrics.json"
    ablations_file: str = "artifacts/ablations/metrics.json"
    seeds: tuple[int, ...] = ()


def read_run(files: RunFiles) -> Run:
    """A run's files. Its metrics must exist; the rest may not."""
    places = {
        name: getattr(files, name).as_posix()
        for name in ("metrics", "history", "timing", "evaluation_timing", "predictions")
    }
    return Run(
        metrics=read_tree(files.metrics) or {},
        history=read_table(files.history),
        timing=read_tree(files.timing) or {},
        evaluation_timing=read_tree(files.evaluation_timing) or {},
        predictions=read_table(files.predictions),
        files=places,
    )


def read_tree(path: Path) -> Tree | None:
    """A JSON table, or None where there is no such file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DuplexError(f"{path} is not a table in JSON ({error}); `dvc repro -f` writes it again") from error


def read_table(path: Path) -> pd.DataFrame | None:
    """A CSV, or None. Names stay text: a state called `NA` or `1` is no number."""
    text = ("image", "label", "object", "map", "kind", "world", "top1", "top2", "top3")
    try:
        frame = pd.read_csv(
            path, dtype=dict.fromkeys(text, str), keep_default_na=False, na_values={"margin": ["", "nan"]}
        )
    except FileNotFoundError:
        return None
    except (ValueError, pd.errors.ParserError) as error:
        raise DuplexError(f"{path} is not a table ({error}); `dvc repro -f` writes it again") from error
    return frame
