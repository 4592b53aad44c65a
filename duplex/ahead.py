"""Reading ahead: while a step computes, the rows of the next ones come from the disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from duplex.methods.base import Batch

STEPS = 2  # that are read before they are asked for


def ahead(images: Batch, steps: Iterable[Tensor]) -> Iterator[tuple[Batch, Tensor]]:
    """Of every optimiser step the images and which of them are its own. Inputs in memory are handed over as they are;
    where one is on the disk, a step's images are a batch of their own that a thread has read."""
    if all(isinstance(values, Tensor) for values in images.inputs.values()):
        for chosen in steps:
            yield images, chosen
        return
    with ThreadPoolExecutor(1) as reader:
        waiting: deque[Future[Batch]] = deque()
        try:
            for chosen in steps:
                waiting.append(reader.submit(images.__getitem__, chosen))
                if len(waiting) > STEPS:
                    yield _whole(waiting.popleft())
            while waiting:
                yield _whole(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()


def _whole(future: Future[Batch]) -> tuple[Batch, Tensor]:
    batch = future.result()
    return batch, torch.arange(len(batch))
