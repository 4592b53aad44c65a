"""Read the inputs of the next optimiser steps from disk while the current step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from duplex.methods.base import Batch

STEPS = 2  # steps whose rows are read ahead


def prefetch(images: Batch, steps: Iterable[Tensor]) -> Iterator[tuple[Batch, Tensor]]:
    """Yield, for each optimiser step, a batch and the rows of it that the step uses.

    `steps` yields the rows [b] of `images` per step. With all inputs in memory the batch is `images`; with inputs on
    disk it holds the step's rows only.
    """
    on_disk: list[Any] = [values for values in images.inputs.values() if not isinstance(values, Tensor)]
    if not on_disk:
        for rows in steps:
            yield images, rows
        return
    waiting: deque[Tensor] = deque()
    for rows in steps:
        for values in on_disk:
            values.expect(rows)
        waiting.append(rows)
        if len(waiting) > STEPS:
            yield _read(images, waiting.popleft())
    while waiting:
        yield _read(images, waiting.popleft())


def _read(images: Batch, rows: Tensor) -> tuple[Batch, Tensor]:
    batch = images[rows]
    return batch, torch.arange(len(batch))
