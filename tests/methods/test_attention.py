from __future__ import annotations

import pytest
import torch

from duplex.methods.families import CrossAttention, CrossBlock
from tests.methods.loops import attend, close

DIM, INSIDE, HEADS = 8, 7, 2


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize("batched_x", [False, True])
@pytest.mark.parametrize("batched_y", [False, True])
def test_attention_equals_loops(batched_x, batched_y):
    torch.manual_seed(0)
    part = CrossAttention(DIM, INSIDE, HEADS, zero_output=False).double()
    x, y = rows(1, *[3] * batched_x, 5, DIM), rows(2, *[3] * batched_y, 4, INSIDE)
    read, weights = part(x, y)
    if not batched_x and not batched_y:
        x, y, read, weights = x[None], y[None], read[None], weights[None]
    for i in range(len(read)):
        queries, keys = x[i if batched_x else ...].reshape(5, DIM), y[i if batched_y else ...].reshape(4, INSIDE)
        expected, shares = zip(*(attend(part, query, keys) for query in queries), strict=True)
        close(read[i].detach(), torch.stack(expected))
        close(weights[i].detach(), shares)


def test_zero_output_attention_and_blocks_start_at_zero():
    torch.manual_seed(0)
    x, y = rows(1, 5, DIM), rows(2, 4, INSIDE)
    assert torch.equal(CrossBlock(DIM, INSIDE, HEADS).double()(x, y)[0], x)
    assert not CrossAttention(DIM, INSIDE, HEADS, zero_output=True).double()(x, y)[0].any()
    assert CrossAttention(DIM, INSIDE, HEADS, zero_output=False).double()(x, y)[0].any()
