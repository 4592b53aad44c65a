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
    """Return the CRC-32 [B] of each row of an array [B, ...].

    statuses: a number per row [B] of a feature cache, which says if its image was encoded; checksums cover it, too.
    """
    rows = np.ascontiguousarray(block).reshape(len(block), int(np.prod(block.shape[1:]))).view(np.uint8)
    begins = [0] * len(rows) if statuses is None else [zlib.crc32(bytes([status])) for status in statuses]
    return np.array([zlib.crc32(row.data, begin) for row, begin in zip(rows, begins, strict=True)], np.uint32)


def stored_checksums(file: Any, name: str, rows: Any = slice(None)) -> Checksums:
    """Return the checksums (CRC-32) that an open feature cache stores for rows of its HDF5 data set `name`."""
    checksums: Checksums = file[CHECKSUMS][rows, value_names(file).index(name)]
    return checksums


def contents_digest(file: Any) -> str:
    """Return one sha256 for an open feature cache's contents: all CLS features, and which images were unreadable."""
    return hashlib.sha256(stored_checksums(file, "cls").tobytes()).hexdigest()


def read_rows(file: Any, name: str, rows: Any = slice(None)) -> NDArray[Any]:
    """Return rows of the HDF5 data set `name` of an open feature cache, after comparing them with their checksums.

    Raises `InvalidHDF5` if a row differs. Rows whose image has not been encoded yet are not compared.

    rows: a slice, or ascending row numbers.
    """
    values: NDArray[Any] = file[name][rows]
    statuses: Statuses = file["status"][rows]
    wrong = row_checksums(values, statuses if name == "cls" else None) != stored_checksums(file, name, rows)
    refuse_wrong(name, np.arange(len(file["status"]))[rows], wrong & (statuses != PENDING))
    return values


def read_blocks(file: Any, name: str) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield all rows of the HDF5 data set `name` of an open feature cache, some at a time: (range of rows, values).

    Raises `InvalidHDF5` if a row does not match its checksum.
    """
    data = file[name]
    step = max(1, BLOCK * len(data) // max(1, data.nbytes))
    for start in range(0, len(data), step):
        rows = slice(start, min(start + step, len(data)))
        yield rows, read_rows(file, name, rows)


def refuse_wrong(name: str, rows: NDArray[np.int64], wrong: NDArray[np.bool_]) -> None:
    """Raise `InvalidHDF5` if rows of a feature cache do not match their checksums; the message names the first one.

    rows: row numbers [B].
    wrong: mask [B] of the rows that do not match.
    """
    if wrong.any():
        raise InvalidHDF5(f"row {rows[wrong.argmax()]} of {name!r} does not match its checksum")
