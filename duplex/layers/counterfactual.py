"""Weighted sums of counterfactuals over cells of the label grid, without keeping the counterfactuals (Eq. 11, 15-16).

A batch has up to `B^2` counterfactuals `z^cf = normalise(relu(a_i + b_j))`, `a = M_s z^s`, `b = M_o z^o` (without the
relu for fusion in the images' own space). They are made block by block, summed into their cells and thrown away; the
backward pass makes them again. Blocks that fit the processor's cache are several times faster than whole arrays, and
memory grows with the cells, not with the pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = {"cpu": 2**20}  # elsewhere 256 MiB
EPSILON = 1e-12


class CellSums(torch.autograd.Function):
    """`out_c = sum over pairs p in cell c of w_p z^cf_p`, differentiable once in `a`, `b` and `w`."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, w: Tensor, i: Tensor, j: Tensor, cell: Tensor, cells: int, rectified: bool
    ) -> Tensor:
        """`a`, `b` [B, d]; pairs `i`, `j`, `cell`, `w` [P] -> [cells, d]."""
        out = a.new_zeros(cells, a.shape[1])
        for rows in _blocks(len(i), a):
            r, inverse = _counterfactuals(a, b, i[rows], j[rows], rectified)
            out.index_add_(0, cell[rows], r.mul_((w[rows] * inverse)[:, None]))
        ctx.save_for_backward(a, b, w, i, j, cell)
        ctx.rectified = rectified
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With `u = r / |r|` and the cell's gradient `g`: `dw = g.u`, `dr = w (g - u (g.u)) / |r|` where `r > 0`."""
        a, b, w, i, j, cell = ctx.saved_tensors
        rectified: bool = ctx.rectified
        da, db, dw = torch.zeros_like(a), torch.zeros_like(b), torch.empty_like(w)
        for rows in _blocks(len(i), a):
            r, inverse = _counterfactuals(a, b, i[rows], j[rows], rectified)
            g = grads[0].index_select(0, cell[rows])
            dw[rows] = (g * r).sum(1) * inverse
            g.addcmul_(r, (dw[rows] * inverse)[:, None], value=-1)
            dr = g.mul_((w[rows] * inverse)[:, None])
            if rectified:
                dr.mul_(r > 0)
            da.index_add_(0, i[rows], dr)
            db.index_add_(0, j[rows], dr)
        return da, db, dw, None, None, None, None, None


def cell_sums(
    a: Tensor, b: Tensor, w: Tensor, i: Tensor, j: Tensor, cell: Tensor, cells: int, *, rectified: bool
) -> Tensor:
    """`CellSums` as a function: [cells, d]."""
    out: Tensor = CellSums.apply(a, b, w, i, j, cell, cells, rectified)  # type: ignore[no-untyped-call]
    return out


def _counterfactuals(a: Tensor, b: Tensor, i: Tensor, j: Tensor, rectified: bool) -> tuple[Tensor, Tensor]:
    """`r = relu(a_i + b_j)` [p, d] and `1 / |r|` [p]."""
    r = a.index_select(0, i).add_(b.index_select(0, j))
    if rectified:
        r.relu_()
    return r, torch.linalg.vector_norm(r, dim=1).clamp_(min=EPSILON).reciprocal_()


def _blocks(pairs: int, like: Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_BYTES.get(like.device.type, 2**28) // (like.shape[1] * like.element_size()))
    for start in range(0, pairs, size):
        yield slice(start, start + size)
