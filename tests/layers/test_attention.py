"""Cross-attention by loops over heads, queries and keys, with and without a batch on either side."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from duplex.layers.attention import CrossAttention, CrossBlock
from tests.methods.field import close, linear, softmax

DIM, INSIDE, HEADS = 8, 7, 2


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def by_hand(attend: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs for queries `x` [Q, d] and keys `y` [T, w], and their weights [Q, T]."""
    q, k, v = ([linear(layer, row) for row in given] for layer, given in
               ((attend.query, x), (attend.key, y), (attend.value, y)))  # fmt: skip
    width, read, weights = DIM // HEADS, torch.zeros(len(x), DIM).double(), torch.zeros(len(x), len(y)).double()
    for head in range(HEADS):
        part = slice(head * width, (head + 1) * width)
        for i, query in enumerate(q):
            share = softmax([float(query[part] @ key[part]) / math.sqrt(width) for key in k])
            read[i, part] = sum(p * value[part] for p, value in zip(share, v, strict=True))
            weights[i] += torch.tensor(share, dtype=torch.float64) / HEADS
    return torch.stack([linear(attend.out, row) for row in read]), weights


@pytest.mark.parametrize("batched_x", [False, True])
@pytest.mark.parametrize("batched_y", [False, True])
def test_attention_equals_loops(batched_x, batched_y):
    torch.manual_seed(0)
    attend = CrossAttention(DIM, INSIDE, HEADS, zero_output=False).double()
    x, y = rows(1, *[3] * batched_x, 5, DIM), rows(2, *[3] * batched_y, 4, INSIDE)
    read, weights = attend.read(x, y)
    assert torch.equal(attend(x, y), read)
    if not batched_x and not batched_y:
        x, y, read, weights = x[None], y[None], read[None], weights[None]
    for i in range(len(read)):
        expected = by_hand(
            attend, x[i if batched_x else ...].reshape(5, DIM), y[i if batched_y else ...].reshape(4, INSIDE)
        )
        close(read[i].detach(), expected[0])
        close(weights[i].detach(), expected[1])


def test_zero_output_attention_and_blocks_start_at_zero():
    torch.manual_seed(0)
    x, y = rows(1, 5, DIM), rows(2, 4, INSIDE)
    assert torch.equal(CrossBlock(DIM, INSIDE, HEADS).double()(x, y), x)
    assert not CrossAttention(DIM, INSIDE, HEADS, zero_output=True).double()(x, y).any()
    assert CrossAttention(DIM, INSIDE, HEADS, zero_output=False).double()(x, y).any()
