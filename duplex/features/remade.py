"""Tokens of pictures of which a cache keeps none: encoded again whenever somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from duplex.errors import DuplexError
from duplex.features.decoding import Pictures, decoded_blocks, row_blocks
from duplex.features.encoding import STEP, Kept, encoded_blocks, filled, memory_shortage
from duplex.features.layout import CODES, FIRST_BAD, STEPS, reason
from duplex.features.tokens import whole
from duplex.labels import Ints

if TYPE_CHECKING:
    from duplex.encoders import Encoder


class Source:
    """Pictures and the encoder that made their cache, which is loaded when it is first needed."""

    def __init__(
        self, images: Sequence[str], root: Path, kept: Kept, batch_size: int, encoder: Callable[[], Encoder]
    ) -> None:
        self.images, self.root, self.kept, self.batch_size = images, root, kept, batch_size
        self._encoder = encoder

    @cached_property
    def encoder(self) -> Encoder:
        return self._encoder()

    def tokens(self, rows: Ints) -> Tensor:
        """[n, ...] float16, as the cache would hold them."""
        images = [self.images[row] for row in rows]
        pictures = Pictures(images, self.root, self.encoder.image_transform)
        blocks = row_blocks(len(images), self.batch_size)
        stream = filled(decoded_blocks(pictures, blocks, 0, pinned=False), STEP)
        found = []
        with memory_shortage(self.batch_size):
            for (start, stop), (_, marks, values) in zip(
                blocks, encoded_blocks(self.encoder, stream, self.kept), strict=True
            ):
                for place in np.flatnonzero(marks[: stop - start] >= FIRST_BAD).tolist():
                    raise DuplexError(
                        f"{self.root / images[start + place]} was encoded once and cannot be read now "
                        f"({reason(marks[place])}); bring it back, or extract again"
                    )
                names = (CODES, STEPS) if CODES in values else ("deep",)
                found.append(torch.from_numpy(whole(names, values.__getitem__)[: stop - start]))
        return torch.cat(found)


@dataclass(frozen=True, eq=False)
class Remade:
    """Indexed as a tensor [n, T, w] is, by a slice or by rows."""

    source: Source
    rows: Ints  # of the data set, that this stands for
    row: tuple[int, ...]  # the shape of one picture's
    device: torch.device | str = "cpu"

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.row)

    def at(self, places: Ints) -> Remade:
        """Those of its rows alone."""
        return replace(self, rows=self.rows[places])

    def to(self, device: torch.device) -> Remade:
        return replace(self, device=device)

    def __getitem__(self, key: Tensor | slice) -> Tensor:
        wanted = self.rows[key if isinstance(key, slice) else key.cpu().numpy()]
        if not len(wanted):
            return torch.empty(0, *self.row, dtype=torch.float16, device=self.device)
        return self.source.tokens(wanted).to(self.device)
