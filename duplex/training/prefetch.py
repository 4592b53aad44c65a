"""Reading ahead: while a step computes, the rows of the next ones come from the disk to the system's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from duplex.methods.base import Batch

STEPS = 2  # whose rows are on their way while one computes


def ahead(images: Batch, steps: Iterable[Tensor]) -> Iterator[tuple[Batch, Tensor]]:
    """Of every optimiser step the images and which of them are its own. Inputs in memory are handed over as they are;
    where one is on the disk, a step's images are a batch of their own."""
    streamed: list[Any] = [values for values in images.inputs.values() if not isinstance(values, Tensor)]
    if not streamed:
        for chosen in steps:
            yield images, chosen
        return
    waiting: deque[Tensor] = deque()
    for chosen in steps:
        for values in streamed:
            values.expect(chosen)
        waiting.append(chosen)
        if len(waiting) > STEPS:
            yield _read(images, waiting.popleft())
    while waiting:
        yield _read(images, waiting.popleft())


def _read(images: Batch, chosen: Tensor) -> tuple[Batch, Tensor]:
    batch = images[chosen]
    return batch, torch.arange(len(batch))
