"""HDF5 files from elsewhere: what they may hold, asked before a byte of it is read.

A file can name other files as its contents (links, external storage, virtual data sets), and HDF5 reads zeros where
they are missing; it can declare sizes that nothing on the disk backs. Both are refused.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

CHUNK_LIMIT = 1 << 30  # bytes of one stored piece, which is read whole
HOLLOW = 1 << 26  # files smaller than this may be all holes: reading zeros costs nothing


DAMAGED = (  # what h5py raises on bytes that are not as HDF5 has them
    *(OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, OverflowError, SystemError),
    *(NotImplementedError, AssertionError),
)


class Unfit(Exception):
    """Why a file or a part of it is not read; whoever asked says of which file, and what to do."""


def refuse_hollow(path: Path) -> None:
    """A file of holes claims far more than the disk holds of it."""
    found = os.stat(path)
    if found.st_size > HOLLOW and found.st_blocks * 512 * 8 < found.st_size:
        raise Unfit(f"it claims {found.st_size:,} bytes, of which the disk holds {found.st_blocks * 512:,}")


def find_dataset(file: Any, name: str, *, virtual: bool = False) -> Any:
    """The data set `name` of an open file, which must hold all of it; `virtual`: a view of other files is allowed."""
    try:
        return _found(file, name, virtual)
    except DAMAGED as error:
        raise Unfit(f"{name!r} cannot be read: {' '.join(str(error).split())}") from error


def _found(file: Any, name: str, virtual: bool) -> Any:
    link, found = file.get(name, getlink=True), file.get(name)
    if link is None:
        raise Unfit(f"there is no {name!r}")
    if not isinstance(link, h5py.HardLink):
        raise Unfit(f"{name!r} is a link to something else; store the array itself")
    if not isinstance(found, h5py.Dataset) or found.shape is None:
        raise Unfit(f"{name!r} is a folder or empty, not an array")
    if not (virtual and found.is_virtual):
        _check_storage(name, found)
    return found


def _check_storage(name: str, data: Any) -> None:
    if data.is_virtual or data.external:
        raise Unfit(f"{name!r} lies in other files; store the array itself")
    size = math.prod(data.shape) * max(1, data.dtype.itemsize)
    layout = data.id.get_create_plist().get_layout()
    if layout == h5py.h5d.CONTIGUOUS and size and data.id.get_storage_size() < size:
        raise Unfit(f"{name!r} declares {size:,} bytes, of which {data.id.get_storage_size():,} were ever written")
    if layout == h5py.h5d.CHUNKED:
        if math.prod(data.chunks) * data.dtype.itemsize > CHUNK_LIMIT:
            raise Unfit(f"{name!r} is stored in pieces of more than {CHUNK_LIMIT:,} bytes; store it in smaller ones")
        pieces = math.prod(-(-length // chunk) for length, chunk in zip(data.shape, data.chunks, strict=True))
        if data.id.get_num_chunks() < pieces:
            raise Unfit(f"{name!r} has {pieces:,} pieces, of which {data.id.get_num_chunks():,} were ever written")


def read_attribute(owner: Any, key: str) -> Any:
    """An attribute's value; None where there is none that can be read."""
    try:
        value = owner.attrs.get(key)
    except DAMAGED:
        return None
    return None if isinstance(value, h5py.Empty) else value


def as_text(value: object) -> str | None:
    """A stored string, however it was stored."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | np.bytes_):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return None
    return None
