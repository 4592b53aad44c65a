"""Tokens of a cache that holds them (patch tokens, or what enters the tower's last blocks): in memory where they fit,
else read from the disk as they are asked for.

MIT-States at ViT-L/14 is 53,753 x 256 x 1,024 x 2 B = 28 GB. `Streamed` stands for such rows in a method's inputs: it
has a shape and a length, and gives tensors for the rows it is asked for. Training asks for shuffled blocks (`shuffled`)
and says ahead which come next (`duplex.training.prefetch`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.errors import UsageError
from duplex.features.cache_files import Pieces
from duplex.features.eight_bits import restored
from duplex.features.layout import CODES, STEPS, Bools, Half, kept_places, open_file, read_held
from duplex.labels import Ints

IN_MEMORY = 2**31  # bytes of tokens up to which they are held; more are streamed, on any machine
BLOCK = 2**22  # bytes of a block of neighbouring rows; `training.memory` is no less
WINDOW = 64  # blocks whose rows are mixed
CPU = torch.device("cpu")


def read_tokens(path: Path, name: str = "patch", limit: int = IN_MEMORY) -> Half | Streamed | Some | None:
    """[N, ...] float16, zero where the picture is bad, in memory up to `limit` bytes; None where there are none."""
    with open_file(path) as file:
        names, held = stored_as(file, name), read_held(file) if name == "deep" else None
        if not names:
            return None
        few = file[names[0]].size * 2 <= limit
        values = whole(names, lambda part: file[part][...]) if few else None
    found = Streamed.open(path, name) if values is None else values
    return found if held is None else Some(found, held, Missing(path))


def stored_as(file: Any, name: str) -> tuple[str, ...]:
    """The data sets of a cache that hold its tokens of that name: one in float16, two in eight bits, or none."""
    if name in file:
        return (name,)
    return (CODES, STEPS) if name == "deep" and CODES in file else ()


def whole(names: tuple[str, ...], read: Callable[[str], NDArray[Any]]) -> Half:
    """Rows in float16 from what `read` gives of each of those data sets."""
    first, *steps = map(read, names)
    return restored(first, *steps) if steps else np.asarray(first, dtype=np.float16)


@dataclass(frozen=True, eq=False)
class Streamed:
    """Rows of a cache's tokens, on the disk. Indexed as a tensor [n, T, w] is, by a slice or by rows."""

    pieces: Pieces
    rows: Ints  # of the cache, that this stands for
    device: torch.device = CPU  # what is read goes there

    @classmethod
    def open(cls, path: Path, name: str = "patch") -> Streamed:
        """All rows of a cache that has such tokens."""
        with open_file(path) as file:
            pieces = Pieces(path, stored_as(file, name))
        return cls(pieces, np.arange(pieces.total))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.pieces.row)

    def at(self, places: Ints) -> Streamed:
        """Those of its rows alone."""
        return replace(self, rows=self.rows[places])

    def to(self, device: torch.device) -> Streamed:
        return replace(self, device=device)

    def expect(self, places: Tensor) -> None:
        """These will be asked for soon."""
        for piece, first, found in self.pieces.stretches(self.rows[places.cpu().numpy()]):
            piece.expect(first, len(found))

    def __getitem__(self, key: Tensor | slice) -> Tensor:
        wanted = self.rows[key if isinstance(key, slice) else key.cpu().numpy()]
        pinned = self.device.type == "cuda"  # so that the host need not wait for the copy
        out = torch.empty(len(wanted), *self.pieces.row, dtype=torch.float16, pin_memory=pinned)
        for piece, first, places in self.pieces.stretches(wanted):
            out.numpy()[places] = whole(self.pieces.names, partial(piece.read, row=first, count=len(places)))
        return out.to(self.device, non_blocking=pinned)

    def shuffled(self, order: torch.Generator) -> Tensor:
        """All rows once [n]: blocks of neighbours in random order, mixed within a window of some of them. `order` alone
        decides."""
        size = max(1, BLOCK // (int(np.prod(self.pieces.row)) * 2))
        blocks = torch.arange(len(self)).split(size)
        drawn = torch.randperm(len(blocks), generator=order).tolist()
        mixed = []
        for start in range(0, len(drawn), WINDOW):
            rows = torch.cat([blocks[number] for number in drawn[start : start + WINDOW]])
            mixed.append(rows[torch.randperm(len(rows), generator=order)])
        return torch.cat(mixed)


class Missing:
    """Rows of which a cache keeps no tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def at(self, rows: Ints) -> Tensor:
        raise UsageError(
            f"{self.path} keeps nothing of what enters the last blocks of some of these pictures; set deep_test of its "
            "data set's encoder to true in params.yaml and extract again"
        )


@dataclass(frozen=True, eq=False)
class Some:
    """Tokens of some of a cache's rows, and where others' come from."""

    values: Half | Streamed  # [n, ...] of the rows that are held
    held: Bools  # [N]
    others: Any  # gives some rows' tokens by `at`

    @property
    def row(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    def at(self, rows: Ints) -> Tensor | Streamed:
        """Of rows all of which are held, or of rows none of which need be."""
        if not self.held[rows].all():
            found: Tensor | Streamed = self.others.at(rows)
            return found
        places = kept_places(rows, self.held)
        return self.values.at(places) if isinstance(self.values, Streamed) else torch.from_numpy(self.values[places])
