"""NumPy archives from elsewhere: what an array declares is compared with what the file holds before it is read."""

from __future__ import annotations

import math
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from duplex.system.hdf5 import Unfit

BLOWN_UP = 1 << 30  # bytes beyond which an array that was packed a hundredfold is no scores
PACKED = 100
SINGLE = b"\x93NUMPY"  # how an array saved alone begins


@dataclass(frozen=True)
class Member:
    """One array of an archive, unread. Slicing reads it."""

    archive: Archive
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        values: NDArray[Any] = self.archive.read(self.name)[rows]
        return values


class Archive:
    """An open `.npz`; each array is read once."""

    def __init__(self, path: Path) -> None:
        self.bundle = zipfile.ZipFile(path)
        self._read: dict[str, NDArray[Any]] = {}

    def __contains__(self, name: object) -> bool:
        return f"{name}.npy" in self.bundle.namelist()

    def __iter__(self) -> Any:
        return (name.removesuffix(".npy") for name in self.bundle.namelist())

    def find(self, name: str) -> Member:
        info = self.bundle.getinfo(f"{name}.npy")
        with self.bundle.open(info) as file:
            shape, _, dtype = _header(file)
            start = file.tell()
        _plain(dtype, repr(name))
        size = math.prod(shape) * dtype.itemsize
        if size != info.file_size - start:
            raise Unfit(f"{name!r} declares {size:,} bytes and holds {max(0, info.file_size - start):,}")
        if size > BLOWN_UP and size > PACKED * info.compress_size:
            raise Unfit(f"{name!r} unpacks {info.compress_size:,} bytes to {size:,}; save it as an .h5 file")
        if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise Unfit(f"{name!r} is {size:,} bytes, more than this machine's memory; save it as an .h5 file")
        return Member(self, name, shape, dtype)

    def read(self, name: str) -> NDArray[Any]:
        if name not in self._read:
            with self.bundle.open(f"{name}.npy") as file:
                self._read[name] = np.lib.format.read_array(file, allow_pickle=False)
        return self._read[name]

    def close(self) -> None:
        self.bundle.close()


def open_npz(path: Path) -> Archive:
    with path.open("rb") as file:
        if file.read(len(SINGLE)) == SINGLE:
            file.seek(0)
            _plain(_header(file)[2], "it")
            raise Unfit("it is a single array, not an .npz of several")
    return Archive(path)


def _plain(dtype: np.dtype[Any], what: str) -> None:
    if dtype.hasobject:
        raise Unfit(f"{what} holds Python objects, which are never loaded; save plain arrays")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise Unfit(f"its format {version} is none that numbers are saved in")
