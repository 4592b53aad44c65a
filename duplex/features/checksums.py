"""Checksums of a feature cache's rows, so that a value that changed on the disk is noticed when it is read."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplex.features.layout import CHECKSUMS, PENDING, Statuses, value_names
from duplex.system.hdf5 import InvalidHDF5

BLOCK = 2**26  # bytes read at once
Checksums = NDArray[np.uint32]


def row_checksums(block: NDArray[Any], statuses: Statuses | None = None) -> Checksums:
    """Return the CRC-32 [B] of each row of a block [B, ...]; with the rows' statuses [B], it covers these too."""
    rows = np.ascontiguousarray(block).reshape(len(block), int(np.prod(block.shape[1:]))).view(np.uint8)
    begins = [0] * len(rows) if statuses is None else [zlib.crc32(bytes([status])) for status in statuses]
    return np.array([zlib.crc32(row.data, begin) for row, begin in zip(rows, begins, strict=True)], np.uint32)


def stored_checksums(file: Any, name: str, rows: Any = slice(None)) -> Checksums:
    """Return the checksums that an open cache holds for rows of its data set `name`."""
    checksums: Checksums = file[CHECKSUMS][rows, value_names(file).index(name)]
    return checksums


def contents_digest(file: Any) -> str:
    """Return one digest of all images' CLS features in an open cache, and of which images could not be read."""
    return hashlib.sha256(stored_checksums(file, "cls").tobytes()).hexdigest()


def read_rows(file: Any, name: str, rows: Any = slice(None)) -> NDArray[Any]:
    """Return rows of the data set `name` of an open cache; raise `InvalidHDF5` if one does not match its checksum.

    rows: a slice, or rising row numbers. Pending rows are not checked.
    """
    values: NDArray[Any] = file[name][rows]
    statuses: Statuses = file["status"][rows]
    wrong = row_checksums(values, statuses if name == "cls" else None) != stored_checksums(file, name, rows)
    refuse_wrong(name, np.arange(len(file["status"]))[rows], wrong & (statuses != PENDING))
    return values


def read_blocks(file: Any, name: str) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield all rows of the data set `name` of an open cache in blocks, each with its range; raise as `read_rows`."""
    data = file[name]
    step = max(1, BLOCK * len(data) // max(1, data.nbytes))
    for start in range(0, len(data), step):
        rows = slice(start, min(start + step, len(data)))
        yield rows, read_rows(file, name, rows)


def refuse_wrong(name: str, rows: NDArray[np.int64], wrong: NDArray[np.bool_]) -> None:
    """Raise `InvalidHDF5` that names the first of the cache's `rows` [B] that is `wrong` [B]."""
    if wrong.any():
        raise InvalidHDF5(f"row {rows[wrong.argmax()]} of {name!r} does not match its checksum")
