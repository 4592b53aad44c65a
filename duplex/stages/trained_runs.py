"""Find the trained runs of a project, and the training images of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.data.manifest import read_manifest
from duplex.errors import DuplexError, UsageError
from duplex.features.store import Features, open_features
from duplex.recognition.card import RunFacts
from duplex.recognition.neighbours import Neighbours
from duplex.report.aggregate import read_numbers
from duplex.stages.outdated_runs import run_difference
from duplex.system.files import sha256
from duplex.training.checkpoint import Record, read_record


@dataclass(frozen=True)
class SavedRun:
    """A trained run on disk, with its validation AUC."""

    files: RunPaths
    val_auc: float  # a fraction

    def __str__(self) -> str:
        return f"{self.files.root} (validation AUC {100 * self.val_auc:.2f})"


def best_run(
    world: str | None = None,
    paths: ArtifactPaths = ArtifactPaths(),
    *,
    dataset: str = "*",
    hint: str = "name one",
    params: Params | None = None,
) -> SavedRun:
    """Return the run with the best validation AUC among those calibrated for `world`; the first by name if equal.

    Without `world` ("closed" or "open"), runs calibrated for the closed world are preferred.

    dataset: a name, or `*` for all.
    hint: end of the error message, which tells the user how to name a run.
    params: runs that do not match these are left out, each with a line on stderr; None: all runs are considered.
    """
    root = paths.root
    outdated = 0
    candidates: list[tuple[bool, SavedRun]] = []
    for checkpoint in sorted(root.glob(f"{dataset}/*/*/checkpoint.safetensors")):
        try:
            record = read_record(checkpoint)
        except DuplexError:
            continue
        worlds = record.calibration or {}
        if worlds if world is None else world in worlds:
            if params and (difference := folder_difference(record, params, checkpoint.parent, paths)):
                print(f"duplex: {checkpoint.parent} does not match params.yaml: {difference}", file=sys.stderr)
                outdated += 1
                continue
            candidates.append(((world or "closed") in worlds, SavedRun(RunPaths(checkpoint.parent), record.val_auc)))
    if not candidates and outdated:
        raise UsageError(
            f"no run in {root}/{dataset} that is calibrated for {world or 'any'} world matches params.yaml; "
            f"run `dvc repro`, or {hint}"
        )
    if not candidates:
        raise UsageError(
            f"{root}/{dataset} has no trained run calibrated for {world or 'any'} world; run `dvc repro`, or {hint}"
        )
    return max(candidates, key=lambda candidate: (candidate[0], candidate[1].val_auc))[1]


def folder_difference(record: Record, params: Params, run: Path, paths: ArtifactPaths) -> str:
    """Return how the settings of a run differ from params.yaml, as text; "" if they do not.

    The text is also empty if params.yaml does not list the run's data set or method.

    record: metadata of the run. run: its folder, which may be outside of the project.
    """
    root, folder = paths.root.resolve(), run.resolve()
    parts = folder.relative_to(root).parts if root in folder.parents else ()
    if len(parts) != 3:
        return ""
    dataset, method, seed = parts
    if dataset not in params.datasets or method not in params.methods or not seed.isdecimal():
        return ""
    try:
        return run_difference(record, params, dataset, method, int(seed), paths)
    except DuplexError as error:
        return str(error)


def dataset_of_run(run: Path, paths: ArtifactPaths = ArtifactPaths()) -> str | None:
    """Return the data set of a run, taken from its path; None if the path is not in `artifacts/`."""
    root = paths.root.resolve()
    folder = run.resolve()
    return folder.relative_to(root).parts[0] if root in folder.parents else None


def model_card_facts(run: Path, *, name: str | None, licence: str, repository: str | None) -> RunFacts:
    """Return the facts of a run for its model card: metrics and the data set's counts, if their files exist.

    name: title of the card. repository: OWNER/NAME on the Hugging Face hub.
    """
    folder = run.resolve()
    folder = folder.parent if folder.is_file() else folder
    files = RunPaths(folder).metrics, folder.parent.parent / "statistics.json"
    metrics, counts = (read_numbers(path, "dvc repro") or {} for path in files)
    title = name or repository or " ".join(folder.parts[-3:])
    return RunFacts(title, licence, metrics, counts, repository)


def training_images(
    params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths(), *, check: Callable[[Features], None]
) -> Neighbours:
    """Return the readable training images of a data set with their cached features.

    check: function of the features that raises if they do not belong to the trained model.
    """
    manifest = read_manifest(paths.manifest(dataset))
    features = open_features(paths.features(dataset), expect={"manifest": sha256(paths.manifest(dataset))})
    check(features)
    rows = np.flatnonzero((manifest["split"] == "train").to_numpy() & ~features.bad)
    return Neighbours(features.cls[rows], manifest.iloc[rows], params.dataset(dataset).source.root)
