"""Find trained runs of a project (the best, or the one that the report features), and search their test images."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from duplex.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import Params
from duplex.data.tables import read_manifest
from duplex.errors import DuplexError, UsageError
from duplex.features.file import Features, read_features
from duplex.labels import LabelSpace, prompt_name
from duplex.methods.base import Method
from duplex.methods.registry import find_method
from duplex.project.stamps import require_current_run, require_data, run_difference
from duplex.recognition.answers import NeighbourIndex
from duplex.report.images import RetrievalContext, thumbnails_under
from duplex.system.files import sha256, write_json
from duplex.training.checkpoint import check_inputs, load_checkpoint, read_checkpoint_header, read_record
from duplex.training.inputs import InputRequest, RunInputs, load_inputs

IGNORED = (".gitignore", ".partial", ".stamp.json")  # ends of names of files that are not in an inventory


def best_run(
    world: str | None = None,
    paths: ArtifactPaths = ArtifactPaths(),
    *,
    dataset: str = "*",
    hint: str = "name one",
    params: Params | None = None,
) -> RunPaths:
    """The run with the best validation AUC among runs calibrated for `world`; None: closed if possible, else any.

    hint: advice for the error if there is no run. params: runs that do not match them are skipped with a note.
    """
    root = paths.root
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


def folder_difference(params: Params, run: Path, paths: ArtifactPaths) -> str:
    """Why the run in a folder is outdated (`run_difference`); "" if it is current or not of this project."""
    root, folder = paths.root.resolve(), run.resolve()
    parts = folder.relative_to(root).parts if root in folder.parents else ()
    if len(parts) != 3:
        return ""
    dataset, method, seed = parts
    if dataset not in params.datasets or not seed.isdecimal():
        return ""
    if method not in params.methods:
        return f"it has no method {method!r}"
    try:
        return run_difference(params, dataset, method, int(seed), paths)
    except DuplexError as error:
        return str(error)


def featured_run(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[str, int]:
    """Method and seed of the report's examples: those of its maps, else the last method and first seed of `run:`."""
    return run_shown_in_maps(params, dataset, paths) or (params.run.methods[-1], params.run.seeds[0])


def run_shown_in_maps(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[str, int] | None:
    """Method and seed (the first) of the run that the report's t-SNE maps show; None if there is none.

    The method is `report.featured` if this has a finished run under `run:`. Otherwise it is the last method of `run:`
    with visual prototypes, other than those with `shown_as`, which the report shows under another name.
    """
    seed, featured = params.run.seeds[0], params.report.featured
    if featured in params.run.methods and paths.run(dataset, featured, seed).checkpoint.exists():
        return featured, seed
    for name in reversed(params.run.methods):
        checkpoint = paths.run(dataset, name, seed).checkpoint
        if params.entry(name).shown_as is not None or not checkpoint.exists():
            continue
        if "visual" in read_record(checkpoint).inspectable:
            return name, seed
    return None


def inventory_stage(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write `files.json` (sha256 of the files of a data set and its runs) and `featured.json` (the run in the maps).

    The stages `report` and `maps` depend on these files, because a DVC stage cannot depend on all runs of a matrix.
    """
    folder = paths.manifest(dataset).parent
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(IGNORED))
    out = paths.inventory(dataset)
    write_json(out / "files.json", {path.relative_to(folder).as_posix(): sha256(path) for path in files})
    record: dict[str, object] = {}
    if chosen := run_shown_in_maps(params, dataset, paths):
        checkpoint = paths.run(dataset, *chosen).checkpoint
        inputs = (checkpoint, paths.features(dataset), paths.manifest(dataset), paths.labels(dataset))
        record = {"method": chosen[0], "seed": chosen[1], **{path.name: sha256(path) for path in inputs}}
    write_json(out / "featured.json", record)


def dataset_of_run(run: Path, paths: ArtifactPaths = ArtifactPaths()) -> str | None:
    """The data set in the path of a run; None if the path is not in `artifacts/`."""
    root = paths.root.resolve()
    folder = run.resolve()
    return folder.relative_to(root).parts[0] if root in folder.parents else None


def training_neighbours(params: Params, dataset: str, *, check: Callable[[Features], None]) -> NeighbourIndex:
    """Index of a data set's readable training images; `check` may raise an error for features that do not fit."""
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
        thumbnails = thumbnails_under(self.root)
        return RetrievalContext(self.method.inspectable(), self.inputs.labels, test, images, thumbnails)


def load_featured_run(
    params: Params, dataset: str, method: str, seed: int, paths: ArtifactPaths, *, current: bool = False
) -> LoadedRun:
    """Load a run's trained method and test images, on the CPU; with `current`, an outdated run raises an error."""
    path = paths.run(dataset, method, seed).checkpoint
    checkpoint = read_checkpoint_header(path)
    require_data(params, dataset, paths)
    if current:
        require_current_run(params, dataset, method, seed, paths)
    record = checkpoint.record
    needs = find_method(record.kind).needs(record.options)
    settings = params.training(dataset, method)
    request = InputRequest(needs, settings.precision, record.finetune, settings.memory)
    inputs = load_inputs(params.model_copy(update={"device": "cpu"}), dataset, paths, request)
    try:
        check_inputs(path, record, inputs.labels, inputs.encoder)
    except DuplexError as error:
        command = f"duplex train --dataset {dataset} --method {method} --seed {seed}"
        raise DuplexError(f"{str(error).partition('; ')[0]}; undo this change, or run `{command}`") from error
    trained = load_checkpoint(checkpoint, inputs.context(), inputs.encoder)  # refuses a file replaced since
    return LoadedRun(trained, inputs, params.dataset(dataset).source.root)


def load_run_or_default(params: Params, dataset: str, method: str | None, seed: int | None) -> LoadedRun:
    """Load a run and its test images; None for `method` or `seed` means that of the report's examples."""
    params.dataset(dataset)
    paths = ArtifactPaths()
    best = featured_run(params, dataset, paths)
    name, number = method or best[0], best[1] if seed is None else seed
    return load_featured_run(params, dataset, name, number, paths, current=True)


def find_pair(labels: LabelSpace, text: str) -> int:
    """The number of the composition that a text such as "striped heart" means; UsageError if there is none."""
    wanted = prompt_name(text)
    for number, (state, thing) in enumerate(product(labels.states, labels.objects)):
        if wanted == prompt_name(f"{state} {thing}"):
            return number
    raise UsageError(
        f"{text!r} is not a state and an object of this data set; use those in labels.json, such as {labels.name(0)!r}"
    )
