"""Tokens of pictures of which a cache keeps none: encoded again whenever somebody asks for them. Its features, which it
keeps of all, say whether they are still the same pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.errors import DuplexError
from duplex.features.decoding import Pictures, RowRange, decoding_workers, row_blocks
from duplex.features.encoding import STEP, Kept, encoded_blocks, filled, memory_shortage
from duplex.features.inspection import AGREE, cosine
from duplex.features.layout import CODES, FIRST_BAD, STEPS, Half, Marks, reason
from duplex.features.tokens import whole
from duplex.labels import Ints

if TYPE_CHECKING:
    from duplex.encoders import Encoder


class Source:
    """Pictures, their features in the cache, and the encoder that made it, which is loaded when it is first needed."""

    def __init__(
        self,
        images: Sequence[str],
        root: Path,
        cls: NDArray[np.float32],
        kept: Kept,
        batch_size: int,
        encoder: Callable[[], Encoder],
    ) -> None:
        self.images, self.root, self.cls, self.kept, self.batch_size = images, root, cls, kept, batch_size
        self._encoder = encoder

    @cached_property
    def encoder(self) -> Encoder:
        return self._encoder()

    @cached_property
    def pictures(self) -> Pictures:
        return Pictures(self.images, self.root, self.encoder.image_transform)

    def tokens(self, rows: Ints) -> Tensor:
        """[n, ...] float16, as the cache would hold them."""
        blocks = row_blocks(len(rows), self.batch_size)
        stream = filled(self._decoded(rows, blocks), STEP)
        found = []
        with memory_shortage(self.batch_size, "set extraction.batch_size in params.yaml to less"):
            for (start, stop), (_, marks, values) in zip(
                blocks, encoded_blocks(self.encoder, stream, self.kept), strict=True
            ):
                own = {name: value[: stop - start] for name, value in values.items()}
                self._refuse_others(rows[start:stop], marks[: stop - start], own["cls"])
                names = (CODES, STEPS) if CODES in own else ("deep",)
                found.append(torch.from_numpy(whole(names, own.__getitem__)))
        return torch.cat(found)

    def _decoded(self, rows: Ints, blocks: Sequence[RowRange]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Threads read ahead of the encoder: a process would take longer to start than so few pictures to decode."""
        with ThreadPoolExecutor(max(1, decoding_workers("auto"))) as pool:
            read = pool.map(self.pictures.read, rows.tolist())
            for start, stop in blocks:
                pixels, marks = zip(*islice(read, stop - start), strict=True)
                yield start, torch.stack(pixels), torch.tensor(marks, dtype=torch.uint8)

    def _refuse_others(self, rows: Ints, marks: Marks, cls: Half) -> None:
        """A picture that cannot be read, or is not the one that the cache's features are of, would be evaluated as
        another."""
        for row, mark, again in zip(rows.tolist(), marks.tolist(), cls.astype(np.float32), strict=True):
            if mark >= FIRST_BAD:
                why = f"cannot be read now ({reason(mark)})"
            elif not (near := cosine(self.cls[row], again)) >= AGREE:
                why = f"is another picture now (cosine {near:.4f})"
            else:
                continue
            afresh = "`duplex extract --dataset NAME --fresh`"
            raise DuplexError(f"{self.root / self.images[row]} was encoded once and {why}; bring it back, or {afresh}")


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
