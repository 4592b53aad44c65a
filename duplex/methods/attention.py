"""Cross-attention from prototypes (queries) to the patch tokens of images (keys and values).

Queries that all images share are projected once, not per image.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from duplex.errors import UsageError
from duplex.methods.paths import zero_initialised

CHUNK = 2**24  # numbers in memory at once in inference


class CrossAttention(nn.Module):
    """Multi-head attention of queries `x` with `dim` channels to keys and values `y` with `inside`."""

    def __init__(self, dim: int, inside: int, heads: int, *, zero_output: bool) -> None:
        super().__init__()
        if dim % heads:
            raise UsageError(f"heads is {heads}; expected a divisor of the feature's width {dim}")
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(inside, dim)
        self.value = nn.Linear(inside, dim)
        self.out = nn.Linear(dim, dim)
        if zero_output:
            zero_initialised(self.out)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [(B,) Q, d], and attention weights of keys as means over heads [(B,) Q, T].

        x: queries [Q, d] or [B, Q, d].
        y: keys and values [T, w] or [B, T, w].
        """
        q = self._split_heads(self.query(x))  # [(B,) h, Q, d_h]
        k = self._split_heads(self.key(y))  # [(B,) h, T, d_h]
        v = self._split_heads(self.value(y))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        mixed = (weights @ v).transpose(-2, -3)  # [(B,) Q, h, d_h]
        return self.out(mixed.flatten(-2)), weights.mean(-3)

    def _split_heads(self, rows: Tensor) -> Tensor:
        split: Tensor = rows.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        return split


class CrossBlock(nn.Module):
    """Residual block of cross-attention A and a feed-forward network F; untrained, it returns the queries unchanged.

    `B(x, y) = g + F(norm(g))`, `g = x + A(norm(x), norm(y))`.
    """

    def __init__(self, dim: int, inside: int, heads: int) -> None:
        super().__init__()
        self.norm_x, self.norm_y = nn.LayerNorm(dim), nn.LayerNorm(inside)
        self.attend = CrossAttention(dim, inside, heads, zero_output=True)
        last = zero_initialised(nn.Linear(4 * dim, dim))
        self.forward_part = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), last)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [(B,) Q, d] of queries `x`, and attention weights of keys as means over heads [(B,) Q, T]."""
        read, weights = self.attend(self.norm_x(x), self.norm_y(y))
        g = x + read
        return g + self.forward_part(g), weights


def score_in_chunks(score: Callable[[Tensor, Tensor], Tensor], z: Tensor, tokens: Tensor, width: int) -> Tensor:
    """Scores [B, C] of all images, in chunks that fit into memory.

    score: function from features and tokens of b images to scores [b, C].
    width: count of numbers per image that `score` holds in memory.
    """
    step = max(1, CHUNK // max(width, 1))
    return torch.cat([score(a, b) for a, b in zip(z.split(step), tokens.split(step), strict=True)])
