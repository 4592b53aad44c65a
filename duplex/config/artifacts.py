"""Paths of all files that the pipeline writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """Files of one run: a method trained on a data set with a seed."""

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

    @property
    def unfinished_training(self) -> Path:
        """State from which interrupted training continues."""
        return self.root / "training.partial"

    @property
    def sweep_mark(self) -> Path:
        """Keys and hashes of the files that a sweep wrote, until DVC tracks them."""
        return self.root / "swept.partial"


# Names of folders beside those of the data sets
RESERVED = ("ablations", "inventory", "maps", "plan", "plots", "report", "views")


@dataclass(frozen=True)
class ArtifactPaths:
    """Files in `artifacts/`."""

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
        """Feature cache of random crops of the training images."""
        return self.root / "views" / dataset / "features.h5"

    def extraction(self, dataset: str) -> Path:
        """Size of the feature cache, and the images that could not be read."""
        return self.root / dataset / "extraction.json"

    def run(self, dataset: str, method: str, seed: int) -> RunPaths:
        return RunPaths(self.root / dataset / method / str(seed))

    @property
    def ablations(self) -> Path:
        """Folder of the ablations, a DVC project of its own."""
        return self.root.parent / "ablations"

    def ablation_run(self, name: str, dataset: str, seed: int) -> RunPaths:
        return RunPaths(self.ablations / "runs" / name / dataset / str(seed))

    def ablation(self, name: str) -> Path:
        """Metrics of all runs of an ablation."""
        return self.ablations / "rows" / f"{name}.json"

    @property
    def plan(self) -> Path:
        """Folder of the records that stages depend on."""
        return self.root / "plan"

    @property
    def checked_options(self) -> Path:
        """Digest of the plan whose options were checked last."""
        return self.root / "plan.partial"

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
