"""Random unit rows: drawn in order from torch's generator, or each from a seed and its number alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

STEP = 1 << 22  # numbers drawn at a time where none is kept; a multiple of 16, as torch draws them
MIX = (
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # odd multipliers of splitmix64 (Steele et al., 2014) as signed numbers
GOLDEN = -0x61C8864680B583EB  # its increment


def random_rows(count: int, dim: int) -> Tensor:
    return normalize(torch.randn(count, dim), dim=-1)


def pass_over(count: int) -> None:
    """Leave torch's generator where drawing `count` normal numbers leaves it, a few at a time."""
    while count >= 2 * STEP:
        torch.randn(STEP)
        count -= STEP
    torch.randn(count)


def rows_at(seed: Tensor, numbers: Tensor, dim: int) -> Tensor:
    """Random directions [C, d] of some rows, the same whichever others are asked for. `seed` is a single number."""
    cells = numbers[:, None] * dim + torch.arange(dim, device=numbers.device)
    bits = _mixed(seed + GOLDEN * (cells + 1))
    # Box-Muller: 24 bits make a length, 24 others an angle
    u, v = ((_shifted(bits, by) & 0xFFFFFF).to(torch.float32) for by in (40, 8))
    length = (-2 * ((u + 1) / 2**24).log()).sqrt()
    return normalize(length * (2 * math.pi / 2**24 * v).cos(), dim=-1)


def _mixed(x: Tensor) -> Tensor:
    """splitmix64's finaliser; products wrap."""
    x = (x ^ _shifted(x, 30)) * MIX[0]
    x = (x ^ _shifted(x, 27)) * MIX[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros moving in, which torch's shift of signed numbers does not do."""
    return (x >> by) & ((1 << (64 - by)) - 1)
