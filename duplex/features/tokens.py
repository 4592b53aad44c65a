"""Tokens of a cache (patch tokens, or block inputs): in memory where they fit, else read from the disk on demand.

MIT-States at ViT-L/14 is 53,753 x 256 x 1,024 x 2 B = 28 GB. `DiskTokens` stands for such rows in a method's inputs.
Training reads shuffled blocks and announces the next ones (`duplex.training.loop`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.errors import DuplexError
from duplex.features.checks import open_cache
from duplex.features.checksums import read_rows, refuse_wrong, row_checksums, stored_checksums
from duplex.features.identity import repair_hint
from duplex.features.layout import CODES, SCALES, Half
from duplex.labels import Ints
from duplex.system.hdf5 import InvalidHDF5

IN_MEMORY = 2**31  # default budget in bytes: more tokens than this stay on the disk, on any machine
BLOCK = 2**22  # bytes of a block of neighbouring rows; `training.memory` is at least this
WINDOW = 64  # blocks whose rows are mixed
ANNOUNCED = 2**17  # bytes per hint; the system cuts longer ones to the device's window, 128 KiB by default
CPU = torch.device("cpu")


def read_tokens(path: Path, name: str = "patch", limit: int = IN_MEMORY) -> Half | DiskTokens | None:
    """Return the tokens `name` ("patch" or "block_inputs") of a cache: [N, ...] float16, zero where an image is bad.

    Up to `limit` bytes are read into memory, more stay on the disk. None if the cache has no such tokens.
    """
    with open_cache(path) as file:
        names = stored_names(file, name)
        if not names:
            return None
        if file[names[0]].size * 2 <= limit:
            return read_stored(names, partial(read_rows, file))
    return DiskTokens.open(path, name)


def stored_names(file: Any, name: str) -> tuple[str, ...]:
    """Return the HDF5 data sets that hold a cache's tokens `name`: one in float16, two in eight bits, or none."""
    if name in file:
        return (name,)
    return (CODES, SCALES) if name == "block_inputs" and CODES in file else ()


def read_stored(names: tuple[str, ...], read: Callable[[str], NDArray[Any]]) -> Half:
    """Return tokens in float16 from the HDF5 data sets `names`, whose values `read(name)` returns."""
    values, *scales = map(read, names)
    return dequantize(values, *scales) if scales else np.asarray(values, dtype=np.float16)


@dataclass(frozen=True)
class CacheFile:
    """One open file of a cache (the cache itself, or a shard that it joins).

    Rows are read with system calls instead of HDF5, so that the system can get hints which rows come next. A thread
    that reads ahead would take a core from the matrix products of a training step, whose threads wait for each other.
    """

    path: Path
    descriptor: int
    first: int  # row of the cache that the file's first row is
    arrays: dict[str, tuple[np.dtype[Any], int]]  # by data set: type of a whole row, and offset of the first in bytes

    def read(self, name: str, row: int, count: int) -> NDArray[Any]:
        """Return `count` rows of the HDF5 data set `name`, beginning at row `row` of the whole cache."""
        row_type, offset = self.arrays[name]
        block = np.empty(count, row_type)
        view = block.view(np.uint8).ravel().data
        offset += (row - self.first) * row_type.itemsize
        while view:
            read = os.preadv(self.descriptor, [view], offset)
            if not read:
                raise OSError(f"{self.path} ends within its tokens")
            view = view[read:]
            offset += read
        return block

    def read_ahead(self, row: int, count: int) -> None:
        """Announce to the operating system, if it supports that, that `count` rows from `row` on will be read soon."""
        if not hasattr(os, "posix_fadvise"):
            return
        for row_type, begin in self.arrays.values():
            start = begin + (row - self.first) * row_type.itemsize
            stop = start + count * row_type.itemsize
            for offset in range(start, stop, ANNOUNCED):
                with suppress(OSError):
                    os.posix_fadvise(self.descriptor, offset, min(ANNOUNCED, stop - offset), os.POSIX_FADV_WILLNEED)


class CacheFiles:
    """The open files (cache or shards) with the HDF5 data sets `names`. They close with this object.

    Each row is compared with its checksum when it is read for the first time.
    """

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self.path, self.names = path, names
        with open_cache(path) as file:
            data = file[names[0]]
            self._checksums = {name: stored_checksums(file, name) for name in names}
            self._unread = {name: np.ones(len(data), dtype=bool) for name in names}
            self.total = len(data)
            self.row = data.shape[1:]
            sources = data.virtual_sources() if data.is_virtual else ()
            shards = [
                (int(source.vspace.get_select_bounds()[0][0]), path.parent / source.file_name) for source in sources
            ]
        self._files = [self._open(part, first) for first, part in sorted(shards) or [(0, path)]]
        self._firsts = np.array([file.first for file in self._files])

    def _open(self, path: Path, first: int) -> CacheFile:
        with open_cache(path, joined=False) as file:
            arrays = {
                name: (np.dtype((file[name].dtype, file[name].shape[1:])), file[name].id.get_offset())
                for name in self.names
            }
        descriptor = os.open(path, os.O_RDONLY)
        finalize(self, os.close, descriptor)
        return CacheFile(path, descriptor, first, arrays)

    def read(self, name: str, file: CacheFile, row: int, count: int) -> NDArray[Any]:
        """Return `count` rows of the HDF5 data set `name` from one of these files, as `CacheFile.read` does.

        Raises `DuplexError` for a row that does not match its checksum.
        """
        values = file.read(name, row, count)
        rows = np.arange(row, row + count)
        new = self._unread[name][rows]
        if new.any():
            try:
                refuse_wrong(name, rows[new], row_checksums(values[new]) != self._checksums[name][rows[new]])
            except InvalidHDF5 as error:
                raise DuplexError(f"{self.path} is damaged: {error}; {repair_hint(self.path)}") from error
            self._unread[name][rows] = False
        return values

    def runs(self, wanted: Ints) -> Iterator[tuple[CacheFile, int, Ints]]:
        """Group the cache rows `wanted` into runs of consecutive rows within one file, in the order of the files.

        Yields (file, first row of the run, positions in `wanted` of the run's rows).
        """
        order = np.argsort(wanted, kind="stable")
        rows = wanted[order]
        homes = np.searchsorted(self._firsts, rows, side="right") - 1
        begins = np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (np.diff(homes, prepend=-1) != 0))
        for begin, positions in zip(begins, np.split(order, begins)[1:], strict=True):
            yield self._files[homes[begin]], int(rows[begin]), positions


@dataclass(frozen=True, eq=False)
class DiskTokens:
    """Tokens of n rows of a cache, left on the disk. Indexed like a tensor [n, T, w], by a slice or by positions."""

    files: CacheFiles
    rows: Ints  # rows of the cache that this object stands for
    device: torch.device = CPU  # receives the rows that are read

    @classmethod
    def open(cls, path: Path, name: str = "patch") -> DiskTokens:
        """Return the tokens `name` of all rows of a cache that has such tokens."""
        with open_cache(path) as file:
            files = CacheFiles(path, stored_names(file, name))
        return cls(files, np.arange(files.total))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.files.row)

    def at(self, places: Ints) -> DiskTokens:
        """Return the tokens at the positions `places` as `DiskTokens`, without reading them."""
        return replace(self, rows=self.rows[places])

    def to(self, device: torch.device) -> DiskTokens:
        return replace(self, device=device)

    def read_ahead(self, places: Tensor) -> None:
        """Announce to the operating system that the tokens at the positions `places` will be read soon."""
        for file, first, targets in self.files.runs(self.rows[places.cpu().numpy()]):
            file.read_ahead(first, len(targets))

    def __getitem__(self, key: Tensor | slice) -> Tensor:
        rows = self.rows[key if isinstance(key, slice) else key.cpu().numpy()]
        pinned = self.device.type == "cuda"  # so that the host need not wait for the copy
        out = torch.empty(len(rows), *self.files.row, dtype=torch.float16, pin_memory=pinned)
        for file, first, targets in self.files.runs(rows):
            read = partial(self.files.read, file=file, row=first, count=len(targets))
            out.numpy()[targets] = read_stored(self.files.names, read)
        return out.to(self.device, non_blocking=pinned)

    def shuffled_rows(self, generator: torch.Generator) -> Tensor:
        """Return all row numbers [n] in a random order that a disk reads fast.

        Blocks of neighbouring rows are drawn at random, and rows are mixed within every `WINDOW` blocks. The order
        depends on `generator` alone.
        """
        size = max(1, BLOCK // (int(np.prod(self.files.row)) * 2))
        blocks = torch.arange(len(self)).split(size)
        drawn = torch.randperm(len(blocks), generator=generator).tolist()
        mixed = []
        for start in range(0, len(drawn), WINDOW):
            rows = torch.cat([blocks[number] for number in drawn[start : start + WINDOW]])
            mixed.append(rows[torch.randperm(len(rows), generator=generator)])
        return torch.cat(mixed)


LARGEST_CODE = 127
ROWS = 4096  # dequantised at once


def quantize(y: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise tokens to 8 bits: return codes q (int8, of the shape of `y`) and scales s (float16).

    y: [B, T, w] or [B, C, H, W] float16; s: [B, T] or [B, H, W].
    """
    axis = 1 if y.ndim == 4 else 2
    wide = y.float()
    s = (wide.abs().amax(axis, keepdim=True) / LARGEST_CODE).half()
    q = (wide / s.float()).nan_to_num(0, 0, 0).round().clamp(-LARGEST_CODE, LARGEST_CODE)  # 0 / 0: a token of zeros
    return q.to(torch.int8), s.squeeze(axis)


def dequantize(q: NDArray[np.int8], s: Half) -> Half:
    """Return tokens in float16 from codes q and scales s, in the shapes of `quantize`: their product s q."""
    axis = 1 if q.ndim == 4 else 2
    y = np.empty(q.shape, np.float16)
    for start in range(0, len(q), ROWS):
        rows = slice(start, start + ROWS)
        y[rows] = q[rows] * np.expand_dims(s[rows], axis).astype(np.float32)
    return y
