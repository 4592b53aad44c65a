"""Files to blocks of pixels in worker processes, in order, a bounded number ahead of the encoder."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from duplex.data.image_errors import MachineFault, machine_fault
from duplex.errors import DuplexError
from duplex.features.augmentation import Augmentation
from duplex.features.image_files import BadPicture, read_picture
from duplex.features.layout import ENCODED, mark_of

RowRange = tuple[int, int]  # rows [start, stop)
AGAIN = 255  # the mark of a picture to be read once more; never written
AHEAD = 2  # blocks a worker may be ahead
KEPT = "finished rows are kept: "  # of an extraction


class Pictures(Dataset[tuple[Tensor, int]]):
    """Row -> pixels [3, R, R] uint8 and the row's mark. A picture that cannot be had is a black one and its mark says
    why, so that the encoder always sees the same block. `AGAIN` marks one that the machine failed to give.

    With an `augmentation` each picture stands there once for each of its views; `first` is the place of the first row
    among all of them.
    """

    def __init__(
        self,
        images: Sequence[str],
        root: Path,
        transform: Callable[[Image.Image], Tensor],
        augmentation: Augmentation | None = None,
        first: int = 0,
    ) -> None:
        self.images = images
        self.root = root
        self.transform = transform
        self.augmentation = augmentation
        self.first = first
        self._last: tuple[str, Image.Image] | None = None  # its views follow one another; threads may ask for others
        self.black = torch.zeros_like(transform(Image.new("RGB", (8, 8))))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        try:
            return self.read(row)
        except MachineFault:  # told by the reader of the blocks: what a worker raises loses its form on the way
            return self.black, AGAIN

    def read(self, row: int) -> tuple[Tensor, int]:
        """The same; raises `MachineFault`."""
        try:
            return self._pixels(row), ENCODED
        except BadPicture as bad:
            return self.black, mark_of(bad.reason)

    def _pixels(self, row: int) -> Tensor:
        path = self.root / self.images[row]
        picture = self._once(self.images[row], path)
        try:
            return self.transform(self._shown(row, picture))
        except (ValueError, ZeroDivisionError, MemoryError) as error:
            raise machine_fault(path, error) or BadPicture("cannot be resized") from error

    def _once(self, name: str, path: Path) -> Image.Image:
        last = self._last
        if last is None or last[0] != name:
            last = self._last = name, read_picture(path)
        return last[1]

    def _shown(self, row: int, picture: Image.Image) -> Image.Image:
        if self.augmentation is None:
            return picture
        height, width = self.black.shape[-2:]
        view = (self.first + row) % self.augmentation.count
        return self.augmentation.show(picture, self.images[row], view, (height, width))


def decoding_workers(wish: int | Literal["auto"]) -> int:
    """`auto` is one process for each core that this one may use, less the one that encodes."""
    if wish != "auto":
        return wish
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, cores - 1)


def row_blocks(rows: int, size: int) -> list[RowRange]:
    """All rows, so many at a time."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def decoded_blocks(
    pictures: Pictures, blocks: Sequence[RowRange], num_workers: int, *, pinned: bool
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """First row, pixels [B, 3, R, R] and marks [B] of each block, decoded ahead of the encoder.

    Workers stack a block straight into shared memory; one that is stacked first and shared then stays with its worker
    for some sixty more. Without a GPU the workers give way to the encoder, which shares their cores: one preempted
    thread of a matrix product holds up all of them, so the workers run when it waits. At the lowest
    priority other people's jobs would starve them.
    """
    loader: DataLoader[tuple[Tensor, int]] = DataLoader(
        pictures,
        batch_sampler=[list(range(*block)) for block in blocks],
        num_workers=num_workers,
        prefetch_factor=AHEAD if num_workers else None,
        pin_memory=pinned,
        worker_init_fn=_quiet_worker if pinned else _yielding_worker,
    )
    for (start, _), (pixels, marks) in zip(blocks, loader, strict=True):
        for place in (marks == AGAIN).nonzero().flatten().tolist():  # once more, here; a fault that stays is raised
            pixels[place], marks[place] = pictures.read(start + place)
        yield start, pixels, marks.to(torch.uint8)


@contextmanager
def worker_deaths(kept: str = KEPT) -> Iterator[None]:
    """Around whatever consumes the blocks: torch tells of a dead worker from a signal handler, wherever we are then."""
    try:
        yield
    except RuntimeError as error:
        if not re.search(r"DataLoader worker .*(killed by signal|exited unexpectedly)", str(error)):
            raise
        raise DuplexError(
            f"a decoding worker died, most likely out of memory; {kept}run the same command again, "
            "with a smaller --num-workers or --batch-size"
        ) from error


def _quiet_worker(_: int) -> None:
    """Ctrl-C reaches the whole process group; the parent alone decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _yielding_worker(index: int) -> None:
    _quiet_worker(index)
    os.nice(10)
