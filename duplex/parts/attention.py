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
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Queries `x` [Q, d] or [B, Q, d], keys and values `y` [T, w] or [B, T, w] -> [(B,) Q, d]"""
        q, k, v = (self._parts(rows) for rows in (self.query(x), self.key(y), self.value(y)))  # [(B,) h, ., d_h]
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        mixed = (weights @ v).transpose(-2, -3)  # [(B,) Q, h, d_h]
        found: Tensor = self.out(mixed.flatten(-2))
        return found

    def _parts(self, rows: Tensor) -> Tensor:
        found: Tensor = rows.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        return found


def in_blocks(score: Callable[[Tensor, Tensor], Tensor], z: Tensor, tokens: Tensor, width: int) -> Tensor:
    """`score` of a few images at a time, where it holds `width` numbers an image."""
    step = max(1, HELD // max(width, 1))
    return torch.cat([score(a, b) for a, b in zip(z.split(step), tokens.split(step), strict=True)])
