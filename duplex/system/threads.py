"""Number of CPU threads that torch uses. Sums are split among threads, so their number affects the last bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Threads = int | Literal["auto"]


@contextmanager
def threads(wanted: Threads) -> Iterator[None]:
    """Let torch use `wanted` CPU threads in the `with` block; "auto" keeps torch's own number, one per core."""
    before = torch.get_num_threads()
    if wanted != "auto":
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
