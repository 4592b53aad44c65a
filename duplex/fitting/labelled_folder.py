"""The labelled images that a model is fitted to: a folder or a table, checked, without duplicates, and split."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pandas as pd
import PIL

from duplex.data.check import DataIssue, alike_labels, check_labels_of
from duplex.data.contents import read_digests
from duplex.data.dataset import LabelledImages, from_rows
from duplex.data.dataset_source import detect_source, load_source, read_folder
from duplex.data.source_options import SourceOptions, SplitOptions
from duplex.data.table import read_table
from duplex.errors import DuplexError, UsageError
from duplex.labels import LabelSpace
from duplex.system.files import write_json
from duplex.training.checkpoint import with_checksum

MOST_CONTRADICTED = 0.01  # share of images with copies of another label that are left out; more is an error
PIXELS = "pixels.json"  # in MODEL.cache: digest of the pixels of each image, by the sha256 of its file
DECODER = {"format": "duplex-pixels-2", "decoder": f"Pillow {PIL.__version__}"}  # others may decode other pixels


@dataclass(frozen=True)
class LabelledFolder:
    """Labelled images that a model is fitted to: a table without copies of images, with their split and digests."""

    root: Path  # folder that image paths start from
    manifest: pd.DataFrame  # image, state, object, split
    labels: LabelSpace
    digests: list[str]  # sha256 of each row's file
    pixels: Mapping[str, str]  # digests of pixels, also of copies left out, by the sha256 of the file (`read_digests`)
    notes: tuple[str, ...] = ()  # what was left out

    @property
    def contents(self) -> dict[str, str]:
        """Dictionary from the sha256 of each image file, sorted, to a digest of its pixels; identifies the images."""
        return {digest: self.pixels[digest] for digest in sorted(self.digests)}


@dataclass(frozen=True)
class DistinctImages:
    """Labelled images of which no two have the same content, and notes on the images left out."""

    rows: pd.DataFrame  # image, state, object and further columns
    digests: list[str]  # sha256 of each row's file
    notes: list[str]  # images that are missing or have the content of another
    pixels: dict[str, str]  # digests of pixels, also of copies left out, by the sha256 of the file (`read_digests`)


def read_labelled_folder(
    source: Path,
    images: Path | None = None,
    seed: int = SplitOptions.seed,
    known_pixels: Mapping[str, str] = MappingProxyType({}),
) -> LabelledFolder:
    """Read labelled images from a folder `state/object/*.jpg`, a table, or a benchmark's folder, and split them.

    The splits are train, val and test. Copies of an image with the same label are used once; images with two labels are
    left out. Raises `UsageError` if more than one image in a hundred has two labels, and for data that cannot be split
    into seen and unseen pairs.

    images: folder that a table's image paths start from; by default the table's folder.
    known_pixels: digests of pixels that were computed before, by the sha256 of the file.
    """
    description = detect_source(source, SplitOptions(seed=seed), images)
    notes: list[str] = []
    try:
        if description.kind == "standard":
            data = load_source(description)
            digests, pixels = read_digests(description.root, data.manifest["image"].tolist(), known_pixels)
        else:
            frame, skipped = labelled_rows(description)
            distinct = distinct_images(frame, description.root, source, known_pixels)
            digests, pixels, notes = distinct.digests, distinct.pixels, distinct.notes + skipped
            require_words(distinct.rows, source)
            data = from_rows(distinct.rows, description.split, source)  # no two rows have the same content
        require_splits(data, source)
    except UsageError:
        raise
    except DuplexError as error:
        raise UsageError(str(error)) from None
    notes += [f"{text}: {count:,}" for text, count in data.notes.items()] + alike_labels(data)
    manifest = data.manifest.reset_index(drop=True)
    return LabelledFolder(description.root, manifest, data.labels, digests, pixels, tuple(notes))


def load_pixel_digests(cache: Path) -> dict[str, str]:
    """Digests of pixels that a cache folder stores, by the sha256 of the image file.

    There are none if the file is missing, damaged or of another version of Pillow.
    """
    try:
        record = json.loads((cache / PIXELS).read_text(encoding="utf-8"))
        pixels: dict[str, str] = record["pixels"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return pixels if record == with_checksum({**DECODER, "pixels": pixels}) else {}


def save_pixel_digests(cache: Path, pixels: Mapping[str, str]) -> None:
    """Write digests of pixels, by the sha256 of the image file; unreadable images are left out."""
    decoded = {file: digest for file, digest in sorted(pixels.items()) if digest != file}
    write_json(cache / PIXELS, with_checksum({**DECODER, "pixels": decoded}))


def labelled_rows(source: SourceOptions) -> tuple[pd.DataFrame, list[str]]:
    """Read a folder or table of labelled images; return a table and notes on the files that were skipped.

    The table has the columns image, state, object and, if the source has a split, split.
    """
    if source.table is not None:
        if not source.root.is_dir():
            raise UsageError(f"{source.root} is not a folder; --images names the folder that image paths start from")
        return read_table(source.table).drop_duplicates(ignore_index=True), []
    frame, notes = read_folder(source.root)
    return frame, [f"{text}: {count:,}" for text, count in notes.items()]


def distinct_images(
    frame: pd.DataFrame, root: Path, source: Path, known_pixels: Mapping[str, str] = MappingProxyType({})
) -> DistinctImages:
    """Remove copies of images from a table of labelled images; return the other rows, and notes on those left out.

    Files are copies if their bytes or their pixels are equal. Images whose copies have another label are all left out;
    more than one in a hundred raise `UsageError`.

    known_pixels: digests of pixels that were computed before, by the sha256 of the file.
    """
    images = frame["image"]
    files, pixels = read_digests(root, images.tolist(), known_pixels)
    digests = pd.Series(files, index=frame.index, dtype=object)
    missing = digests == ""
    if missing.all():
        raise UsageError(
            f"{source}: none of its {len(frame):,} images exists below {root}, such as {images.iloc[0]!r}; "
            "correct the paths or give --images FOLDER"
        )
    frame, digests = frame[~missing], digests[~missing]
    contents = digests.map(pixels)
    contradicted = _contradicted(frame, contents, source)
    frame, digests = frame[~contradicted], digests[~contradicted]
    repeated = contents[~contradicted].duplicated()
    notes = [
        str(DataIssue(text, int(mask.sum()), tuple(images[mask.index[mask]]), True))
        for text, mask in (
            ("images left out because they are missing", missing),
            ("images left out because copies have another label", contradicted),
            ("images left out because another has the same content", repeated),
        )
        if mask.any()
    ]
    return DistinctImages(frame[~repeated].reset_index(drop=True), digests[~repeated].tolist(), notes, pixels)


def _contradicted(frame: pd.DataFrame, contents: pd.Series, source: Path) -> pd.Series:
    """Return the mask of rows whose image also occurs with another label; raise `UsageError` for more than 1 % of rows.

    contents: digest of each row's pixels.
    """
    kinds = frame.assign(content=contents).drop_duplicates(["content", "state", "object"])
    twice = kinds.loc[kinds["content"].duplicated(keep=False), "content"]
    mask = contents.isin(twice)
    if mask.sum() > MOST_CONTRADICTED * len(frame):
        copies = kinds[kinds["content"] == twice.iloc[0]].head(2).itertuples()
        named = " and ".join(f"{row.image} ({row.state} {row.object})" for row in copies)
        raise UsageError(
            f"{source}: {twice.nunique():,} images occur with two labels, such as {named}, whose pixels are equal; "
            "keep one label of each"
        )
    return mask


def require_words(frame: pd.DataFrame, source: Path) -> None:
    """Raise `UsageError` unless a table of labelled images has at least two states and two objects."""
    for kind in ("state", "object"):
        names = frame[kind].unique()
        if len(names) < 2:
            raise UsageError(f"{source} has one {kind}, {names[0]!r}; expected at least two states and two objects")


def require_splits(data: LabelledImages, source: Path) -> None:
    """Raise `UsageError` if the validation or test split lacks images of seen or of unseen pairs."""
    fatal = next((issue for issue in check_labels_of(data) if issue.fatal and issue.count), None)
    if fatal is not None:
        raise UsageError(f"{source} cannot be fitted: {', '.join(fatal.examples)}; add images per pair, or pairs")


def describe(data: LabelledFolder, say: Callable[[str], None]) -> None:
    """Pass lines of text on a data set to the function `say`: numbers of images, labels and pairs, images left out."""
    labels = data.labels
    pairs = data.manifest[["state", "object"]].drop_duplicates()
    counts = data.manifest["split"].value_counts()
    say(
        f"{len(data.manifest):,} images, {len(labels.states)} states, {len(labels.objects)} objects, "
        f"{len(pairs)} pairs; train {counts['train']:,}, validation {counts['val']:,}, test {counts['test']:,}"
    )
    for note in data.notes:
        say(f"note: {note}")
