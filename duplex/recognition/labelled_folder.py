"""Labelled images to fit a model to, without copies, from a folder, table or benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
import PIL

from duplex.data.check import DataIssue, alike_labels, check_labels_of
from duplex.data.contents import join_copies, looks_from_texts, near_copies, read_digests
from duplex.data.sources import detect_source, load_source, read_folder
from duplex.data.tables import LabelledImages, complete_rows, from_rows, read_table
from duplex.errors import UsageError, as_usage_error
from duplex.labels import Ints, LabelSpace, prompt_name
from duplex.options import SourceOptions
from duplex.system.files import write_json

FEW_HIDDEN = 3  # new pairs of a split, below which a note says that these are few
MOST_CONTRADICTED = 0.01  # share of images whose copies have another label; more is an error
PIXELS = "pixels.json"  # in MODEL.cache: digest of the pixels of each image, by its file's sha256
# Another decoder may decode other pixels
DECODER = {"format": "duplex-pixels-3", "decoder": f"Pillow {PIL.__version__}"}


@dataclass(frozen=True)
class LabelledFolder:
    """A data set to fit: labelled images without copies, with their split and digests."""

    root: Path  # folder that image paths start from
    manifest: pd.DataFrame  # image, state, object, split
    labels: LabelSpace
    digests: list[str]  # sha256 of each row's file
    pixels: Mapping[str, str]  # digests of pixels, also of copies left out, by the file's sha256
    notes: tuple[str, ...] = ()  # what was left out

    @property
    def contents(self) -> dict[str, str]:
        """The sha256 of each image file -> a digest of its pixels, sorted."""
        return {digest: self.pixels[digest].partition(" ")[0] for digest in sorted(self.digests)}


@dataclass(frozen=True)
class DistinctImages:
    """Labelled images of which no two have the same content, and notes on the images left out."""

    rows: pd.DataFrame  # image, state, object and further columns
    digests: list[str]  # sha256 of each row's file
    notes: list[str]  # images that are missing or have the content of another
    pixels: dict[str, str]  # as of a `LabelledFolder`


@as_usage_error()
def read_labelled_folder(
    source: Path, images: Path | None = None, known_pixels: Mapping[str, str] = MappingProxyType({})
) -> LabelledFolder:
    """Read and split the labelled images of a folder `state/object/*.jpg`, a table or a benchmark.

    images: folder that a table's image paths start from; by default the table's folder.
    known_pixels: digests of pixels that were computed before, by the sha256 of the file.
    """
    description = detect_source(source, None, images)
    notes: list[str] = []
    if description.kind == "standard":
        data = load_source(description)
        listed = data.manifest["image"].tolist()
        digests, pixels = read_digests(description.root, listed, known_pixels)
    else:
        distinct = distinct_images(description, source, known_pixels)
        digests = distinct.digests
        pixels = distinct.pixels
        notes = distinct.notes
        for kind in ("state", "object"):
            names = distinct.rows[kind].unique()
            if len(names) < 2:
                problem = f"{source} has only one {kind}, {names[0]!r}"
                raise UsageError(f"{problem}; add images of at least one other {kind}")
        listed = distinct.rows["image"].tolist()
        copies = near_copies(looks_from_texts(pixels[file] for file in digests))
        keys = dict(zip(listed, join_copies(digests, copies), strict=True))
        data = from_rows(distinct.rows, description.split, source, lambda images: [keys[image] for image in images])
        notes += near_copy_notes(data, listed, copies)
    missing: list[str] = []
    for issue in check_labels_of(data):
        if issue.fatal:
            missing += issue.examples
    if missing:
        remedy = "add images of each pair, or add pairs"
        if not data.made_split:
            remedy = "give both val and test images of train's pairs and of others, or leave out the column split"
        raise UsageError(f"{source} cannot be fitted, as {' and '.join(missing)}; {remedy}")
    notes += [f"{text}: {count:,}" for text, count in data.notes.items()] + alike_labels(data)
    manifest = data.manifest.reset_index(drop=True)
    return LabelledFolder(description.root, manifest, data.labels, digests, pixels, tuple(notes))


def near_copy_notes(data: LabelledImages, images: Sequence[str], copies: Ints) -> list[str]:
    """A note that counts near-copies (`copies`: pairs of rows), if there are any."""
    pairs = tuple(f"{images[a]} = {images[b]}" for a, b in copies)
    if not pairs:
        return []
    split = data.manifest.set_index("image")["split"]
    across = sum(split[images[a]] != split[images[b]] for a, b in copies)
    where = "each in one split"
    if across:
        where = f"{across:,} in two splits, which flatter the measured numbers"
    text = f"pairs of images are near-copies, saved or scaled again, {where}"
    return [str(DataIssue(text, len(pairs), pairs, True))]


def load_pixel_digests(cache: Path) -> dict[str, str]:
    """Read cached digests of pixels, by the file's sha256; empty if by another Pillow."""
    path = cache / PIXELS
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    pixels: dict[str, str] = record.pop("pixels", {})
    return pixels if record == DECODER else {}


def save_pixel_digests(cache: Path, pixels: Mapping[str, str]) -> None:
    """Write digests of pixels, by the sha256 of the image file; unreadable images are left out."""
    decoded = {file: digest for file, digest in sorted(pixels.items()) if digest != file}
    write_json(cache / PIXELS, {**DECODER, "pixels": decoded})


def distinct_images(
    description: SourceOptions, source: Path, known_pixels: Mapping[str, str] = MappingProxyType({})
) -> DistinctImages:
    """Read a folder's or table's labelled images, each once; and notes on copies left out."""
    root = description.root
    skipped: dict[str, int] = {}
    if description.kind == "standard":
        frame = load_source(description).manifest
    elif description.table is None:
        frame, skipped = read_folder(root)
    elif root.is_dir():
        frame = read_table(description.table).drop_duplicates(ignore_index=True)
    else:
        problem = "is not a folder" if root.exists() else "does not exist"
        advice = "give the folder that the table's image paths start from"
        raise UsageError(f"--images: {root} {problem}; {advice}")
    partial = len(frame) - len(complete_rows(frame))
    if partial:
        problem = f"some rows of {source} ({partial:,}) have only a state or an object"
        raise UsageError(f"{problem}; complete or remove them")
    images = frame["image"]
    files, pixels = read_digests(root, images.tolist(), known_pixels)
    digests = pd.Series(files, index=frame.index, dtype=object)
    missing = digests == ""
    if missing.all():
        raise UsageError(
            f"{source}: none of its {len(frame):,} images, such as {images.iloc[0]!r}, exists below {root}; "
            "correct the paths or give --images FOLDER"
        )
    frame = frame[~missing]
    digests = digests[~missing]
    contents = digests.map(pixels)
    contradicted = _contradicted(frame, contents, source)
    frame = frame[~contradicted]
    digests = digests[~contradicted]
    repeated = contents[~contradicted].duplicated()
    notes = []
    for reason, mask in (
        ("they are missing", missing),
        ("copies have another label", contradicted),
        ("another has the same content", repeated),
    ):
        if mask.any():
            listed = tuple(images[mask.index[mask]])
            issue = DataIssue(f"images left out because {reason}", len(listed), listed, True)
            notes.append(str(issue))
    notes += [f"{text}: {count:,}" for text, count in skipped.items()]
    rows = frame[~repeated].reset_index(drop=True)
    return DistinctImages(rows, digests[~repeated].tolist(), notes, pixels)


def _contradicted(frame: pd.DataFrame, contents: pd.Series, source: Path) -> pd.Series:
    kinds = frame.assign(content=contents).drop_duplicates(["content", "state", "object"])
    twice = kinds.loc[kinds["content"].duplicated(keep=False), "content"]
    mask = contents.isin(twice)
    if mask.sum() > MOST_CONTRADICTED * len(frame):
        copies = kinds[kinds["content"] == twice.iloc[0]].head(2).itertuples()
        named = " and ".join(f"{row.image} ({row.state} {row.object})" for row in copies)
        raise UsageError(
            f"{source}: some images ({twice.nunique():,}) occur with two labels; for example, "
            f"{named} have equal pixels; keep only the correctly labelled copy of each image"
        )
    return mask


def describe(data: LabelledFolder, say: Callable[[str], None]) -> None:
    """Describe a data set to the user: call `say` with lines of text on its counts and notes."""
    labels = data.labels
    pairs = data.manifest[["state", "object"]].drop_duplicates()
    counts = data.manifest["split"].value_counts()
    say(
        f"{len(data.manifest):,} images, {len(labels.states)} states, "
        f"{len(labels.objects)} objects, {len(pairs)} pairs; train {counts['train']:,}, "
        f"validation {counts['val']:,}, test {counts['test']:,}"
    )
    hidden = {split: len(hidden_pairs(data, split)) for split in ("val", "test")}
    say(f"new pairs, which training does not see: {hidden['val']} in validation, {hidden['test']} in test")
    if min(hidden.values()) < FEW_HIDDEN:
        say("note: so few pairs hardly measure new pairs; others may do far better or worse")
    if single := words_of_one_pair(data.labels):
        listed = ", ".join(single[:5]) + ", ..." * (len(single) > 5)
        say(f"note: each of these words is trained in one pair only, which hinders its new pairs: {listed}")
    for note in data.notes:
        say(f"note: {note}")


def hidden_pairs(data: LabelledFolder, split: str) -> Ints:
    """The unseen pairs of a split, as compositions."""
    pairs = data.labels.pairs[split]
    return pairs[~data.labels.is_seen(pairs)]


def words_of_one_pair(labels: LabelSpace) -> list[str]:
    """States and objects that occur in exactly one pair of the training images."""
    pairs = labels.pairs["train"]
    words = []
    for names, of in ((labels.states, labels.state_of(pairs)), (labels.objects, labels.object_of(pairs))):
        counts = np.bincount(of, minlength=len(names))
        words += [prompt_name(names[place]) for place in np.flatnonzero(counts == 1)]
    return words
