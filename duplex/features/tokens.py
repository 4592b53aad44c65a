"""Tokens of a cache that holds them (patch tokens, or what enters the tower's last blocks): in memory where they fit,
else read from the disk as they are asked for.

MIT-States at ViT-L/14 is 53,753 x 256 x 1,024 x 2 B = 28 GB. `Streamed` stands for such rows in a method's inputs: it
has a shape and a length, and gives tensors for the rows it is asked for. Training asks for shuffled blocks (`shuffled`)
and reads ahead (`duplex.ahead`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.features.eight_bits import restored
from duplex.features.layout import CODES, STEPS, Half, open_file
from duplex.labels import Ints

IN_MEMORY = 2**31  # bytes of tokens up to which they are held; more are streamed, on any machine
BLOCK = 2**22  # bytes of a block of neighbouring rows; `training.memory` is no less
WINDOW = 64  # blocks whose rows are mixed


def read_tokens(path: Path, name: str = "patch", limit: int = IN_MEMORY) -> Half | Streamed | None:
    """[N, ...] float16, zero where the picture is bad, in memory up to `limit` bytes; None where there are none."""
    with open_file(path) as file:
        names = stored_as(file, name)
        if not names:
            return None
        if file[names[0]].size * 2 <= limit:
            return whole(names, lambda part: file[part][...])
    return Streamed(path, name=name)


def stored_as(file: Any, name: str) -> tuple[str, ...]:
    """The data sets of a cache that hold its tokens of that name: one in float16, two in eight bits, or none."""
    if name in file:
        return (name,)
    return (CODES, STEPS) if name == "deep" and CODES in file else ()


def whole(names: tuple[str, ...], read: Callable[[str], NDArray[Any]]) -> Half:
    """Rows in float16 from what `read` gives of each of those data sets."""
    first, *steps = map(read, names)
    return restored(first, *steps) if steps else np.asarray(first, dtype=np.float16)


@dataclass(frozen=True)
class Part:
    """A data set: the shape and type of a row, and where the first lies in the file; None in a view of shards."""

    row: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int | None

    @classmethod
    def of(cls, data: Any) -> Part:
        return cls(tuple(data.shape[1:]), data.dtype, None if data.is_virtual else data.id.get_offset())


class Streamed:
    """Rows of a cache's tokens, on the disk. Indexed as a tensor [n, T, w] is, by a slice or by rows."""

    def __init__(
        self, path: Path, rows: Ints | None = None, device: torch.device | str = "cpu", name: str = "patch"
    ) -> None:
        """`rows` are the cache's rows that this stands for; all of them by default."""
        self._kept = ExitStack()  # what stays open for as long as this lives
        self.path, self.name, self.device = path, name, torch.device(device)
        with open_file(path) as file:
            self._names = stored_as(file, name)
            self._parts = {part: Part.of(file[part]) for part in self._names}
            self._row = self._parts[self._names[0]].row
            self.rows = np.arange(len(file[self._names[0]])) if rows is None else rows
        self._joined: Any = None
        if self._parts[self._names[0]].offset is not None:
            self._descriptor = os.open(path, os.O_RDONLY)
            self._kept.callback(os.close, self._descriptor)

    def __del__(self) -> None:
        self._kept.close()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self._row)

    def at(self, places: Ints) -> Streamed:
        """Those of its rows alone."""
        return Streamed(self.path, self.rows[places], self.device, self.name)

    def to(self, device: torch.device) -> Streamed:
        """What is read goes to this device."""
        return Streamed(self.path, self.rows, device, self.name)

    def __getitem__(self, key: Tensor | slice) -> Tensor:
        wanted = self.rows[key if isinstance(key, slice) else key.cpu().numpy()]
        return torch.from_numpy(self._read(wanted)).to(self.device)

    def _read(self, wanted: Ints) -> Half:
        """In the order of the file, neighbours together: [n, T, w]."""
        out = np.empty((len(wanted), *self._row), dtype=np.float16)
        order = np.argsort(wanted, kind="stable")
        runs = np.split(order, np.flatnonzero(np.diff(wanted[order]) != 1) + 1) if len(order) else []
        for run in runs:
            first, count = int(wanted[run[0]]), len(run)
            out[run] = whole(self._names, partial(self._run, first, count))
        return out

    def _run(self, first: int, count: int, name: str) -> NDArray[Any]:
        part = self._parts[name]
        if part.offset is None:  # a view of shards
            if self._joined is None:
                self._joined = self._kept.enter_context(open_file(self.path))
            found: NDArray[Any] = self._joined[name][first : first + count]
            return found
        block = np.empty((count, *part.row), dtype=part.dtype)
        view, place = block.view(np.uint8).ravel().data, part.offset + first * block[:1].nbytes
        while view:
            got = os.preadv(self._descriptor, [view], place)
            if not got:
                raise OSError(f"{self.path} ends within its tokens")
            view, place = view[got:], place + got
        return block

    def shuffled(self, order: torch.Generator) -> Tensor:
        """All rows once [n]: blocks of neighbours in random order, mixed within a window of some of them. `order` alone
        decides."""
        size = max(1, BLOCK // (int(np.prod(self._row)) * 2))
        blocks = torch.arange(len(self)).split(size)
        drawn = torch.randperm(len(blocks), generator=order).tolist()
        mixed = []
        for start in range(0, len(drawn), WINDOW):
            rows = torch.cat([blocks[number] for number in drawn[start : start + WINDOW]])
            mixed.append(rows[torch.randperm(len(rows), generator=order)])
        return torch.cat(mixed)
