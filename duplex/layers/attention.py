"""Cross-attention of prototypes and patch tokens, written out so that queries without a batch are projected once."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

HELD = 2**24  # numbers that an inference pass holds at once


class CrossAttention(nn.Module):
    """`O softmax(Q x (K y)^T / sqrt(d_h)) V y`, in `heads` parts of width d_h. `quiet`: O starts at zero."""

    def __init__(self, dim: int, inside: int, heads: int, *, quiet: bool) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(inside, dim), nn.Linear(inside, dim)
        self.out = nn.Linear(dim, dim)
        if quiet:
            silent(self.out)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Queries `x` [Q, d] or [B, Q, d], keys and values `y` [T, w] or [B, T, w] -> [(B,) Q, d]"""
        return self.read(x, y)[0]

    def read(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What is read, and the weights that each query gives to the keys, a mean over heads [(B,) Q, T]."""
        q, k, v = (self._parts(rows) for rows in (self.query(x), self.key(y), self.value(y)))  # [(B,) h, ., d_h]
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        mixed = (weights @ v).transpose(-2, -3)  # [(B,) Q, h, d_h]
        return self.out(mixed.flatten(-2)), weights.mean(-3)

    def _parts(self, rows: Tensor) -> Tensor:
        found: Tensor = rows.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        return found


class CrossBlock(nn.Module):
    """`B(x, y) = g + F(norm(g))`, `g = x + A(norm(x), norm(y))`, a feed-forward F; it starts as `B(x, y) = x`."""

    def __init__(self, dim: int, inside: int, heads: int) -> None:
        super().__init__()
        self.norm_x, self.norm_y = nn.LayerNorm(dim), nn.LayerNorm(inside)
        self.attend = CrossAttention(dim, inside, heads, quiet=True)
        last = silent(nn.Linear(4 * dim, dim))
        self.forward_part = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), last)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[(B,) Q, d], [(B,) T, w] -> [(B,) Q, d]"""
        return self.read(x, y)[0]

    def read(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """And A's weights [(B,) Q, T]."""
        read, weights = self.attend.read(self.norm_x(x), self.norm_y(y))
        g = x + read
        return g + self.forward_part(g), weights


def silent(layer: nn.Linear) -> nn.Linear:
    """A linear map that starts at zero."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def in_blocks(score: Callable[[Tensor, Tensor], Tensor], z: Tensor, tokens: Tensor, width: int) -> Tensor:
    """`score` of a few images at a time, where it holds `width` numbers an image."""
    step = max(1, HELD // max(width, 1))
    return torch.cat([score(a, b) for a, b in zip(z.split(step), tokens.split(step), strict=True)])
