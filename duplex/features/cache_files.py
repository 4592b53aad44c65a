"""The files in which a cache's rows lie, open for reading at any of them: the cache itself, or the shards it joins.

Rows are read where they lie, past HDF5, so that the system can be told which will be asked for next: it brings them to
memory meanwhile, on no core of ours. A thread that read ahead would take one from the products of a step, whose own
threads wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplex.features.layout import open_file
from duplex.labels import Ints

WINDOW = 2**17  # bytes of one word to the system, which cuts a longer one to the device's window: 128 KiB by default


@dataclass(frozen=True)
class Part:
    """A data set in one file: the shape and type of a row, and where the first lies."""

    row: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @classmethod
    def of(cls, data: Any) -> Part:
        return cls(tuple(data.shape[1:]), data.dtype, data.id.get_offset())

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.row)) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """One open file: its first row of the cache's, and its data sets."""

    path: Path
    descriptor: int
    first: int
    parts: dict[str, Part]

    def read(self, name: str, row: int, count: int) -> NDArray[Any]:
        """[count, ...] from one of the cache's rows on."""
        part = self.parts[name]
        block = np.empty((count, *part.row), dtype=part.dtype)
        view, place = block.view(np.uint8).ravel().data, part.offset + (row - self.first) * part.stride
        while view:
            got = os.preadv(self.descriptor, [view], place)
            if not got:
                raise OSError(f"{self.path} ends within its tokens")
            view, place = view[got:], place + got
        return block

    def expect(self, row: int, count: int) -> None:
        """These rows will be read soon. Where the system cannot be told they come from the disk when they are."""
        if not hasattr(os, "posix_fadvise"):
            return
        for part in self.parts.values():
            start = part.offset + (row - self.first) * part.stride
            stop = start + count * part.stride
            for place in range(start, stop, WINDOW):
                with suppress(OSError):
                    os.posix_fadvise(self.descriptor, place, min(WINDOW, stop - place), os.POSIX_FADV_WILLNEED)


class Pieces:
    """Some data sets of a cache. What is open closes with it."""

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self.names, self._open = names, ExitStack()
        with open_file(path) as file:
            self.total, self.row = len(file[names[0]]), file[names[0]].shape[1:]
            joined = [
                (source.vspace.get_select_bounds()[0][0], path.parent / source.file_name)
                for source in (file[names[0]].virtual_sources() if file[names[0]].is_virtual else ())
            ]
        self._pieces = [self._opened(where, int(first)) for first, where in sorted(joined) or [(0, path)]]
        self._firsts = np.array([piece.first for piece in self._pieces])

    def __del__(self) -> None:
        self._open.close()

    def _opened(self, path: Path, first: int) -> Piece:
        with open_file(path, joined=False) as file:
            parts = {name: Part.of(file[name]) for name in self.names}
        descriptor = os.open(path, os.O_RDONLY)
        self._open.callback(os.close, descriptor)
        return Piece(path, descriptor, first, parts)

    def stretches(self, wanted: Ints) -> Iterator[tuple[Piece, int, Ints]]:
        """In the order of the files, neighbours of one file together: the file, the first of its rows, and the places
        at which it and those after it are wanted."""
        order = np.argsort(wanted, kind="stable")
        rows = wanted[order]
        homes = np.searchsorted(self._firsts, rows, side="right") - 1
        begins = np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (np.diff(homes, prepend=-1) != 0))
        for begin, places in zip(begins, np.split(order, begins)[1:], strict=True):
            yield self._pieces[homes[begin]], int(rows[begin]), places
