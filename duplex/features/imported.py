"""Read, check and import files of image features that a user computed elsewhere.

    numpy.save("X.npy", features)                                # [rows, width], rows in the order of the data set
    numpy.savez("X.npz", features=features, images=names)        # in any order: rows are found by name

A file must fit its data set and the encoder that, according to the user, computed it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from duplex.data.check import DataIssue, content_issues
from duplex.data.contents import row_keys
from duplex.data.tables import LabelledImages
from duplex.encoders.base import encoder_identity, find_family, missing_weights
from duplex.errors import DuplexError, UsageError
from duplex.features.file import ALL_ZERO, ENCODED, IMPORTED, NOT_FINITE, Identity, PartialCache, Span, claim_cache
from duplex.labels import Ints
from duplex.options import SourceOptions
from duplex.system.files import sha256

LARGEST = float(np.finfo(np.float16).max)
VANISHING = float(np.finfo(np.float16).smallest_subnormal) / 2  # largest value that float16 rounds to 0
CHUNK = 65_536  # rows read at once
FEATURES = ("features", "features")  # singular and plural, for messages
EXPECTED = "expected a float array of shape [images, width], one row per image"


@dataclass(frozen=True)
class FeatureFile:
    """An open .npy or .npz file of a user's image features; .npy rows are read when needed."""

    path: Path
    values: NDArray[Any]  # [rows, width], floats
    names: tuple[str, ...] | None  # images of the rows; None for a plain array

    @classmethod
    def open(cls, path: Path) -> FeatureFile:
        """Open a file of image features and check the types and shapes of its arrays."""
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file; expected a .npy or .npz file")
        try:
            content = np.load(path, mmap_mode="r", allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                return cls(path, _checked_values(path, content), None)
            with content:
                if set(content.files) != {"features", "images"}:
                    raise UsageError(
                        f"{path} has the arrays {content.files}; expected arrays named 'features' and 'images' (the "
                        "image names), or a .npy file with one float array of shape [images, width]"
                    )
                values = _checked_values(path, content["features"])
                return cls(path, values, _checked_names(path, content["images"], len(values)))
        except FileNotFoundError as error:
            raise UsageError(f"{path} does not exist; give a .npy or .npz file of features") from error
        except (ValueError, OSError, EOFError) as error:
            if re.search("Python objects|Object arrays", str(error)):  # of `np.load`, which needs pickle for them
                raise UsageError(
                    f"{path} holds Python objects; save features as `X.astype('float32')`, names as `names.astype(str)`"
                ) from None
            raise DuplexError(f"{path} cannot be read as .npy or .npz; save it again with numpy") from error

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    def rows_of(self, images: Sequence[str], *, ordered: bool = True) -> Ints:
        """The row of each image, found by name; without image names, the rows in order.

        A file without names needs one row per image, in a fixed order of the images (`ordered`).
        """
        if self.names is None and not ordered:
            raise UsageError(
                f"{self.path} has no image names, which are needed because images of a folder have no fixed order; "
                "save the names, too: numpy.savez('X.npz', features=X, images=names)"
            )
        if self.names is None:
            if len(self.values) != len(images):
                raise UsageError(
                    f"{self.path} has {len(self.values)} rows, but the data set has {len(images)} images; save one "
                    "row per image, in the order of its table"
                )
            return np.arange(len(images))
        place = {name: row for row, name in enumerate(self.names)}
        missing = [image for image in images if image not in place]
        if missing:
            raise UsageError(
                f"{self.path} has no features for {len(missing)} of {len(images)} images, such as {missing[0]!r}; "
                f"replace its names, such as {self.names[0]!r}, by the image paths of the data set"
            )
        return np.array([place[image] for image in images], dtype=np.int64)

    def unusable(self, rows: Ints) -> NDArray[np.bool_]:
        """Mask [n] of the `rows` [n] with NaN, infinity or only zeros; UsageError beyond float16."""
        bad = np.empty(len(rows), dtype=bool)
        for start in range(0, len(rows), CHUNK):
            block = np.asarray(self.values[rows[start : start + CHUNK]])
            finite = np.isfinite(block).all(axis=1)
            bad[start : start + CHUNK] = ~finite | (np.abs(block) <= VANISHING).all(axis=1)
            if np.abs(block[finite]).max(initial=0) > LARGEST:
                raise UsageError(
                    f"{self.path} has values above {LARGEST:g}, float16's limit; divide all features by the same number"
                )
        return bad

    def keys(self, images: Sequence[str], rows: Ints) -> list[str]:
        """One key per image, equal for equal features; unusable features have a key of their own."""
        unusable = self.unusable(rows)
        keys: list[str] = []
        for start in range(0, len(rows), CHUNK):
            keys += row_keys(np.asarray(self.values[rows[start : start + CHUNK]]))
        return [image if bad else key for image, bad, key in zip(images, unusable, keys, strict=True)]


def equal_feature_keys(path: Path | None, source: SourceOptions) -> Callable[[Sequence[str]], list[str]] | None:
    """A function from images to keys, equal for equal features in the file `path`, if there is one."""
    if path is None:
        return None

    def keys(images: Sequence[str]) -> list[str]:
        file = FeatureFile.open(path)
        return file.keys(images, file.rows_of(images, ordered=source.table is not None))

    return keys


def _checked_values(path: Path, values: Any) -> NDArray[Any]:
    if values.ndim != 2 or values.dtype.kind != "f" or 0 in values.shape:
        raise UsageError(f"the features in {path} have shape {values.shape} and type {values.dtype}; {EXPECTED}")
    checked: NDArray[Any] = values
    return checked


def _checked_names(path: Path, names: NDArray[Any], rows: int) -> tuple[str, ...]:
    if names.shape != (rows,) or names.dtype.kind != "U":
        found = f"shape {names.shape} and type {names.dtype.name}"
        raise UsageError(f"{path}: 'images' has {found}; expected {rows} names as text, such as `names.astype(str)`")
    listed, counts = np.unique(names, return_counts=True)
    if (counts > 1).any():
        raise UsageError(
            f"{path}: the array 'images' lists {str(listed[counts > 1][0])!r} twice; keep one row per image"
        )
    return tuple(names.tolist())


def import_features(
    source: Path,
    rows: int,
    manifest_sha256: str,
    out: Path,
    images: Sequence[str] | None = None,
    max_bad: float = 1.0,
    listed: Sequence[str] | None = None,
) -> Identity:
    """Write the feature cache `out` of `rows` images from a user's file; returns its identity.

    Images whose features are zero or not finite count as unreadable, at most the share `max_bad`.

    listed: images of the data set's table; rows of a file without names are those of this table.
    """
    file = FeatureFile.open(source)
    if listed is not None and file.names is None:
        file = replace(file, names=tuple(listed[row] for row in file.rows_of(listed)))
    if images is None and file.names is not None:
        raise UsageError(f"{source} has image names; pass the data set's as `images`, or save the features as .npy")
    places = file.rows_of(images if images is not None else [""] * rows)
    unusable = file.unusable(places)
    if unusable.sum() > max_bad * rows:
        first = int(unusable.argmax())
        raise DuplexError(
            f"{source}: {int(unusable.sum())} of {rows} rows are zero or not finite (first: "
            f"{f'row {first}' if images is None else images[first]}); leave these images out, or raise "
            "extraction.max_bad in params.yaml"
        )
    identity = {
        "encoder": IMPORTED,
        "weights": sha256(source),
        "precision": str(file.values.dtype),
        "dim": str(file.width),
        "manifest": manifest_sha256,
    }
    span = Span(0, rows, rows)
    with claim_cache(out), closing(PartialCache.create(out, identity, span, file.width)) as cache:
        try:
            for start in range(0, rows, CHUNK):
                bad = unusable[start : start + CHUNK]
                values = file.values[places[start : start + CHUNK]]
                reason = np.where(np.isfinite(values).all(axis=1), ALL_ZERO, NOT_FINITE)
                statuses = np.where(bad, reason, ENCODED).astype(np.uint8)
                cache.write(start, statuses, cls=np.where(bad[:, None], 0, values).astype(np.float16))
            cache.finish()
        except BaseException:
            cache.partial.unlink(missing_ok=True)
            raise
    return identity


def check_features(
    path: Path, data: LabelledImages, is_table: bool, encoder: str, weights: str | None, max_bad: float
) -> Iterator[DataIssue]:
    """Check a user's file of features; yields issues about unusable, equal and superfluous rows.

    Raises UsageError unless it fits the data set and the encoder (IMPORTED: an unknown one).
    """
    file = FeatureFile.open(path)
    images = data.manifest["image"].tolist()
    rows = file.rows_of(images, ordered=is_table)
    refuse_other_width(file, encoder, weights)
    if file.names is not None and (further := len(file.names) - len(images)):
        yield DataIssue("rows of features belong to no image of the data set", further, (str(path),), False)
    bad = [images[row] for row in np.flatnonzero(file.unusable(rows)).tolist()]
    if bad:
        fatal = len(bad) > max_bad * len(images)
        yield DataIssue("rows of features are zero or not finite", len(bad), tuple(bad), True, fatal)
    keys = dict(zip(images, file.keys(images, rows), strict=True))
    yield from (issue for issue in content_issues(data.manifest, keys, FEATURES) if issue.count)


def refuse_other_width(file: FeatureFile, encoder: str, weights: str | None) -> None:
    """Raise `UsageError` if the features in `file` have another width than the encoder's."""
    if encoder == IMPORTED:
        return
    width = next((entry.dim for entry in find_family(encoder).catalog() if entry.name == encoder), None)
    if width is None and missing_weights(encoder, weights) is None:
        width = encoder_identity(encoder, weights).dim
    if width not in (None, file.width):
        raise UsageError(
            f"{file.path} has features of width {file.width}, but {encoder} makes features of width {width}; "
            "give the encoder that made this file as --encoder, or 'none' if it is unknown"
        )


SHORTEST = 1e-12  # length of a feature below which `torch.nn.functional.normalize` does not make it a unit vector


def as_numpy(value: Any) -> Any:
    """Convert a tensor to a NumPy array, floats to float32; return other values as given."""
    if not isinstance(value, torch.Tensor):
        return value
    values = value.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()


def checked_features(features: Any) -> NDArray[np.float32]:
    """Features as float32 [N, d]; UsageError for other shapes, non-finite numbers, rows of zeros."""
    try:
        values = np.asarray(as_numpy(features))
    except ValueError:
        raise UsageError(f"'features' has rows of different lengths; {EXPECTED}") from None
    if values.ndim != 2 or values.dtype.kind != "f" or 0 in values.shape:
        raise UsageError(f"'features' has shape {values.shape} and type {values.dtype}; {EXPECTED}")
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.array(values, dtype=np.float32)
        length = np.sqrt(np.square(single).sum(axis=1))
    bad = np.flatnonzero(~((length >= SHORTEST) & np.isfinite(length)))  # NaN, too
    if bad.size:
        raise UsageError(
            f"'features' has {bad.size} of {len(single)} rows with only zeros, NaN, infinity or numbers of about 1e18 "
            f"or more, such as row {bad[0]}; leave these rows out, and their rows of the table"
        )
    return single
