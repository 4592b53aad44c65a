"""Paths of all files that the DVC pipeline writes."""

from __future__ import annotations

from pathlib import Path

# Names of folders beside those of the data sets
RESERVED = (
    "ablations", "inventory", "maps", "pages", "plan", "plots", "report", "reproduced", "trained", "trials.partial",
)  # fmt: skip


def log_folder(log: str, dataset: str, method: str, seed: int) -> Path:
    """Folder of a run's training log, `LOG/DATASET/METHOD/SEED`; `log`: the logger's name."""
    return Path(log) / dataset / method / str(seed)


class RunPaths:
    """Files in the folder `root` of a run, which is a method trained on a data set with a seed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoint = root / "checkpoint.safetensors"
        self.history = root / "history.csv"
        self.timing = root / "timing.json"
        self.metrics = root / "metrics.json"
        self.evaluation_timing = root / "evaluation_timing.json"
        self.curve = root / "curve.csv"
        self.predictions = root / "predictions.csv"
        self.unfinished_training = root / "training.partial"  # state from which interrupted training continues

    def stamp(self, stage: str) -> Path:
        """File that records what the stage `train` or `evaluate` was computed from."""
        return self.root / f"{stage}.stamp.json"


class ArtifactPaths:
    """Paths of all files that the DVC pipeline writes, in the folder `artifacts/`."""

    root = Path("artifacts")

    def __init__(self, root: Path = root) -> None:
        self.root = root
        self.ablations = root.parent / "ablations" / "artifacts" / "summary.json"  # of a DVC project of its own
        self.plan = root / "plan"  # folder of the plan: records that stages depend on
        self.metrics = root / "metrics.json"
        self.summary = root / "summary.json"
        self.runs = root / "runs.csv"  # one line per run and world
        self.plots = root / "plots"
        self.report = root / "report"
        self.trials = root / "trials.partial"  # folder of the trials of `duplex tune`

    def of_reproduction(self, dataset: str) -> ArtifactPaths:
        """These paths for `duplex reproduce`: report, plots and tables in `reproduced/DATASET`."""
        paths = ArtifactPaths(self.root)
        folder = self.root / "reproduced" / dataset
        paths.report = folder
        paths.plots = folder / "plots"
        paths.runs = folder / "runs.csv"
        paths.summary = paths.ablations = folder / "summary.json"
        return paths

    def page(self, dataset: str) -> Path:
        return self.root / "pages" / f"{dataset}.html"

    def manifest(self, dataset: str) -> Path:
        return self.root / dataset / "manifest.csv"

    def image_digests(self, dataset: str) -> Path:
        """Path of a file that remembers the images' digests by size and time; it may be deleted."""
        return self.root / dataset / "images.partial"

    def labels(self, dataset: str) -> Path:
        return self.root / dataset / "labels.json"

    def stamp(self, dataset: str, stage: str) -> Path:
        """File that records what the stage `prepare` or `extract` was computed from."""
        return self.root / dataset / f"{stage}.stamp.json"

    def statistics(self, dataset: str) -> Path:
        return self.root / dataset / "statistics.json"

    def features(self, dataset: str) -> Path:
        return self.root / dataset / "features.h5"

    def extraction(self, dataset: str) -> Path:
        """File with the size of the feature cache, and the images that could not be read."""
        return self.root / dataset / "extraction.json"

    def run(self, dataset: str, method: str, seed: int) -> RunPaths:
        return RunPaths(self.root / dataset / method / str(seed))

    def trained(self, dataset: str, method: str, seed: int) -> Path:
        """Digest of a run's checkpoint, on which DVC stages that combine runs depend."""
        return self.root / "trained" / dataset / f"{method}-{seed}.json"

    def inventory(self, dataset: str) -> Path:
        """Folder with hashes of a data set's files, and the run shown in the report's maps."""
        return self.root / "inventory" / dataset

    def maps(self, dataset: str) -> Path:
        """CSV table of t-SNE coordinates of test images and prototypes."""
        return self.root / "maps" / f"{dataset}.csv"
