"""Choose the number of CPU threads for `training.threads: auto`, by timing a few steps with one thread and with all.

Steps on a small encoder's features are so short that threads spend more time waiting for each other than working,
above all while other programs run.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from duplex.methods.base import Batch, Method

ROUNDS = 5  # timed steps per number of threads, taken in turn; their median counts
FAR_SLOWER = 4.0  # a number of threads that needs this many times the fastest's time is not tried again
PRODUCTS = 20  # threads meet after each; one wait alone may happen to be short
MARGIN = 0.9  # all threads are taken where they need at most this share of one thread's time


def choose_threads(method: Method[Any], images: Batch, batch_size: int) -> tuple[int, dict[int, float]]:
    """Return the number of CPU threads for a method's training, and the measured seconds of each number that was tried.

    Small matrix products are timed first: beside a busy core a single step of all threads can take forty times as long
    as one of a single thread, and products show that in a tenth of a second. If all threads are not far slower,
    training steps of a copy of the method are timed. torch's random generator is set back, so that training is not
    affected. A method that cannot be copied gets all threads.
    """
    every = torch.get_num_threads()
    if every == 1 or images.compositions.device.type != "cpu":
        return every, {}
    try:
        trial = copy.deepcopy(method, {id(method.context): method.context}).train()
    except (TypeError, RuntimeError):  # it holds an open file, a lock or a tensor with a gradient
        return every, {}
    random = torch.get_rng_state()
    factors = torch.ones(2, 256, 256)
    rows = torch.arange(min(batch_size, len(images)))

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(*factors)

    def step() -> None:
        torch.stack(list(trial.losses(images[rows], trial.shared()).values())).sum().backward()

    try:
        seconds = time_threads(products, (1, every))
        if seconds[every] <= FAR_SLOWER * seconds[1]:
            seconds = time_threads(step, (1, every))
    finally:
        torch.set_num_threads(every)
        torch.set_rng_state(random)
    return fastest_count(seconds), seconds


def time_threads(step: Callable[[], None], counts: tuple[int, ...], rounds: int = ROUNDS) -> dict[int, float]:
    """Return the median seconds of a step, such as a training step, for each number of threads in `counts`.

    The numbers take turns, so that the load of other programs affects all of them equally. A number whose fastest step
    takes more than `FAR_SLOWER` times the fastest of all is left out of further rounds.
    """
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


def fastest_count(seconds: dict[int, float]) -> int:
    """Return the smallest number of threads whose step time no larger number undercuts by 10 % or more.

    seconds: time of a step, by number of threads.

    >>> fastest_count({1: 1.0, 8: 0.95}), fastest_count({1: 1.0, 8: 0.5})
    (1, 8)
    """
    best = min(seconds)
    for count in sorted(seconds):
        if seconds[count] <= MARGIN * seconds[best]:
            best = count
    return best
