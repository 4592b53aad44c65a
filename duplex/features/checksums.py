"""Checksums of a feature cache's rows, so that a value that changed on the disk is noticed when it is read."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplex.features.layout import CHECKSUMS, PENDING, DamagedCache, Statuses, value_names

BLOCK = 2**26  # bytes read at once
Checksums = NDArray[np.uint32]


def row_checksums(block: NDArray[Any], statuses: Statuses | None = None) -> Checksums:
    """CRC-32 [B] of each row of an array [B, ...]; with `statuses` [B], each also covers the row's status."""
    rows = np.ascontiguousarray(block).reshape(len(block), int(np.prod(block.shape[1:]))).view(np.uint8)
    begins = [0] * len(rows) if statuses is None else [zlib.crc32(bytes([status])) for status in statuses]
    return np.array([zlib.crc32(row.data, begin) for row, begin in zip(rows, begins, strict=True)], np.uint32)


def stored_checksums(file: Any, name: str, rows: Any = slice(None)) -> Checksums:
    """The checksums that an open cache stores for rows of its data set `name`."""
    checksums: Checksums = file[CHECKSUMS][rows, value_names(file).index(name)]
    return checksums


def contents_digest(file: Any) -> str:
    """One sha256 for an open cache's contents: all CLS features, and which images were unreadable."""
    return hashlib.sha256(stored_checksums(file, "cls").tobytes()).hexdigest()


def read_rows(file: Any, name: str, rows: Any = slice(None)) -> NDArray[Any]:
    """Read rows of the data set `name` of an open cache; raise `DamagedCache` if one does not match its checksum.

    Rows whose image has not been encoded yet are not compared.

    rows: a slice, or ascending row numbers.
    """
    values: NDArray[Any] = file[name][rows]
    statuses: Statuses = file["status"][rows]
    wrong = row_checksums(values, statuses if name == "cls" else None) != stored_checksums(file, name, rows)
    refuse_wrong(name, np.arange(len(file["status"]))[rows], wrong & (statuses != PENDING))
    return values


def read_blocks(file: Any, name: str) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Read the data set `name` of an open cache some rows at a time, as `read_rows` does: (range of rows, values)."""
    data = file[name]
    step = max(1, BLOCK * len(data) // max(1, data.nbytes))
    for start in range(0, len(data), step):
        rows = slice(start, min(start + step, len(data)))
        yield rows, read_rows(file, name, rows)


def check_values(file: Any) -> None:
    """Read all values of an open cache; raise `DamagedCache` if a row does not match its checksum."""
    for name in value_names(file):
        for _ in read_blocks(file, name):
            pass


def refuse_wrong(name: str, rows: NDArray[np.int64], wrong: NDArray[np.bool_]) -> None:
    """Raise `DamagedCache` that names the first of the row numbers `rows` [B] whose mask `wrong` [B] is set."""
    if wrong.any():
        raise DamagedCache(f"row {rows[wrong.argmax()]} of {name!r} does not match its checksum")
