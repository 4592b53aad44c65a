"""Rank the images of a data set by how likely their labels are wrong, and apply corrected labels.

Labels are judged by margins: the score of an image's label minus that of the best other label. An image's score for a
label is the cosine with the label's prototype, the mean of the unit features of the label's images in other folds
(random parts). `knn` replaces prototypes by votes of the nearest images of other folds, weighted by cosine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.data.images import thumbnail
from duplex.data.tables import read_manifest, read_table
from duplex.errors import DuplexError, UsageError
from duplex.evaluation.retrieval import most_similar
from duplex.features.file import PIXELS, ROOT, Features, read_features
from duplex.features.tokens import read_tokens
from duplex.labels import Ints, LabelSpace
from duplex.methods.finetuned import WithFinetuning
from duplex.methods.layers import unit
from duplex.project.runs import best_run, folder_difference
from duplex.project.stamps import require_data
from duplex.recognition.recognizer import Recognizer
from duplex.recognition.trained import TrainedRun
from duplex.report.blocks import Gallery, Group, Line, Report, ReportPart, ReportSection, Strip, Thumb, render_page
from duplex.system.files import sha256, write_text

Floats = NDArray[np.float64]
Way = Literal["run", "knn"]
FOLDS = 5
NEIGHBOURS, SHARPNESS = 20, 20.0  # of `knn`: the images that vote, with the weights exp(SHARPNESS cosine)
OLD = {"state": "old_state", "object": "old_object"}  # columns with the labels that a list was made from


@dataclass(frozen=True)
class LabelMargins:
    """How far each image's label is ahead of the best other label: the margin of their scores, and that label."""

    margin: Floats  # [n]
    better: Ints  # [n] the best other class


def margins(features: NDArray[Any], labels: Ints, way: Way, *, folds: int = FOLDS, seed: int = 0) -> LabelMargins:
    """How far each image's label is ahead of the best other label, and that label; 0 if other folds lack its label."""
    if len(features) < 2 * folds:
        raise UsageError(f"{len(features)} images are too few to check labels; expected at least {2 * folds}")
    classes, label = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise UsageError("all images have one label; expected at least two labels")
    scores = np.full((len(features), len(classes)), -np.inf)
    fold = np.random.default_rng(seed).permutation(len(features)) % folds
    score = _by_prototypes if way == "run" else _by_neighbours
    for number in range(folds):
        out = np.flatnonzero(fold == number)
        rest = np.flatnonzero(fold != number)
        scores[out] = score(features[rest], label[rest], features[out], len(classes))
    rows = np.arange(len(features))
    own = scores[rows, label]
    scores[rows, label] = -np.inf
    best = scores.argmax(1)
    other = scores[rows, best]
    undecided = ~np.isfinite(own) | ~np.isfinite(other)  # the other folds lack the class, or have no other class
    margin = np.where(undecided, 0.0, own) - np.where(undecided, 0.0, other)
    return LabelMargins(margin, classes[best])


def _by_prototypes(features: NDArray[Any], labels: Ints, queries: NDArray[Any], count: int) -> Floats:
    """[B, K]; -inf for a class without images."""
    sums = np.zeros((count, features.shape[1]))
    sizes = np.bincount(labels, minlength=count)
    np.add.at(sums, labels, features)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(sizes > 0, queries @ (sums / np.maximum(norms, 1e-12)).T, -np.inf)


def _by_neighbours(features: NDArray[Any], labels: Ints, queries: NDArray[Any], count: int) -> Floats:
    """[B, K]; -inf for an absent class."""
    near, cosines = most_similar(queries, features, NEIGHBOURS)
    votes = np.zeros((len(queries), count))
    rows = np.repeat(np.arange(len(queries)), near.shape[1])
    np.add.at(votes, (rows, labels[near].ravel()), np.exp(SHARPNESS * cosines).ravel())
    return np.where(np.bincount(labels, minlength=count) > 0, votes / votes.sum(1, keepdims=True), -np.inf)


def rank_suspects(params: Params, dataset: str, way: Way, run: Path | None = None) -> pd.DataFrame:
    """Table of a data set's readable images, the labels most likely wrong first, by a run (default: the best)."""
    paths = ArtifactPaths()
    require_data(params, dataset, paths)
    manifest, labels = read_manifest(paths.manifest(dataset)), LabelSpace.load(paths.labels(dataset))
    expected = {"manifest": sha256(paths.manifest(dataset)), ROOT: params.dataset(dataset).source.recorded_root}
    cache = read_features(paths.features(dataset), expect=expected)
    rows = np.flatnonzero(~cache.bad)
    table = manifest.iloc[rows].reset_index(drop=True)
    compositions = labels.index(table["state"].tolist(), table["object"].tolist())
    spaces = _spaces(params, cache, rows, way, dataset, run)
    margins_by_kind = {
        "composition": margins(spaces[0], compositions, way),
        "state": margins(spaces[1], labels.state_of(compositions), way),
        "object": margins(spaces[2], labels.object_of(compositions), way),
    }
    return rank_by_margins(table, labels, margins_by_kind)


def rank_by_margins(table: pd.DataFrame, labels: LabelSpace, margins_by_kind: dict[str, LabelMargins]) -> pd.DataFrame:
    """Add rank, margins and better labels to `table`, and sort it: labels that are most likely wrong come first.

    Images are ordered by the sum of their margins for `composition`, `state` and `object`, each divided by its standard
    deviation. The labels are listed twice: one copy is for editing, the other shows which labels changed.
    """
    out = table[["image", "state", "object", "split"]].copy()
    for name, kind in margins_by_kind.items():
        out[f"{name}_margin"] = kind.margin.round(6)
    state, thing = margins_by_kind["state"], margins_by_kind["object"]
    out["better_state"] = np.where(state.margin < 0, np.array(labels.states)[state.better], out["state"])
    out["better_object"] = np.where(thing.margin < 0, np.array(labels.objects)[thing.better], out["object"])
    out = out.assign(**{old: out[name] for name, old in OLD.items()})
    total = sum(kind.margin / max(float(kind.margin.std()), 1e-12) for kind in margins_by_kind.values())
    order = np.argsort(total, kind="stable")
    out = out.iloc[order].reset_index(drop=True)
    out.insert(0, "rank", np.arange(1, len(out) + 1))
    return out


def write_suspects_page(path: Path, title: str, rows: Iterable[Mapping[str, Any]], root: Path) -> None:
    """Write an HTML page of the first suspects; their images are in the folder `root`."""
    thumbs = []
    for row in rows:
        label = f"{row['state']} {row['object']}"
        lines = [Line(f"rather {row['better_state']} {row['better_object']}", False), Line(str(row["image"]))]
        name = f"{row['rank']}. {label}"
        thumbs.append(Thumb(thumbnail(root / row["image"]), name, f"image labelled {label}", lines=lines))
    caption = "Below each image: its rank and label, the label that fits better, and its file."
    part = ReportPart("Most suspicious first", [Gallery([Group("", [Strip("", thumbs)])], caption)])
    lead = "Correct the columns state and object of suspects.csv, which lists these images."
    report = Report(title, lead, [ReportSection("suspects", "Suspicious labels", [part])])
    write_text(path, render_page(report))


def _spaces(params: Params, cache: Features, rows: Ints, way: Way, dataset: str, run: Path | None) -> list[np.ndarray]:
    cls = cache.cls[rows]
    plain = cls / np.maximum(np.linalg.norm(cls, axis=1, keepdims=True), 1e-12)
    if way == "knn":
        return [plain] * 3
    folder = run or best_run(dataset=dataset, hint="name one with --run", params=params).files.root
    recognizer = Recognizer.load(folder, device="cpu")
    recognizer.check_cache(cache)
    trained = recognizer.trained
    if not isinstance(trained, TrainedRun):
        raise UsageError(f"{folder} is an export; name a run of {dataset}, or use --by knn")
    place = Path(trained.where)
    if run is not None and (difference := folder_difference(params, place, ArtifactPaths())):
        print(f"duplex: {place} does not match params.yaml: {difference}", file=sys.stderr)
    inputs: dict[str, Any] = {"cls": torch.from_numpy(cls)}
    method = trained.method
    if isinstance(method, WithFinetuning):
        tokens = read_tokens(cache.path, PIXELS if PIXELS in trained.backbone.record else "block_inputs")
        if tokens is None:
            raise UsageError(
                f"{folder} has fine-tuned blocks, and {cache.path} has no inputs for them; set "
                f"datasets.{dataset}.encoder.block_inputs in params.yaml to the number of blocks, and run "
                f"`duplex extract --dataset {dataset}`"
            )
        block_inputs: Any = torch.from_numpy(tokens[rows]) if isinstance(tokens, np.ndarray) else tokens.at(rows)
        inputs["cls"] = torch.no_grad()(method.blocks)(block_inputs)
        plain, method = unit(inputs["cls"]).numpy(), method.method
    inspectable: Any = method.inspectable()
    features = plain if inspectable.features is None else inspectable.features(inputs).numpy()
    if inspectable.factors is None:
        return [features] * 3
    return [features, *(factor.numpy() for factor in inspectable.factors(inputs))]


@dataclass(frozen=True)
class Relabelled:
    """A data set's manifest with corrected labels, and what the correction changed."""

    manifest: pd.DataFrame
    changed: int  # number of images whose label changed
    new: list[str]  # states and objects that the manifest did not have before
    outdated: list[str]  # images left out, since their labels are no longer those that the list was made from


def relabelled_manifest(params: Params, dataset: str, edited: Path) -> Relabelled:
    """The manifest with the labels of the table `edited`, which `duplex data suspects` wrote and the user corrected.

    Rows whose columns `old_state` and `old_object` differ from the manifest are left out: they may undo a correction.
    Raises UsageError if no label changes, for misspelt columns, and for text that cannot be a label.
    """
    require_data(params, dataset, stages=["prepare"])
    manifest = read_manifest(ArtifactPaths().manifest(dataset))
    try:
        table = read_table(edited, tuple(OLD.values()))
    except DuplexError as error:
        raise UsageError(str(error)) from None
    if unknown := sorted(set(table["image"]) - set(manifest["image"])):
        raise UsageError(f"{edited} lists {unknown[0]!r}, which is not an image of {dataset}")
    if table["image"].duplicated().any():
        raise UsageError(f"{edited} lists {table['image'][table['image'].duplicated()].iloc[0]!r} twice")
    corrected = table.set_index("image")
    if "split" in corrected:
        moved = corrected["split"] != manifest.set_index("image")["split"].loc[corrected.index]
        if moved.any():
            raise UsageError(
                f"{edited} has another split than {dataset} for {corrected.index[moved][0]!r}; relabel changes labels "
                "alone: leave the column split as it was"
            )
    outdated = _outdated(corrected, manifest.set_index("image").loc[corrected.index])
    corrected = corrected.drop(index=outdated)
    out = manifest.copy()
    for name in ("state", "object"):
        out[name] = out["image"].map(corrected[name]).fillna(out[name])
    changed = int((out[["state", "object"]] != manifest[["state", "object"]]).any(axis=1).sum())
    if not changed and outdated:
        raise UsageError(
            f"{edited} was made from other labels than {dataset} has, first of {outdated[0]!r}; "
            f"`duplex data suspects {dataset}` makes a new list"
        )
    if not changed:
        raise UsageError(f"{edited} changes no label of {dataset}; correct its columns state and object")
    new = [word for name in ("state", "object") for word in sorted(set(out[name]) - set(manifest[name]))]
    return Relabelled(out, changed, new, outdated)


def _outdated(corrected: pd.DataFrame, present: pd.DataFrame) -> list[str]:
    other = pd.Series(False, corrected.index)
    for name, old in OLD.items():
        if old in corrected:
            other |= (corrected[old] != "") & (corrected[old] != present[name])
    wanted = (corrected[list(OLD)] != present[list(OLD)]).any(axis=1)
    return corrected.index[other & wanted].tolist()
