"""Files of image features computed by other programs: `.npy`, one array; or `.npz`, with the images' names beside it.

numpy.save("X.npy", features)                                # [rows, width], rows in the order of the data set
numpy.savez("X.npz", features=features, images=names)        # in any order: rows are found by name
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplex.data.contents import row_keys
from duplex.data.source_options import SourceOptions
from duplex.errors import DuplexError, UsageError
from duplex.labels import Ints

LARGEST = float(np.finfo(np.float16).max)
VANISHING = float(np.finfo(np.float16).smallest_subnormal) / 2  # largest value that float16 rounds to 0
CHUNK = 65_536  # rows checked at once
FEATURES = ("features", "features")  # singular and plural, for messages


@dataclass(frozen=True)
class FeatureFile:
    """An opened .npy or .npz file of image features from another program; rows of a .npy file are read on demand."""

    path: Path
    values: NDArray[Any]  # [rows, width], floats
    names: tuple[str, ...] | None  # images of the rows; None for a plain array

    @classmethod
    def open(cls, path: Path) -> FeatureFile:
        """Open a file of image features and check the types and shapes of its arrays.

        Raises UsageError if there is no such file or it holds other arrays, DuplexError if it is damaged.
        """
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file; expected a .npy file")
        try:
            content = np.load(path, mmap_mode="r", allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                return cls(path, _checked_values(path, content), None)
            with content:
                if set(content.files) != {"features", "images"}:
                    raise UsageError(
                        f"{path} has the arrays {content.files}; expected features and images (image names), or one "
                        "array of numbers [rows, width] as .npy"
                    )
                values = _checked_values(path, content["features"])
                try:
                    names = content["images"]
                except ValueError:  # needs pickle
                    raise UsageError(
                        f"{path}: the array images holds Python objects; save `images.astype(str)`"
                    ) from None
                return cls(path, values, _checked_names(path, names, len(values)))
        except FileNotFoundError as error:
            raise UsageError(f"{path} does not exist") from error
        except (ValueError, OSError, EOFError) as error:
            if re.search("Python objects|Object arrays", str(error)):  # of `np.load`, which needs pickle for them
                raise UsageError(
                    f"{path}: the array holds Python objects, not numbers; save `X.astype('float32')`"
                ) from None
            raise DuplexError(f"{path} is not an array that numpy saved as .npy or .npz, or it is damaged") from error

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    def rows_of(self, images: Sequence[str], *, ordered: bool = True) -> Ints:
        """Each image's row in the file: by name if the file has image names, else 0, 1, 2, … in order.

        Raises UsageError if the file lacks an image or, without names, has another number of rows. A file without names
        is refused, too, unless the images are `ordered`, as the lines of a table are.
        """
        if self.names is None and not ordered:
            raise UsageError(
                f"{self.path} has no image names, which are needed because images of a folder have no fixed order; "
                "save both: numpy.savez('X.npz', features=X, images=names)"
            )
        if self.names is None:
            if len(self.values) != len(images):
                raise UsageError(
                    f"{self.path} has {len(self.values)} rows and the manifest {len(images)}; they must correspond one "
                    "to one"
                )
            return np.arange(len(images))
        place = {name: row for row, name in enumerate(self.names)}
        missing = [image for image in images if image not in place]
        if missing:
            raise UsageError(
                f"{self.path} has no features of {len(missing)} of {len(images)} images, such as {missing[0]!r}; its "
                f"names are like {self.names[0]!r}, and must be the image paths of the data set"
            )
        return np.array([place[image] for image in images], dtype=np.int64)

    def unusable(self, rows: Ints) -> NDArray[np.bool_]:
        """Mask of the `rows` that cannot be used: with NaN or infinity, or all zeros in float16.

        Raises UsageError for values above float16's range.
        """
        bad = np.empty(len(rows), dtype=bool)
        for start in range(0, len(rows), CHUNK):
            block = np.asarray(self.values[rows[start : start + CHUNK]])
            finite = np.isfinite(block).all(axis=1)
            bad[start : start + CHUNK] = ~finite | (np.abs(block) <= VANISHING).all(axis=1)
            if np.abs(block[finite]).max(initial=0) > LARGEST:
                raise UsageError(
                    f"{self.path} has values above {LARGEST:g}, which float16 cannot hold; scale them down"
                )
        return bad


def feature_keys(path: Path | None, source: SourceOptions) -> Callable[[Sequence[str]], list[str]] | None:
    """A function from images to one key per image, equal for equal features in a file; None if there is no file."""
    return None if path is None else partial(feature_row_keys, path, source.table is not None)


def feature_row_keys(path: Path, ordered: bool, images: Sequence[str]) -> list[str]:
    """One key per image, equal for equal features in the file `path`; unusable features get a key of their own."""
    file = FeatureFile.open(path)
    rows = file.rows_of(images, ordered=ordered)
    unusable = file.unusable(rows)
    keys: list[str] = []
    for start in range(0, len(rows), CHUNK):
        keys += row_keys(np.asarray(file.values[rows[start : start + CHUNK]]))
    return [image if bad else key for image, bad, key in zip(images, unusable, keys, strict=True)]


def _checked_values(path: Path, values: Any) -> NDArray[Any]:
    if values.ndim != 2 or values.dtype.kind != "f" or 0 in values.shape:
        raise UsageError(
            f"{path} must hold one array of floating-point numbers [rows, width]; it has {values.shape} {values.dtype}"
        )
    checked: NDArray[Any] = values
    return checked


def _checked_names(path: Path, names: NDArray[Any], rows: int) -> tuple[str, ...]:
    if names.shape != (rows,) or names.dtype.kind != "U":
        raise UsageError(f"{path}: the array images is {names.shape} of {names.dtype}; expected {rows} names, as text")
    listed, counts = np.unique(names, return_counts=True)
    if (counts > 1).any():
        raise UsageError(
            f"{path}: the array images lists {str(listed[counts > 1][0])!r} twice; expected one row per image"
        )
    return tuple(names.tolist())
