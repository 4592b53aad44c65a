"""Open a feature cache, check its format and shapes, and read what it says about itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from duplex.errors import DuplexError
from duplex.features.identity import Identity, repair_hint
from duplex.features.layout import (
    CHECKSUMS,
    DATASETS,
    FORMAT,
    FORMATS,
    REQUIRED,
    DamagedCache,
    Span,
    partial_path,
    value_names,
)

HDF5_SUFFIXES = (".h5", ".hdf5")
HDF5_SIGNATURE = b"\x89HDF"
HEAD = 1 << 16  # bytes within which every cache names its format


def refuse_foreign(path: Path) -> None:
    """Raise `DuplexError` if writing a cache to `path` would overwrite a file of another kind.

    Caches of any version may be overwritten, even damaged or unfinished ones, and so may empty files.
    """
    for file, signature in ((path, FORMATS.encode()), (partial_path(path), HDF5_SIGNATURE)):
        if not os.path.lexists(file):
            continue
        head = None
        if file.is_file():
            with file.open("rb") as stream:
                head = stream.read(HEAD)
        if head is None or (head and not (head.startswith(HDF5_SIGNATURE) and signature in head)):
            raise DuplexError(
                f"{file} exists and is not a feature cache, so it is not overwritten; "
                "choose another place with --out, or move it"
            )


@contextmanager
def open_cache(path: Path) -> Iterator[Any]:
    """Open a finished feature cache, or a shard of one, for reading.

    Raises `DuplexError` unless the file has the format and shapes of a cache, and for a row that the `with` block finds
    not to match its checksum.
    """
    require_cache_file(path)
    try:
        file = h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        raise DuplexError(f"{path} cannot be opened as HDF5 file: {error}; {_hint(path)}") from error
    with file:
        try:
            version = read_format(file)
            if not version.startswith(FORMATS):
                raise DuplexError(f"{path} is not a feature cache of duplex; {_hint(path)}")
            if version != FORMAT:
                raise DuplexError(
                    f"{path} has the format {version} of another version, expected {FORMAT}; {repair_hint(path)}"
                )
            check_layout(file)
            yield file
        except (DamagedCache, OSError, RuntimeError) as error:  # the latter two are h5py's
            raise DuplexError(f"{path} is damaged: {error}; {repair_hint(path)}") from error


def _hint(path: Path) -> str:
    return repair_hint(path) if path.suffix in HDF5_SUFFIXES else "name a file that `duplex extract` wrote"


def require_cache_file(path: Path) -> None:
    """Raise `DuplexError` unless `path` is a file or a link to one."""
    if not path.exists():
        unfinished = " (an unfinished one lies beside it)" if partial_path(path).exists() else ""
        raise DuplexError(f"{path} does not exist{unfinished}; {repair_hint(path)}")
    if not path.is_file():
        raise DuplexError(f"{path} is not a file; name the cache's file")


def read_format(file: Any) -> str:
    """The format that an open HDF5 file states; empty if it states none."""
    return bytes(file.attrs.get("format", b"")).decode(errors="replace")


def read_identity(file: Any) -> Identity:
    """The settings with which an open cache was made."""
    return {key: value.decode() for key, value in file["identity"].attrs.items()}


def read_row_span(file: Any) -> Span:
    """The manifest rows that an open cache holds."""
    return Span(int(file.attrs["start"]), int(file.attrs["stop"]), int(file.attrs["total"]))


def check_layout(file: Any) -> None:
    """Raise `DamagedCache` unless an open file has a cache's data sets, contiguous, in the right types and shapes."""
    missing = [name for name in (*REQUIRED, "identity") if name not in file]
    if missing:
        raise DamagedCache(f"there is no {missing[0]!r}")
    rows = read_row_span(file).rows
    for name, (dimensions, dtype) in DATASETS.items():
        if name not in file:
            continue
        data = file[name]
        if data.shape[:1] != (rows,) or data.ndim not in dimensions or data.dtype != dtype:
            raise DamagedCache(f"{name!r} is {data.shape} of {data.dtype}, which does not fit its {rows} rows")
        if data.id.get_offset() is None:
            raise DamagedCache(f"{name!r} is not stored as one block in the file")
    if file[CHECKSUMS].shape[1] != len(value_names(file)):
        raise DamagedCache(f"{CHECKSUMS!r} does not fit the other data sets")
