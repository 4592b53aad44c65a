"""The trained runs of a project: which one answers where nobody names one, and the pictures that it learned from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from duplex.config.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.data.manifest import manifest_hash, read_manifest
from duplex.errors import DuplexError, UsageError
from duplex.features.store import Features, open_features
from duplex.recognition.card import Facts
from duplex.recognition.neighbours import Neighbours
from duplex.report.numbers import read_numbers
from duplex.training.checkpoint import read_record


@dataclass(frozen=True)
class FoundRun:
    files: RunPaths
    val_auc: float  # a fraction

    def __str__(self) -> str:
        return f"{self.files.root} (validation AUC {100 * self.val_auc:.2f})"


def best_run(
    world: str | None = None, paths: ArtifactPaths | None = None, *, dataset: str = "*", hint: str = "name one"
) -> FoundRun:
    """The run with the best validation AUC, of those that were calibrated for a world, by default the closed one where
    there is any; of equals the first by name. `hint` is how a person names a run instead."""
    root, found = (paths or ArtifactPaths()).root, list[tuple[bool, FoundRun]]()
    for checkpoint in sorted(root.glob(f"{dataset}/*/*/checkpoint.safetensors")):
        try:
            record = read_record(checkpoint)
        except DuplexError:
            continue
        worlds = record.calibration or {}
        if worlds if world is None else world in worlds:
            found.append(((world or "closed") in worlds, FoundRun(RunPaths(checkpoint.parent), record.val_auc)))
    if not found:
        raise UsageError(f"{root} holds no trained run for this; `dvc repro` trains, or {hint}")
    return max(found, key=lambda one: (one[0], one[1].val_auc))[1]


def dataset_of(run: Path, paths: ArtifactPaths | None = None) -> str | None:
    """The data set whose run this is, by its place among the artifacts."""
    root = (paths or ArtifactPaths()).root.resolve()
    place = run.resolve()
    return place.relative_to(root).parts[0] if root in place.parents else None


def facts_of(run: Path, *, name: str | None, licence: str, repository: str | None) -> Facts:
    """What a model card says of a run: the evaluation's metrics and the data set's counts, where they are there."""
    place = run.resolve()
    place = place.parent if place.is_file() else place
    files = RunPaths(place).metrics, place.parent.parent / "statistics.json"
    metrics, counts = (read_numbers(path, "dvc repro") or {} for path in files)
    title = name or repository or " ".join(place.parts[-3:])
    return Facts(title, licence, metrics, counts, repository)


def training_pictures(
    params: Params, dataset: str, paths: ArtifactPaths | None = None, *, check: Callable[[Features], None]
) -> Neighbours:
    """The readable training pictures of a data set, with their cached features; `check` refuses a strange cache."""
    paths = paths or ArtifactPaths()
    manifest = read_manifest(paths.manifest(dataset))
    features = open_features(paths.features(dataset), expect={"manifest": manifest_hash(paths.manifest(dataset))})
    check(features)
    rows = np.flatnonzero((manifest["split"] == "train").to_numpy() & ~features.bad)
    images, states, objects = (manifest[name].to_numpy()[rows].tolist() for name in ("image", "state", "object"))
    return Neighbours.of(features.cls[rows], images, states, objects, params.dataset(dataset).source.root)
