"""Read the tokens of a feature cache: patch tokens, or block inputs (stored inputs of blocks to fine-tune).

Tokens are in memory if they fit, else read from the disk on demand: MIT-States at ViT-L/14 has 53,753 x 256 x 1,024 x
2 B = 28 GB. A method then gets `DiskTokens` in place of a tensor, and training reads images in shuffled groups and
announces the next ones to the operating system (`duplex.training.loop`).
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
    """Return the tokens `name` ("patch" or "block_inputs") of all images of a feature cache; None if it has none.

    They are [N, ...] float16, zero for images that could not be read. Up to `limit` bytes are read into memory; more
    stay on the disk, as `DiskTokens`.
    """
    with open_cache(path) as file:
        names = stored_names(file, name)
        if not names:
            return None
        if file[names[0]].size * 2 <= limit:
            return read_stored(names, partial(read_rows, file))
    return DiskTokens.open(path, name)


def stored_names(file: Any, name: str) -> tuple[str, ...]:
    """Return the names of the HDF5 data sets with the tokens `name` ("patch" or "block_inputs") of a feature cache.

    Tokens in float16 have one, tokens in 8 bits two (integer codes and scales); the result is empty without tokens.
    """
    if name in file:
        return (name,)
    return (CODES, SCALES) if name == "block_inputs" and CODES in file else ()


def read_stored(names: tuple[str, ...], read: Callable[[str], NDArray[Any]]) -> Half:
    """Return stored tokens in float16, converted from 8-bit codes and scales if they are stored so.

    names: the HDF5 data sets that hold them (`stored_names`).
    read: returns the values of one of these data sets.
    """
    values, *scales = map(read, names)
    return dequantize(values, *scales) if scales else np.asarray(values, dtype=np.float16)


@dataclass(frozen=True)
class CacheFile:
    """One open file of a feature cache (the cache itself, or a shard with some rows), from which tokens are read.

    Rows are read with system calls instead of HDF5, so that the operating system can be told which rows come next.
    Reading ahead in a thread would take a core from the matrix products of training, whose threads wait for each other.
    """

    path: Path
    descriptor: int
    first: int  # row of the cache that the file's first row is
    arrays: dict[str, tuple[np.dtype[Any], int]]  # by data set: type of a whole row, and offset of the first in bytes

    def read(self, name: str, row: int, count: int) -> NDArray[Any]:
        """Return `count` rows of the HDF5 data set `name`, from row `row` of the cache (not of this file) on."""
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
        """Tell the operating system, if it supports that, that `count` rows from row `row` on will be read soon."""
        if not hasattr(os, "posix_fadvise"):
            return
        for row_type, begin in self.arrays.values():
            start = begin + (row - self.first) * row_type.itemsize
            stop = start + count * row_type.itemsize
            for offset in range(start, stop, ANNOUNCED):
                with suppress(OSError):
                    os.posix_fadvise(self.descriptor, offset, min(ANNOUNCED, stop - offset), os.POSIX_FADV_WILLNEED)


class CacheFiles:
    """All open files of one feature cache (the cache itself, or its shards), from which tokens are read.

    Each row is compared with its checksum when it is read for the first time. Files are closed when this object is
    deleted.

    names: the HDF5 data sets of the tokens.
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
        """Return `count` rows of the HDF5 data set `name` from one file of the cache, after comparing their checksums.

        Raises `DuplexError` for a row that does not match.

        row: number of the first row in the cache (not in this file).
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
        """Group the cache rows `wanted` into runs of consecutive rows within one file, so that each run is one read.

        Yields (file, first row of the run, positions in `wanted` of the run's rows), in the order of the files.
        """
        order = np.argsort(wanted, kind="stable")
        rows = wanted[order]
        homes = np.searchsorted(self._firsts, rows, side="right") - 1
        begins = np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (np.diff(homes, prepend=-1) != 0))
        for begin, positions in zip(begins, np.split(order, begins)[1:], strict=True):
            yield self._files[homes[begin]], int(rows[begin]), positions


@dataclass(frozen=True, eq=False)
class DiskTokens:
    """Tokens (patch tokens or block inputs) of n images that stay on the disk until they are indexed.

    Indexing by a slice or a tensor of positions reads them, as if this were a tensor [n, T, w] or [n, C, H, W].
    """

    files: CacheFiles
    rows: Ints  # rows of the cache that this object stands for
    device: torch.device = CPU  # receives the rows that are read

    @classmethod
    def open(cls, path: Path, name: str = "patch") -> DiskTokens:
        """Return the tokens `name` ("patch" or "block_inputs") of all images of a feature cache that stores them."""
        with open_cache(path) as file:
            files = CacheFiles(path, stored_names(file, name))
        return cls(files, np.arange(files.total))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.files.row)

    def at(self, places: Ints) -> DiskTokens:
        """Return the tokens of the images at positions `places` as a new `DiskTokens`, without reading them."""
        return replace(self, rows=self.rows[places])

    def to(self, device: torch.device) -> DiskTokens:
        return replace(self, device=device)

    def read_ahead(self, places: Tensor) -> None:
        """Tell the operating system that the tokens of the images at positions `places` will be read soon."""
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
        """Return the positions 0 to n - 1 of all images in a random order in which a disk reads their tokens fast.

        Blocks of neighbouring images are drawn at random, and images are mixed within every `WINDOW` blocks. The order
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
    """Quantise tokens to 8 bits: return codes q (int8) and one scale s (float16) per token, with y ≈ s q.

    y: tokens [B, T, w] or feature maps [B, C, H, W], in float16. q has the shape of y; s is [B, T] or [B, H, W].
    """
    axis = 1 if y.ndim == 4 else 2
    wide = y.float()
    s = (wide.abs().amax(axis, keepdim=True) / LARGEST_CODE).half()
    q = (wide / s.float()).nan_to_num(0, 0, 0).round().clamp(-LARGEST_CODE, LARGEST_CODE)  # 0 / 0: a token of zeros
    return q.to(torch.int8), s.squeeze(axis)


def dequantize(q: NDArray[np.int8], s: Half) -> Half:
    """Return the tokens s q in float16 from the codes q (int8) and the scales s (float16) that `quantize` returned.

    q: [B, T, w] or [B, C, H, W].
    s: [B, T] or [B, H, W].
    """
    axis = 1 if q.ndim == 4 else 2
    y = np.empty(q.shape, np.float16)
    for start in range(0, len(q), ROWS):
        rows = slice(start, start + ROWS)
        y[rows] = q[rows] * np.expand_dims(s[rows], axis).astype(np.float32)
    return y
