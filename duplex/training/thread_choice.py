"""The number of CPU threads with which a method trains fastest, chosen by timing a few steps."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from duplex.methods.base import Batch, Method

# Steps on small features are so short that threads wait for each other longer than they work.
ROUNDS = 5  # timed steps per number of threads, taken in turn; their median counts
FAR_SLOWER = 4.0  # a number of threads this many times slower than the fastest is not tried again
MARGIN = 0.9  # all threads are taken where they need at most this share of one thread's time


def choose_threads(method: Method[Any], images: Batch, batch_size: int) -> tuple[int, dict[int, float]]:
    """The number of CPU threads of training, by timing a copy; also seconds per step by number."""
    every = torch.get_num_threads()
    if every == 1 or images.compositions.device.type != "cpu":
        return every, {}
    try:
        copied = copy.deepcopy(method, {id(method.context): method.context}).train()
    except (TypeError, RuntimeError):  # it holds an open file, a lock or a tensor with a gradient
        return every, {}
    random = torch.get_rng_state()
    rows = torch.arange(min(batch_size, len(images)))

    def step() -> None:
        losses = copied.losses(images[rows], copied.shared())
        torch.stack(list(losses.values())).sum().backward()

    try:
        seconds = time_threads(step, (1, every))
    finally:
        torch.set_num_threads(every)
        torch.set_rng_state(random)
    return every if seconds[every] <= MARGIN * seconds[1] else 1, seconds


def time_threads(step: Callable[[], None], counts: tuple[int, ...], rounds: int = ROUNDS) -> dict[int, float]:
    """The median seconds of a step for each number of threads in `counts`, timed in turn."""
    taken: dict[int, list[float]] = {count: [] for count in counts}
    torch.set_num_threads(min(counts))
    step()  # the first one allocates
    remaining = list(counts)
    for _ in range(rounds):
        for count in remaining:
            torch.set_num_threads(count)
            start = time.perf_counter()
            step()
            taken[count].append(time.perf_counter() - start)
        fastest = min(min(values) for values in taken.values())
        remaining = [count for count in remaining if min(taken[count]) <= FAR_SLOWER * fastest]
    return {count: statistics.median(values) for count, values in taken.items()}
