"""HDF5 files from elsewhere: what they may hold, asked before a byte of it is read.

A file can name other files as its contents (links, external storage, virtual data sets), and HDF5 reads zeros where
they are missing; it can declare sizes that nothing on the disk backs; and where texts of any length lie damaged, HDF5
2.0 reads for ever, or makes room for texts of 4 GiB each before it looks for them. All are refused.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

CHUNK_LIMIT = 1 << 30  # bytes of one stored piece, which is read whole
REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])  # to a text of any length
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
    if _of_any_length(found.dtype):
        refuse_endless(Path(file.filename))
        refuse_boundless(name, found, Path(file.filename))
    return found


def _of_any_length(kind: Any) -> bool:
    text = h5py.check_string_dtype(kind)
    return kind.hasobject if text is None else text.length is None


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


def refuse_endless(path: Path) -> None:
    """Heaps of values of any length ("GCOL") in which an object takes no room: HDF5 would look at it for ever.

    A heap: "GCOL", version, its size (8 bytes at 8), then objects from 16: index (2 bytes), references (2), 4 unused,
    size (8), content up to a multiple of 8. Index 0 is what is free; its size counts its own head (HDF5's file format,
    III.E).
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(b"GCOL")
        while start >= 0:
            if len(data) >= start + 16:
                _walk_heap(data, start, min(len(data), start + struct.unpack_from("<Q", data, start + 8)[0]))
            start = data.find(b"GCOL", start + 4)


def _walk_heap(data: mmap.mmap, start: int, stop: int) -> None:
    at = start + 16
    while at + 16 <= stop:
        index, size = struct.unpack_from("<H6xQ", data, at)
        if index == 0 and size == 0:
            raise Unfit(f"its texts are damaged: the heap at byte {start:,} never ends")
        at += size if index == 0 else 16 + -(-size // 8) * 8


def refuse_boundless(name: str, data: Any, path: Path) -> None:
    """Texts of any length that claim more than their file holds. Each is stored as a reference: its length (4 bytes),
    its heap's address (8) and its place there (4); HDF5's file format, IV.A.2.d, type 9."""
    if h5py.check_string_dtype(data.dtype) is None:
        raise Unfit(f"{name!r} must be numbers or texts, not {data.dtype}")
    claimed = sum(
        int(np.frombuffer(piece, REFERENCE)["length"].sum(dtype=np.uint64)) for piece in _stored(name, data, path)
    )
    if claimed > os.stat(path).st_size:
        raise Unfit(f"{name!r} is damaged: its texts claim {claimed:,} bytes, more than the file has")


def _stored(name: str, data: Any, path: Path) -> Iterator[bytes]:
    """The bytes of an array, piece by piece, as they lie in the file."""
    size = math.prod(data.shape) * REFERENCE.itemsize
    layout = data.id.get_create_plist().get_layout()
    if layout == h5py.h5d.CHUNKED and not data.id.get_create_plist().get_nfilters():
        for number in range(data.id.get_num_chunks()):
            yield data.id.read_direct_chunk(data.id.get_chunk_info(number).chunk_offset)[1]
    elif layout == h5py.h5d.CONTIGUOUS and data.id.get_storage_size() == size:
        with open(path, "rb") as file:
            file.seek(data.id.get_offset() if size else 0)
            yield file.read(size)
    else:
        raise Unfit(f"{name!r} holds texts of any length, packed; store them without compression, or of one length")


def read_attribute(owner: Any, key: str) -> Any:
    """An attribute's value; None where there is none that can be read, or one of any length, as no cache has it."""
    try:
        if key in owner.attrs and _of_any_length(owner.attrs.get_id(key).dtype):
            return None
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
