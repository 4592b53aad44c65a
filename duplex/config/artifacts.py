"""Where every file of a run lives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """The files of one data set x method x seed."""

    root: Path

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint.safetensors"

    @property
    def history(self) -> Path:
        return self.root / "history.csv"

    @property
    def timing(self) -> Path:
        return self.root / "timing.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    @property
    def evaluation_timing(self) -> Path:
        return self.root / "evaluation_timing.json"

    @property
    def curve(self) -> Path:
        return self.root / "curve.csv"

    @property
    def predictions(self) -> Path:
        return self.root / "predictions.csv"


RESERVED = (
    "ablations",
    "inventory",
    "maps",
    "plan",
    "plots",
    "report",
    "views",
)  # folders beside those of the data sets


@dataclass(frozen=True)
class ArtifactPaths:
    """The layout of `artifacts/`."""

    root: Path = Path("artifacts")

    def manifest(self, dataset: str) -> Path:
        return self.root / dataset / "manifest.csv"

    def labels(self, dataset: str) -> Path:
        return self.root / dataset / "labels.json"

    def statistics(self, dataset: str) -> Path:
        return self.root / dataset / "statistics.json"

    def features(self, dataset: str) -> Path:
        return self.root / dataset / "features.h5"

    def views(self, dataset: str) -> Path:
        """The cache of its training pictures' views, where there are any."""
        return self.root / "views" / dataset / "features.h5"

    def extraction(self, dataset: str) -> Path:
        return self.root / dataset / "extraction.json"

    def run(self, dataset: str, method: str, seed: int) -> RunPaths:
        return RunPaths(self.root / dataset / method / str(seed))

    @property
    def ablations(self) -> Path:
        """A DVC project of its own, beside the artifacts."""
        return self.root.parent / "ablations"

    def ablation_run(self, name: str, dataset: str, seed: int) -> RunPaths:
        """The metrics and predictions of one run of an ablation row."""
        return RunPaths(self.ablations / "runs" / name / dataset / str(seed))

    def ablation(self, name: str) -> Path:
        return self.ablations / "rows" / f"{name}.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan"

    def inventory(self, dataset: str) -> Path:
        return self.root / "inventory" / dataset

    def maps(self, dataset: str) -> Path:
        return self.root / "maps" / f"{dataset}.csv"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def report(self) -> Path:
        return self.root / "report"
