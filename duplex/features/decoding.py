"""Files to blocks of pixels in worker processes, in order, a bounded number ahead of the encoder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from duplex.errors import DuplexError
from duplex.features.pictures import BadPicture, read_picture
from duplex.features.store import ENCODED, mark_of

Block = tuple[int, int]  # rows [start, stop)
Decoded = tuple[int, Tensor, Tensor]  # start, pixels [B, 3, R, R] uint8, marks [B] uint8
AHEAD = 2  # blocks a worker may be ahead


class Blocks(Dataset[Decoded]):
    """Blocks of rows, each decoded whole. A picture that cannot be had leaves a black one in its row and says why in
    its mark, so that the encoder always sees the same block."""

    def __init__(
        self, images: Sequence[str], root: Path, transform: Callable[[Image.Image], Tensor], blocks: Sequence[Block]
    ) -> None:
        self.images = images
        self.root = root
        self.transform = transform
        self.blocks = blocks
        self.shape = transform(Image.new("RGB", (8, 8))).shape

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Decoded:
        start, stop = self.blocks[index]
        pixels = torch.zeros((stop - start, *self.shape), dtype=torch.uint8)
        marks = torch.full((stop - start,), ENCODED, dtype=torch.uint8)
        for row in range(start, stop):
            try:
                pixels[row - start] = self._pixels(row)
            except BadPicture as bad:
                marks[row - start] = mark_of(bad.reason)
        return start, pixels, marks

    def _pixels(self, row: int) -> Tensor:
        picture = read_picture(self.root / self.images[row])
        try:
            return self.transform(picture)
        except (ValueError, ZeroDivisionError, MemoryError):
            raise BadPicture("cannot be resized") from None


def decoded_blocks(blocks: Blocks, num_workers: int, *, pinned: bool) -> Iterator[Decoded]:
    """Decode ahead of the encoder. Without a GPU the workers give way to the encoder, which shares their cores: they
    run when it waits."""
    loader: DataLoader[Decoded] = DataLoader(
        blocks,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=AHEAD if num_workers else None,
        pin_memory=pinned,
        worker_init_fn=_quiet_worker if pinned else _yielding_worker,
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DuplexError(
            "a decoding worker died, most likely out of memory; finished rows are kept: run the same command again, "
            "with a smaller --num-workers or --batch-size"
        ) from None


def _quiet_worker(_: int) -> None:
    """Ctrl-C reaches the whole process group; the parent alone decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _yielding_worker(index: int) -> None:
    _quiet_worker(index)
    os.nice(10)
