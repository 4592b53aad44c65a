"""Encoders with random instead of trained weights, to test an architecture without a download.

The features of such an encoder carry no information about the image's content.

encoder: {name: ViT-B-32, weights: "random:3"}     # the seed is part of the identity; `random` is `random:0`
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from duplex.errors import UsageError

RANDOM = "random"


def random_seed(weights: str | None) -> int | None:
    """The seed of weights written as `random` or `random:SEED`; None for all other weights.

    Raises UsageError if the seed is no whole number.
    """
    if weights is None or weights.partition(":")[0] != RANDOM:
        return None
    found = re.fullmatch(r"random(?::([0-9]{1,18}))?", weights)
    if found is None:
        raise UsageError(f"weights {weights!r}: expected random or random:SEED, with a whole number as seed")
    return int(found[1] or 0)


def is_random(weights: str | None) -> bool:
    return random_seed(weights) is not None


@contextmanager
def initialised_by(seed: int) -> Iterator[None]:
    """Context manager: seed torch's random generator, so that models built inside have the same weights every time.

    The generator's state is restored afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
