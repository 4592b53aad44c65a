"""Layout of a feature cache, which is one HDF5 file: its data sets, their types, and the status of each row.

cls                 [N, d] float16: encoder outputs, not normalised
patch               [N, T, w] float16, optional: patch tokens
block_inputs        [N, T, w] or [N, C, H, W] float16, optional: inputs of the image tower's last blocks; instead
                    in eight bits (`features.tokens`): block_inputs_int8 of that shape and
                    block_inputs_scale [N, T] or [N, H, W] float16
status              [N] uint8: 0 pending, 1 encoded, 2 + i bad because of REASONS[i]
checksums           [N, K] uint32: CRC-32 of each row of the K data sets of features and tokens, in the order of
                    `DATASETS`; the one of `cls` also covers the row's status

N images, features of width d, T tokens of width w, or feature maps of C channels. The attributes `start`, `stop` and
`total` say which rows of the manifest the file holds: all, or those of one shard. The attributes of the group
`identity` are the settings with which the file was made. Every data set is one contiguous block of bytes.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMATS = "duplex-features-"  # every version's name begins so
FORMAT = FORMATS + "3"
CODES = "block_inputs_int8"
SCALES = "block_inputs_scale"
CHECKSUMS = "checksums"
HALF = np.dtype(np.float16)
DATASETS: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {  # name: allowed numbers of dimensions, type
    "cls": ((2,), HALF),
    "status": ((1,), np.dtype(np.uint8)),
    "patch": ((3,), HALF),
    "block_inputs": ((3, 4), HALF),
    CODES: ((3, 4), np.dtype(np.int8)),
    SCALES: ((2, 3), HALF),
    CHECKSUMS: ((2,), np.dtype(np.uint32)),
}
REQUIRED = ("cls", "status", CHECKSUMS)
PENDING, ENCODED, FIRST_BAD = 0, 1, 2
REASONS = (  # append only: files store their positions
    "missing",
    "empty",
    "unreadable",
    "not an image",
    "damaged",
    "too large",
    "pixel type",
    "cannot be resized",
    "features not finite",
    "features all zero",
)
NOT_FINITE = FIRST_BAD + REASONS.index("features not finite")
ALL_ZERO = FIRST_BAD + REASONS.index("features all zero")
BAD_FEATURES = (NOT_FINITE, ALL_ZERO)  # statuses of images that can be read, but have no usable features
Statuses = NDArray[np.uint8]
Half = NDArray[np.float16]


class DamagedCache(Exception):
    """A file that is no sound feature cache; callers add the file's name and what to do."""


@dataclass(frozen=True)
class Span:
    """The rows that a file holds: [start, stop) of the manifest's `total` rows."""

    start: int
    stop: int
    total: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop == self.total


def status_reason(status: int) -> str:
    """Why an image has no features, from its status number."""
    return REASONS[int(status) - FIRST_BAD]


def status_of_reason(reason: str) -> int:
    return FIRST_BAD + REASONS.index(reason)


def value_names(present: Container[str]) -> list[str]:
    """Names of the data sets with features or tokens that a cache has, in a fixed order."""
    return [name for name in DATASETS if name in present and name not in ("status", CHECKSUMS)]


def row_bytes(name: str, row: tuple[int, ...]) -> int:
    """Bytes of one image's values, of shape `row`, in the data set `name`."""
    return int(np.prod(row)) * DATASETS[name][1].itemsize


def scale_shape(row: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one image's scales in 8 bits: [T] for tokens `row` = [T, w], [H, W] for a feature map [C, H, W]."""
    return row[1:] if len(row) == 3 else row[:1]


def partial_path(path: Path) -> Path:
    """Where a cache is written until it is finished."""
    return path.with_name(path.name + ".partial")
