"""Cross-attention from prototypes (queries) to the patch tokens of images (keys and values).

Queries that all images share are projected once, not per image.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from duplex.errors import UsageError
from duplex.layers.factors import zero_initialised

CHUNK = 2**24  # numbers in memory at once in inference


class CrossAttention(nn.Module):
    """Multi-head attention of queries `x` to keys and values `y`.

    dim: channels of queries and outputs. inside: channels of `y`. zero_output: initialise the output map with zeros.
    """

    def __init__(self, dim: int, inside: int, heads: int, *, zero_output: bool) -> None:
        super().__init__()
        if dim % heads:
            raise UsageError(f"heads is {heads}; expected a divisor of the feature's width {dim}")
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(inside, dim), nn.Linear(inside, dim)
        self.out = nn.Linear(dim, dim)
        if zero_output:
            zero_initialised(self.out)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention outputs [(B,) Q, d], and attention weights of keys as means over heads [(B,) Q, T].

        x: queries [Q, d] or [B, Q, d].
        y: keys and values [T, w] or [B, T, w].
        """
        q, k, v = (self._split_heads(rows) for rows in (self.query(x), self.key(y), self.value(y)))  # [(B,) h, ., d_h]
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        mixed = (weights @ v).transpose(-2, -3)  # [(B,) Q, h, d_h]
        return self.out(mixed.flatten(-2)), weights.mean(-3)

    def _split_heads(self, rows: Tensor) -> Tensor:
        split: Tensor = rows.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        return split


class CrossBlock(nn.Module):
    """Residual block of cross-attention A and a feed-forward network F; untrained, it returns the queries unchanged.

    With queries `x` and keys and values `y`: `B(x, y) = g + F(norm(g))`, `g = x + A(norm(x), norm(y))`.
    """

    def __init__(self, dim: int, inside: int, heads: int) -> None:
        super().__init__()
        self.norm_x, self.norm_y = nn.LayerNorm(dim), nn.LayerNorm(inside)
        self.attend = CrossAttention(dim, inside, heads, zero_output=True)
        last = zero_initialised(nn.Linear(4 * dim, dim))
        self.forward_part = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), last)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [(B,) Q, d], and attention weights of keys as means over heads [(B,) Q, T].

        x: queries [(B,) Q, d]. y: keys and values [(B,) T, w].
        """
        read, weights = self.attend(self.norm_x(x), self.norm_y(y))
        g = x + read
        return g + self.forward_part(g), weights


def score_in_chunks(score: Callable[[Tensor, Tensor], Tensor], z: Tensor, tokens: Tensor, width: int) -> Tensor:
    """Return the scores [B, C] of C candidate compositions for all images, in chunks of images that fit into memory.

    score: function from features and tokens of b images to scores [b, C].
    z: features [B, d].
    tokens: patch tokens [B, T, w].
    width: count of numbers per image that `score` holds in memory.
    """
    step = max(1, CHUNK // max(width, 1))
    return torch.cat([score(a, b) for a, b in zip(z.split(step), tokens.split(step), strict=True)])
