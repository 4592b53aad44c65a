"""How many threads of the CPU some work takes. Sums are split among them, so their number decides the last bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Threads = int | Literal["auto"]


@contextmanager
def threads(wanted: Threads) -> Iterator[None]:
    """The block works with so many threads; `auto` leaves torch's own number, which is that of the cores."""
    before = torch.get_num_threads()
    if wanted != "auto":
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
