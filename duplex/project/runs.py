"""Find trained runs of a project (the best, or the report's), and search their test images."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.data.tables import read_manifest
from duplex.errors import DuplexError, UsageError
from duplex.features.file import Features, read_features, require_cache_file
from duplex.labels import LabelSpace, prompt_name
from duplex.methods.base import Method
from duplex.project.run import ProjectData, ProjectRun, load_inputs
from duplex.recognition.answers import NeighbourIndex
from duplex.report.images import RetrievalContext, thumbnail_reader
from duplex.system.files import sha256
from duplex.training.checkpoint import check_inputs, load_checkpoint, read_record
from duplex.training.inputs import InputRequest, RunInputs


def best_run(
    world: str | None = None,
    paths: ArtifactPaths = ArtifactPaths(),
    *,
    data: ProjectData | None = None,
    hint: str = "name one",
    params: Params | None = None,
) -> RunPaths:
    """The run with the best validation AUC for `world`; None: closed if possible, else any.

    data: data set whose runs are considered; None: all in `artifacts/`.
    hint: advice for the error if there is no run. params: runs that do not match them are skipped
        with a note.
    """
    root = paths.root
    dataset = "*" if data is None else data.dataset
    outdated = False
    candidates: list[tuple[bool, float, RunPaths]] = []
    for checkpoint in sorted(root.glob(f"{dataset}/*/*/checkpoint.safetensors")):
        try:
            record = read_record(checkpoint)
        except DuplexError:
            continue
        worlds = record.calibration or {}
        if worlds if world is None else world in worlds:
            if params and (difference := folder_difference(params, checkpoint.parent, paths)):
                print(f"duplex: {checkpoint.parent} is skipped, as params.yaml differs: {difference}", file=sys.stderr)
                outdated = True
                continue
            candidates.append(((world or "closed") in worlds, record.val_auc, RunPaths(checkpoint.parent)))
    if not candidates:
        matching = " that matches params.yaml" if outdated else ""
        kind = f" for the {world} world" if world else ""
        raise UsageError(f"{root}/{dataset} has no trained run{kind}{matching}; run `dvc repro`, or {hint}")
    return max(candidates, key=lambda candidate: candidate[:2])[2]


def folder_difference(params: Params, folder: Path, paths: ArtifactPaths) -> str:
    """Why the run in a folder is outdated; "" if it is current or not of this project."""
    root = paths.root.resolve()
    place = folder.resolve()
    parts = place.relative_to(root).parts if root in place.parents else ()
    if len(parts) != 3:
        return ""
    dataset, method, seed = parts
    if dataset not in params.datasets or not seed.isdecimal():
        return ""
    if method not in params.methods:
        return f"it has no method {method!r}"
    try:
        return ProjectRun(dataset, method, int(seed), params, paths).difference()
    except DuplexError as error:
        return str(error)


def featured_run(data: ProjectData) -> ProjectRun:
    """The run of the report's examples: that of its maps, else the last method and first seed."""
    return run_shown_in_maps(data) or data.run(data.params.run.methods[-1], data.params.run.seeds[0])


def run_shown_in_maps(data: ProjectData) -> ProjectRun | None:
    """The run that the report's t-SNE maps show, with the first seed; None if there is none.

    The method is `report.featured` if this has a finished run under `run:`. Otherwise it is the
    last method of `run:` with visual prototypes, other than those with `shown_as`, which the
    report shows under another name.
    """
    seed = data.params.run.seeds[0]
    featured = data.params.report.featured
    if featured in data.params.run.methods and data.run(featured, seed).files.checkpoint.exists():
        return data.run(featured, seed)
    for name in reversed(data.params.run.methods):
        run = data.run(name, seed)
        if run.entry.shown_as is not None or not run.files.checkpoint.exists():
            continue
        if "visual" in read_record(run.files.checkpoint).inspectable:
            return run
    return None


def data_of_cache(params: Params, path: Path, dataset: str | None) -> ProjectData:
    """The data set of a feature cache; None for `dataset`: the one whose cache lies at `path`."""
    paths = ArtifactPaths()
    require_cache_file(path)
    places = {paths.features(name).resolve(): name for name in params.datasets}
    dataset = dataset or places.get(path.resolve())
    if dataset is None:
        raise UsageError(f"{path} is not the cache of a data set in params.yaml; give the data set with --dataset")
    return ProjectData(params, dataset, paths)


def dataset_of_run(run: Path) -> str | None:
    """The data set in the path of a run; None if the path is not in `artifacts/`."""
    root = ArtifactPaths.root.resolve()
    folder = run.resolve()
    return folder.relative_to(root).parts[0] if root in folder.parents else None


def training_neighbours(params: Params, dataset: str, *, check: Callable[[Features], None]) -> NeighbourIndex:
    """Index of readable training images; `check` may raise for features that do not fit."""
    paths = ArtifactPaths()
    manifest = read_manifest(paths.manifest(dataset))
    features = read_features(paths.features(dataset), expect={"manifest": sha256(paths.manifest(dataset))})
    check(features)
    rows = np.flatnonzero((manifest["split"] == "train").to_numpy() & ~features.bad)
    return NeighbourIndex(features.cls[rows], manifest.iloc[rows], params.dataset(dataset).source.root)


@dataclass(frozen=True)
class LoadedRun:
    """A trained method with the labels, features and images that it is evaluated on."""

    method: Method[Any]
    inputs: RunInputs
    root: Path  # folder of the images

    def retrieval_context(self) -> RetrievalContext:
        """The method and its test images, as input for nearest-image searches."""
        test = self.inputs.examples["test"]
        images = self.inputs.manifest["image"].to_numpy()[test.rows].tolist()
        thumbnails = thumbnail_reader(self.root)
        return RetrievalContext(self.method.inspectable(), self.inputs.labels, test, images, thumbnails)


def load_run(run: ProjectRun, *, current: bool = False) -> LoadedRun:
    """Load a trained method and test images, on the CPU; `current`: none that is outdated."""
    checkpoint = run.checkpoint(current=current)
    record = checkpoint.record
    request = InputRequest.of(record, run.params.training(run.dataset, run.method))
    on_cpu = replace(run.data, params=run.params.model_copy(update={"device": "cpu"}))
    inputs = load_inputs(on_cpu, request)
    try:
        check_inputs(run.files.checkpoint, record, inputs.labels, inputs.encoder)
    except DuplexError as error:
        raise DuplexError(f"{str(error).partition('; ')[0]}; undo this change, or run `{run.command}`") from error
    trained = load_checkpoint(checkpoint, inputs.context(), inputs.encoder)  # refuses a file replaced since
    return LoadedRun(trained, inputs, run.data.entry.source.root)


def load_run_or_default(params: Params, dataset: str, method: str | None, seed: int | None) -> LoadedRun:
    """Load a run and its test images; None for `method` or `seed`: those of `featured_run`."""
    params.dataset(dataset)
    data = ProjectData(params, dataset)
    best = featured_run(data)
    return load_run(data.run(method or best.method, best.seed if seed is None else seed), current=True)


def find_pair(labels: LabelSpace, text: str) -> int:
    """Number of the composition that a text such as "striped heart" means, else UsageError."""
    wanted = prompt_name(text)
    for number, (state, thing) in enumerate(product(labels.states, labels.objects)):
        if wanted == prompt_name(f"{state} {thing}"):
            return number
    raise UsageError(
        f"{text!r} is not a state and an object of this data set; use those in labels.json, such as {labels.name(0)!r}"
    )
