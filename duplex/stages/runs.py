"""The trained runs of a project: which one answers where nobody names one, and the pictures that it learned from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.checkpoint import read_record
from duplex.data.manifest import manifest_hash, read_manifest
from duplex.errors import DuplexError, UsageError
from duplex.features.store import open_features
from duplex.params import Params
from duplex.recognition.card import Facts
from duplex.recognition.neighbours import Neighbours


@dataclass(frozen=True)
class FoundRun:
    files: RunPaths
    val_auc: float  # a fraction

    def __str__(self) -> str:
        return f"{self.files.root} (validation AUC {100 * self.val_auc:.2f})"


def best_run(world: str | None = None, paths: ArtifactPaths | None = None, *, dataset: str = "*") -> FoundRun:
    """The run with the best validation AUC, of those that were calibrated for a world; of equals the first by name."""
    root, found = (paths or ArtifactPaths()).root, list[FoundRun]()
    for checkpoint in sorted(root.glob(f"{dataset}/*/*/checkpoint.safetensors")):
        try:
            record = read_record(checkpoint)
        except DuplexError:
            continue
        if (world or "closed") in (record.calibration or {}):
            found.append(FoundRun(RunPaths(checkpoint.parent), record.val_auc))
    if not found:
        raise UsageError(f"{root} holds no trained run for this; `dvc repro` trains, or name a model with --model")
    return max(found, key=lambda run: run.val_auc)


def dataset_of(run: Path, paths: ArtifactPaths | None = None) -> str | None:
    """The data set whose run this is, by its place among the artifacts."""
    root = (paths or ArtifactPaths()).root.resolve()
    place = run.resolve()
    return place.relative_to(root).parts[0] if root in place.parents else None


def facts_of(run: Path, *, name: str | None, licence: str, repository: str | None) -> Facts:
    """What a model card says of a run: the evaluation's metrics and the data set's counts, where they are there."""
    metrics, counts = RunPaths(run).metrics, run.parent.parent / "statistics.json"
    read = [json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {} for path in (metrics, counts)]
    title = name or repository or " ".join(run.resolve().parts[-3:])
    return Facts(title, licence, read[0], read[1], repository)


def training_pictures(params: Params, dataset: str, paths: ArtifactPaths | None = None) -> Neighbours:
    """The readable training pictures of a data set, with their cached features."""
    paths = paths or ArtifactPaths()
    manifest = read_manifest(paths.manifest(dataset))
    features = open_features(paths.features(dataset), expect={"manifest": manifest_hash(paths.manifest(dataset))})
    rows = np.flatnonzero((manifest["split"] == "train").to_numpy() & ~features.bad)
    images, states, objects = (manifest[name].to_numpy()[rows].tolist() for name in ("image", "state", "object"))
    return Neighbours.of(features.cls[rows], images, states, objects, params.dataset(dataset).source.root)
