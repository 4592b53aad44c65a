"""Decode image files to batches of pixels in worker processes, in order, at most a few batches ahead of the encoder."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from duplex.data.image_errors import MachineFault, machine_fault
from duplex.data.image_files import BadImageFile, read_image
from duplex.errors import DuplexError
from duplex.features.layout import ENCODED, status_of_reason

RowRange = tuple[int, int]  # rows [start, stop)
RETRY = 255  # status of an image to be read again; never written
AHEAD = 2  # batches that a worker may be ahead
OPEN_FILES = 64  # that the process needs at most,
OPEN_FILES_PER_WORKER = 8  # and for each worker


@dataclass(eq=False)
class ImageRows(Dataset[tuple[Tensor, int]]):
    """Torch data set that decodes image files: item i is the i-th image as pixels [3, R, R] uint8, and its status.

    An image that cannot be read becomes black, with the reason as its status, so that batches keep their size. The
    status `RETRY` marks an image that could not be read because of the machine, such as too little memory.
    """

    images: Sequence[str]
    root: Path
    transform: Callable[[Image.Image], Tensor]

    def __post_init__(self) -> None:
        self.black = torch.zeros_like(self.transform(Image.new("RGB", (8, 8))))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        try:
            return self.read(row)
        except MachineFault:  # raised by `decode_batches`: an exception from a worker process changes its type
            return self.black, RETRY

    def read(self, row: int) -> tuple[Tensor, int]:
        """An image's pixels and status (read, or why not); raises `MachineFault` if memory or disk fails."""
        try:
            return self._pixels(row), ENCODED
        except BadImageFile as bad:
            return self.black, status_of_reason(bad.reason)

    def _pixels(self, row: int) -> Tensor:
        path = self.root / self.images[row]
        image = read_image(path)
        try:
            return self.transform(image)
        except (ValueError, ZeroDivisionError, MemoryError) as error:
            raise machine_fault(path, error) or BadImageFile("cannot be resized") from error


def decoding_workers(wanted: int | Literal["auto"]) -> int:
    """Number of processes that decode images; "auto": one per available core, less one for the encoder."""
    if wanted != "auto":
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, cores - 1)


def split_rows(rows: int, size: int) -> list[RowRange]:
    """Split `rows` rows into ranges of `size`, the last of which may be shorter."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def decode_batches(
    images: ImageRows, ranges: Sequence[RowRange], num_workers: int, *, pinned: bool
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Decode each range of images ahead in worker processes; yield (first row, pixels [B, 3, R, R], statuses [B]).

    Args:
        images: the images.
        ranges: the rows of each batch.
        num_workers: number of worker processes; 0: decode in this process.
        pinned: put pixels into pinned memory, for a GPU. Without a GPU, the workers run at a lower priority than the
            encoder, which uses the same cores: one preempted thread of a matrix product delays all of them. At the
            lowest priority, other users' jobs would starve the workers.
    """
    if num_workers:
        allow_open_files(OPEN_FILES + OPEN_FILES_PER_WORKER * num_workers)
    loader: DataLoader[tuple[Tensor, int]] = DataLoader(
        images,
        batch_sampler=[list(range(*rows)) for rows in ranges],
        num_workers=num_workers,
        prefetch_factor=AHEAD if num_workers else None,
        pin_memory=pinned,
        worker_init_fn=partial(_start_worker, 0 if pinned else 10),
    )
    for (start, _), (pixels, statuses) in zip(ranges, loader, strict=True):
        for position in (statuses == RETRY).nonzero().flatten().tolist():  # in this process: a lasting fault is raised
            pixels[position], statuses[position] = images.read(start + position)
        yield start, pixels, statuses.to(torch.uint8)


def allow_open_files(count: int) -> None:
    """Let this process open `count` files at once, without which decoding processes would fail or hang."""
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= count:
        return
    if highest != resource.RLIM_INFINITY and highest < count:
        raise DuplexError(
            f"a process may open {highest} files here, and decoding images in other processes needs {count}; raise the "
            f"limit with `ulimit -n {count}`, or decode in fewer processes (extraction.num_workers, --num-workers)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, highest))


@contextmanager
def report_worker_deaths(kept: str = "finished rows are kept: ") -> Iterator[None]:
    """Raise `DuplexError` if a process that decodes images dies during the `with` block.

    The block must hold all code that uses the batches: torch reports a death from a signal handler, wherever the main
    process is at that moment. `kept` says in the message which finished work is not lost.
    """
    try:
        yield
    except RuntimeError as error:
        if not re.search(r"DataLoader worker .*(killed by signal|exited unexpectedly)", str(error)):
            raise
        raise DuplexError(
            f"a decoding worker died, most likely out of memory; {kept}run the same command again, "
            "with a smaller --num-workers or --batch-size"
        ) from error


def _start_worker(niceness: int, _: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    os.nice(niceness)
