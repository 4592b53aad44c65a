"""Add labelled images to a fitted model without training: `duplex update`.

Visual prototypes follow in closed form from the model's statistics, to which those of more images
are added; trained prompts and fine-tuned blocks stay.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from duplex.data.contents import change_error, changed_images
from duplex.data.sources import detect_source
from duplex.errors import UsageError, as_usage_error
from duplex.features.file import FIRST_BAD, status_reason
from duplex.labels import LabelSpace, prompt_name
from duplex.methods.base import Inputs
from duplex.methods.finetuned import with_finetuned_features
from duplex.methods.gaussian import (
    ClassStatistics,
    ClosedForm,
    FittedStatistics,
    GroupSums,
    LinearDiscriminant,
    PairMeans,
)
from duplex.methods.layers import unit
from duplex.methods.portable import portable_closed_form
from duplex.methods.prompts import encode_words
from duplex.recognition import export
from duplex.recognition.added import find_or_append, with_rows
from duplex.recognition.fit import require_known_words
from duplex.recognition.labelled_folder import distinct_images
from duplex.recognition.recognizer import Recognizer, encode_files
from duplex.recognition.trained import MODEL, ExportedModel
from duplex.system.files import named_path, replace_folder
from duplex.training.checkpoint import ModelHeader, read_header, read_tensors
from duplex.training.novelty import NoveltyDetector, word_terms

BATCH = 64
STALE = {  # files made of the scores, with the option that makes each
    export.TRAINED: "--onnx",
    export.ONNX_EXAMPLE: "--onnx-encoder",
    export.PAGE: "--page DIST",
}
Say = Callable[[str], None]


@dataclass(frozen=True)
class NewImages:
    """Labelled images to add to a fitted model, with the features of its encoder."""

    rows: pd.DataFrame  # image, state, object
    contents: dict[str, str]  # sha256 of each row's file -> digest of its pixels
    inputs: Inputs  # of the encoder: `cls` [B, d], and block inputs for fine-tuned blocks
    features: Tensor  # [B, d] outputs of the fine-tuned blocks; without such blocks, `cls`
    notes: tuple[str, ...] = ()  # what was left out


@dataclass(frozen=True)
class UpdatedModel:
    """What an update changes in a model: labels, tensors and feature statistics."""

    labels: LabelSpace
    tensors: dict[str, Tensor]
    fitted: FittedStatistics


def update_model(
    model: Path, source: Path, out: Path, *, images: Path | None = None, say: Say = print, force: bool = False
) -> Path:
    """Add labelled images to a copy of a fitted model in the folder `out`; returns `out`.

    source: a folder `state/object/*.jpg`, or a table with the columns image, state and object.
    force: replace another model at `out`, unless this would lose images that updates added to it.
    """
    model = named_path(model)
    out = named_path(out)
    export.read_fit(model)  # refuses other folders before anything is made
    export.refuse_existing_model(out, force=force or out.resolve() == model.resolve())
    with export.sole_model_writer(out, "or choose another --out"):
        return _update(model, source, out, images, say)


def _update(model: Path, source: Path, out: Path, images: Path | None, say: Say) -> Path:
    recognizer = Recognizer.load(model, exact=True)
    trained = recognizer.trained
    if not isinstance(trained, ExportedModel):
        raise UsageError(f"{model} is the folder of a run; expected a folder that `duplex fit` wrote")
    record = export.read_fit(model)
    fitted = export.read_statistics(model)
    header = read_header(model / MODEL, "export")
    stored = read_tensors(header)
    new = read_images(recognizer, source, images, record)
    export.refuse_lost_updates(out, {**export.fitted_digests(record), **new.contents})
    for note in new.notes:
        say(f"note: {note}")
    updated = updated_model(trained, stored, fitted, new, record["counts"])
    for line in describe_additions(trained.labels, updated.labels, new.rows):
        say(line)
    stale = [name for name in STALE if (model / name).exists()]
    write_update(header, out, updated, record, new)
    if stale:
        options = " ".join(STALE[name] for name in stale)
        more = f"`duplex export {out} FOLDER {options}` writes new ones"
        say(f"not copied to {out}, since the scores have changed: {', '.join(stale)}; {more}")
    return out


def read_images(recognizer: Recognizer, source: Path, images: Path | None, record: Mapping[str, Any]) -> NewImages:
    """Read and encode the labelled images to add to a model, whose fit.json is `record`."""
    description = detect_source(source, None, images)
    with as_usage_error():
        distinct = distinct_images(description, source)
    frame = distinct.rows
    notes = distinct.notes
    test = int((frame["split"] == "test").sum()) if "split" in frame else 0
    if test:
        added = "have the split test and are added too: an update uses every row"
        notes.append(f"{test:,} of the images {added}")
    contents = {file: distinct.pixels[file].partition(" ")[0] for file in distinct.digests}
    copied = export.copied_images(contents, export.fitted_digests(record))
    again = list(compress(frame["image"], copied))
    if again:
        problem = f"the model already has {len(again):,} of the {len(frame):,} images, such as {again[0]}"
        fix = "leave them out, or run `duplex fit` with all images"
        raise UsageError(f"{problem}, which would count twice; {fix}")
    inputs = _encoded(recognizer, [description.root / image for image in frame["image"]])
    changed = changed_images(description.root, dict(zip(contents, frame["image"], strict=True)))
    if changed:
        raise change_error(description.root / changed[0])
    blocks = recognizer.trained.finetuned
    features = inputs["cls"]
    if blocks is not None:
        features = with_finetuned_features(lambda each: each["cls"], blocks)(inputs)
    return NewImages(frame, contents, inputs, features, tuple(notes))


def _encoded(recognizer: Recognizer, paths: list[Path]) -> Inputs:
    outputs = recognizer.trained.outputs
    encoded = encode_files(recognizer.encoder, paths, batch_size=BATCH, num_workers="auto", outputs=outputs)
    parts: list[Inputs] = []
    place = 0
    for statuses, inputs in encoded:
        for offset in np.flatnonzero(statuses >= FIRST_BAD):
            reason = status_reason(statuses[offset])
            problem = f"{paths[place + offset]} cannot be used: {reason}"
            raise UsageError(f"{problem}; omit it and run the command again")
        parts.append(inputs)
        place += len(statuses)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def updated_model(
    trained: ExportedModel,
    stored: Mapping[str, Tensor],
    fitted: FittedStatistics,
    new: NewImages,
    counts: Mapping[str, Any],
) -> UpdatedModel:
    """A model's labels, tensors (so far `stored`) and statistics (so far `fitted`) with images `new`."""
    labels = trained.labels
    rows = new.rows
    world = next(iter(trained.calibration))
    states = list(labels.states)
    objects = list(labels.objects)
    state_of = np.array([find_or_append(name, states) for name in rows["state"]])
    object_of = np.array([find_or_append(name, objects) for name in rows["object"]])
    added_words = [*states[len(labels.states) :], *objects[len(labels.objects) :]]
    if added_words:
        advice = "rename them, or run `duplex fit` with another --encoder"
        words = list(map(prompt_name, added_words))
        require_known_words(str(trained.backbone.record["name"]), words, advice)
    shape = len(states), len(objects)
    compositions = torch.from_numpy(state_of * shape[1] + object_of)
    own = ClassStatistics.of(unit(new.features.cpu()), compositions, *shape)
    state_places = torch.arange(len(labels.states))
    object_places = torch.arange(len(labels.objects))
    kept = fitted.statistics.relabelled(state_places, object_places, shape)
    total = replace(fitted, statistics=kept + own)
    enlarged = LabelSpace(tuple(states), tuple(objects), {"train": total.statistics.pairs.numpy()})
    tensors = {name: value.cpu() for name, value in stored.items() if not name.startswith("novelty.")}
    present = tensors["state_of"].numpy() * shape[1] + tensors["object_of"].numpy()
    missing = np.setdiff1d(enlarged.candidates(world, "train"), present)
    if len(missing):
        pairs = np.stack([enlarged.state_of(missing), enlarged.object_of(missing)], axis=1)
        tower = trained.backbone.tower("text").text
        tensors = with_rows(tensors, labels, (states, objects), pairs, tower)
    candidates = np.concatenate([present, missing])
    tensors |= refitted_closed_form(trained, total, enlarged, candidates, tensors)
    if "classifier.states.weight" in tensors:
        tensors |= heads_of_new_words(tensors, "states", total.statistics.by_state(), counts["states"])
        tensors |= heads_of_new_words(tensors, "objects", total.statistics.by_object(), counts["objects"])
    seen = enlarged.is_seen(candidates)
    added_feasible = np.ones(len(missing), dtype=bool)
    feasible = np.concatenate([tensors["feasible"].numpy(), added_feasible]) | seen
    tensors |= {"seen": torch.from_numpy(seen), "feasible": torch.from_numpy(feasible)}
    tensors["log_prior"] = torch.from_numpy(trained.confidence.log_prior(seen, feasible))
    if trained.novelty is not None:
        cls = new.inputs["cls"].cpu()
        tensors |= _novelty(trained.novelty, kept, cls, compositions).tensors()
    return UpdatedModel(enlarged, {name: value.contiguous() for name, value in tensors.items()}, total)


def refitted_closed_form(
    trained: ExportedModel,
    fitted: FittedStatistics,
    labels: LabelSpace,
    candidates: np.ndarray,
    tensors: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The exported tensors of the closed form, fitted again, with prototypes of `candidates`."""
    words = None
    if fitted.settings.interactions != 0:
        states, objects = encode_words(labels, trained.backbone.tower("text").text)
        words = states.cpu(), objects.cpu()
    model = ClosedForm.fit(fitted.statistics, fitted.settings, words).to(torch.float32)
    posteriors = None
    if "primitives.states.weight" in tensors:
        parts = fitted.settings.parts
        by_state = LinearDiscriminant.fit(fitted.statistics.by_state(), parts)
        by_object = LinearDiscriminant.fit(fitted.statistics.by_object(), parts)
        posteriors = by_state.to(torch.float32), by_object.to(torch.float32)
    return portable_closed_form(model, torch.from_numpy(candidates), posteriors)


def heads_of_new_words(t: Mapping[str, Tensor], name: str, groups: GroupSums, first: int) -> dict[str, Tensor]:
    """Tensors of the linear heads `name` (states or objects) of `t`, extended by words from `first` on.

        f_w = mean_k f_k + a (g_w - mean_k g_k)

    f, g: logits of heads and closed form;  k: words before `first`;  w: a new word;  a: makes the
    excess of f_w over mean_k f_k, at the mean of w's images, the average of that of the words k
    """
    means = groups.means.float()
    f = means[:first] @ t[f"classifier.{name}.weight"][:, :first]
    f = f + t[f"classifier.{name}.offset"][:first]
    g = means @ t[f"primitives.{name}.weight"] + t[f"primitives.{name}.offset"]
    margins = g.diagonal() - g[:, :first].mean(1)
    least = 0.1 * margins[:first].mean()  # of words that the closed form hardly tells from others
    a = (f.diagonal() - f.mean(1)).mean() / margins[first:].clamp(min=least)
    heads = {}
    for part in ("weight", "offset"):
        ours = t[f"classifier.{name}.{part}"][..., :first]
        closed = t[f"primitives.{name}.{part}"]
        excess = closed[..., first:] - closed[..., :first].mean(-1, keepdim=True)
        new = ours.mean(-1, keepdim=True) + a * excess
        heads[f"classifier.{name}.{part}"] = torch.cat([ours, new], dim=-1)
    return heads


def _novelty(near: NoveltyDetector, before: ClassStatistics, cls: Tensor, compositions: Tensor) -> NoveltyDetector:
    # Added images change the means of pairs, and so the effects of words; covariance and threshold
    # stay. The i-th pair of `before`, the statistics so far, is that of the detector's i-th mean.
    whitened = unit(cls.float()).to(near.whitening) @ near.whitening
    pairs, place = torch.cat([before.pairs, compositions]).unique(return_inverse=True)
    counts = torch.cat([before.counts, torch.ones(len(cls), dtype=before.counts.dtype)])
    values = torch.cat([near.means.cpu(), whitened.cpu()]).double()
    total = counts.new_zeros(len(pairs)).index_add_(0, place, counts)
    summands = values * counts[:, None]
    sums = values.new_zeros(len(pairs), values.shape[1]).index_add_(0, place, summands)
    n = before.objects
    seen = PairMeans(pairs // n, pairs % n, total, sums / total[:, None], (before.states, n))
    states, objects = word_terms(seen)
    return replace(near, means=seen.means.float(), states=states, objects=objects)


def write_update(
    header: ModelHeader, out: Path, updated: UpdatedModel, record: Mapping[str, Any], new: NewImages
) -> None:
    """Write an updated model to the folder `out`; encoder.onnx is copied unchanged."""
    model = header.path.parent
    fields = {**header.fields, "labels": updated.labels.to_dict()}
    entry = {"images": len(new.rows), "contents": new.contents}
    counts = record["counts"]
    metrics = record["measured"]["metrics"]
    record = {**record, "updates": [*record.get("updates", []), entry]}
    facts = export.RunFacts(out.name, metrics=metrics, counts=counts, remark=export.remark(record))
    with replace_folder(out.resolve()) as folder:  # a link to a folder stays
        if (model / export.TOWER).is_file():
            shutil.copyfile(model / export.TOWER, folder / export.TOWER)
        notes = export.read_notes(model / export.README)
        export.write_files(folder, fields, updated.tensors, facts, notes)
        export.write_fit(folder, record, updated.tensors)
        export.write_statistics(folder, updated.fitted, updated.tensors)


def describe_additions(before: LabelSpace, after: LabelSpace, rows: pd.DataFrame) -> list[str]:
    """Lines on an update: images added, pairs with images, new pairs, new words."""
    old_pairs = set(before.names(before.pairs["train"]))
    pairs = after.names(after.pairs["train"])
    counts = f"pairs with images: {len(pairs)} (before: {len(old_pairs)})"
    lines = [f"images added: {len(rows)}; {counts}"]
    new_pairs = [pair for pair in pairs if pair not in old_pairs]
    if new_pairs:
        lines.append(f"new pairs: {', '.join(new_pairs)}")
    for kind in ("states", "objects"):
        words = getattr(after, kind)[len(getattr(before, kind)) :]
        if words:
            lines.append(f"new {kind}: {', '.join(words)}")
    return lines
