"""NumPy archives of unknown origin, read only after their declared sizes have been compared with the file."""

from __future__ import annotations

import math
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from duplex.system.hdf5 import InvalidHDF5

MAX_EXPANDED = 1 << 30  # bytes of an array that unpacks to more than MAX_RATIO times its packed size
MAX_RATIO = 100
NPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class Member:
    """An array of an archive; slicing reads it."""

    archive: Archive
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        values: NDArray[Any] = self.archive.read(self.name)[rows]
        return values


class Archive:
    """An open `.npz`. Arrays are read at most once."""

    def __init__(self, path: Path) -> None:
        self.bundle = zipfile.ZipFile(path)
        self._read: dict[str, NDArray[Any]] = {}

    def __contains__(self, name: object) -> bool:
        return f"{name}.npy" in self.bundle.namelist()

    def __iter__(self) -> Any:
        return (name.removesuffix(".npy") for name in self.bundle.namelist())

    def find(self, name: str) -> Member:
        """Check an array's header and sizes and return it unread; raise `InvalidHDF5` if they cannot be right."""
        info = self.bundle.getinfo(f"{name}.npy")
        with self.bundle.open(info) as file:
            shape, dtype = _header(file)
            start = file.tell()
        _refuse_objects(dtype, repr(name))
        size = math.prod(shape) * dtype.itemsize
        if size != info.file_size - start:
            raise InvalidHDF5(f"{name!r} declares {size:,} bytes and holds {max(0, info.file_size - start):,}")
        if size > MAX_EXPANDED and size > MAX_RATIO * info.compress_size:
            raise InvalidHDF5(f"{name!r} unpacks {info.compress_size:,} bytes to {size:,}; save it as an .h5 file")
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise InvalidHDF5(f"{name!r} is {size:,} bytes, more than this machine's memory; save it as an .h5 file")
        return Member(self, name, shape, dtype)

    def read(self, name: str) -> NDArray[Any]:
        if name not in self._read:
            with self.bundle.open(f"{name}.npy") as file:
                self._read[name] = np.lib.format.read_array(file, allow_pickle=False)
        return self._read[name]

    def close(self) -> None:
        self.bundle.close()


def open_npz(path: Path) -> Archive:
    """Open an `.npz`; a single `.npy` array is refused."""
    with path.open("rb") as file:
        if file.read(len(NPY_MAGIC)) == NPY_MAGIC:
            file.seek(0)
            _refuse_objects(_header(file)[1], "it")
            raise InvalidHDF5("it is a single array, not an .npz of several")
    return Archive(path)


def _refuse_objects(dtype: np.dtype[Any], name: str) -> None:
    if dtype.hasobject:
        raise InvalidHDF5(f"{name} holds Python objects, which are not loaded for safety; save plain arrays")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise InvalidHDF5(f"its format {version} is unknown; expected (1, 0) or (2, 0)")
    shape, _, dtype = readers[version](file)
    return shape, dtype
