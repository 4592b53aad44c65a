"""Tokens of a cache that holds them (patch tokens, or what enters the tower's last blocks): in memory where they fit,
else read from the disk as they are asked for.

MIT-States at ViT-L/14 is 53,753 x 256 x 1,024 x 2 B = 28 GB. `Streamed` stands for such rows in a method's inputs: it
has a shape and a length, and gives tensors for the rows it is asked for. Training asks for shuffled blocks (`shuffled`)
and reads ahead (`duplex.ahead`).
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duplex.features.layout import Half, open_file
from duplex.labels import Ints

IN_MEMORY = 2**31  # bytes of tokens up to which they are held; more are streamed, on any machine
BLOCK = 2**22  # bytes of a block of neighbouring rows; `training.memory` is no less
WINDOW = 64  # blocks whose rows are mixed


def read_tokens(path: Path, name: str = "patch", limit: int = IN_MEMORY) -> Half | Streamed | None:
    """[N, ...] float16, zero where the picture is bad, in memory up to `limit` bytes; None where there are none."""
    with open_file(path) as file:
        if name not in file:
            return None
        if file[name].size * 2 <= limit:
            return np.asarray(file[name][...], dtype=np.float16)
    return Streamed(path, name=name)


class Streamed:
    """Rows of a cache's tokens, on the disk. Indexed as a tensor [n, T, w] is, by a slice or by rows."""

    def __init__(
        self, path: Path, rows: Ints | None = None, device: torch.device | str = "cpu", name: str = "patch"
    ) -> None:
        """`rows` are the cache's rows that this stands for; all of them by default."""
        self._kept = ExitStack()  # what stays open for as long as this lives
        self.path, self.name, self.device = path, name, torch.device(device)
        with open_file(path) as file:
            data = file[name]
            self._row: tuple[int, ...] = tuple(data.shape[1:])
            self._offset: int | None = None if data.is_virtual else data.id.get_offset()
            self.rows = np.arange(len(data)) if rows is None else rows
        self._joined: Any = None
        if self._offset is not None:
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
            out[run] = self._run(first, count)
        return out

    def _run(self, first: int, count: int) -> Half:
        if self._offset is None:  # a view of shards
            if self._joined is None:
                self._joined = self._kept.enter_context(open_file(self.path))
            return np.asarray(self._joined[self.name][first : first + count], dtype=np.float16)
        block = np.empty((count, *self._row), dtype=np.float16)
        view, place = block.view(np.uint8).ravel().data, self._offset + first * block[:1].nbytes
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
        return torch.cat(mixed) if mixed else torch.arange(0)
