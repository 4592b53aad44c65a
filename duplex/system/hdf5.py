"""Checks of HDF5 files from unknown sources, made before any data is read.

Such a file can refer to other files for its contents, and HDF5 returns zeros if these are missing. It can declare large
arrays that are not stored on the disk. Damaged text of variable length makes HDF5 2.0 loop without end or allocate 4
GiB per text.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

CHUNK_LIMIT = 1 << 30  # bytes of one stored chunk, which HDF5 reads whole
SPARSE_LIMIT = 1 << 26  # bytes; smaller files may be sparse: reading their zeros costs nothing

HDF5_ERRORS = (  # exceptions that h5py raises on damaged bytes
    *(OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, OverflowError, SystemError),
    *(NotImplementedError, AssertionError),
)


class InvalidHDF5(Exception):
    """Raised for an HDF5 file or data set that must not be read; callers add the file's name and what to do."""


@contextmanager
def hdf5_errors_as_invalid(subject: str = "") -> Iterator[None]:
    """Raise `InvalidHDF5`, its message beginning with `subject`, for any h5py error in the `with` block."""
    try:
        yield
    except HDF5_ERRORS as error:
        raise InvalidHDF5(subject + describe_error(error)) from error


def describe_error(error: Exception) -> str:
    """Return an exception's message on one line, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def refuse_sparse_file(path: Path) -> None:
    """Raise `InvalidHDF5` for a large sparse file, of whose size less than an eighth is stored on the disk."""
    info = os.stat(path)
    if info.st_size > SPARSE_LIMIT and info.st_blocks * 512 * 8 < info.st_size:
        raise InvalidHDF5(f"its size is {info.st_size:,} bytes, but the disk holds {info.st_blocks * 512:,} of them")


def find_dataset(file: Any, name: str, *, virtual: bool = False) -> Any:
    """Return the HDF5 data set `name` of an open file, without reading its values.

    Raises `InvalidHDF5` unless the file itself holds all values, in types of fixed size. `virtual` also allows an HDF5
    virtual data set, whose values are in other files.
    """
    with hdf5_errors_as_invalid(f"{name!r} cannot be read: "):
        link = file.get(name, getlink=True)
        if link is None:
            raise InvalidHDF5(f"there is no {name!r}")
        if not isinstance(link, h5py.HardLink):
            raise InvalidHDF5(f"{name!r} is a link to another place; store the array itself")
        data = file.get(name)
        if not isinstance(data, h5py.Dataset) or data.shape is None:
            raise InvalidHDF5(f"{name!r} is a group of arrays or empty; expected an array")
        if not (virtual and data.is_virtual):
            _check_storage(name, data)
        if _has_variable_length(data.dtype):
            raise InvalidHDF5(
                f"{name!r} must be numbers or text of fixed length; store text as np.char.encode(texts, 'utf-8')"
            )
        return data


def _has_variable_length(dtype: Any) -> bool:
    text = h5py.check_string_dtype(dtype)
    return dtype.hasobject if text is None else text.length is None


def _check_storage(name: str, data: Any) -> None:
    if data.is_virtual or data.external:
        raise InvalidHDF5(f"{name!r} lies in other files; store the array itself")
    size = math.prod(data.shape) * max(1, data.dtype.itemsize)
    layout = data.id.get_create_plist().get_layout()
    if layout == h5py.h5d.CONTIGUOUS and size and data.id.get_storage_size() < size:
        raise InvalidHDF5(
            f"{name!r} declares {size:,} bytes, of which {data.id.get_storage_size():,} were ever written"
        )
    if layout == h5py.h5d.CHUNKED:
        if math.prod(data.chunks) * data.dtype.itemsize > CHUNK_LIMIT:
            raise InvalidHDF5(f"{name!r} is stored in chunks of more than {CHUNK_LIMIT:,} bytes; use smaller ones")
        chunks = math.prod(-(-length // chunk) for length, chunk in zip(data.shape, data.chunks, strict=True))
        if data.id.get_num_chunks() < chunks:
            raise InvalidHDF5(
                f"{name!r} has {chunks:,} chunks, of which {data.id.get_num_chunks():,} were ever written; "
                "write the whole array again"
            )


def read_attribute(owner: Any, key: str) -> Any:
    """Return the value of an HDF5 attribute; None if it is absent, unreadable, empty or of variable length."""
    try:
        if key in owner.attrs and _has_variable_length(owner.attrs.get_id(key).dtype):
            return None
        value = owner.attrs.get(key)
    except HDF5_ERRORS:
        return None
    return None if isinstance(value, h5py.Empty) else value


def as_text(value: object) -> str | None:
    """Return a value read from HDF5 as text; None if it is not text, or not UTF-8."""
    if isinstance(value, bytes | np.bytes_):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return None
    return value if isinstance(value, str) else None
