"""Attention of each node of a prompt tree over its ancestors and itself.

With `q_i` a query and `A(i)` its node's ancestors and itself, `o_i = Σ_{j ∈ A(i)} p_ij v_j` and
`p_i = softmax_j(q_i·k_j / √e)` for every head of width `e`: what causal attention computes for that token in every
prompt that runs through it. The backward pass is written out so that only `q`, `k`, `v` and `p` are kept, and so that
gradients of shared keys are summed in a fixed order on every device: `embedding_dense_backward` sorts instead of
adding atomically.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duplex.encoders.text_layout import Attention, Keys, Queries


def attend(q: Tensor, kv: Tensor, heads: int, plan: Attention) -> Tensor:
    """[Q, width] from queries `[Q, width]` and keys beside values `[T, 2*width]`; softmax in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    found: Tensor = TreeAttention.apply(q.to(wide), kv.to(wide), heads, plan).to(q.dtype)
    return found


class TreeAttention(torch.autograd.Function):
    """Differentiable once in `q` and `kv`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, heads: int, plan: Attention) -> Tensor:
        q = q.view(len(q), heads, -1) * (q.shape[1] // heads) ** -0.5  # [Q, H, e]
        k, v = kv.view(len(kv), 2, heads, -1).unbind(1)  # [T, H, e]
        out = torch.empty_like(q)
        weights = []
        for part in plan.queries:
            p = _scores(q, k, plan.trunk, part).softmax(-1)  # [n, H, M + levels]
            out[part.rows] = _mixture(p, v, plan.trunk, part)
            weights.append(p)
        ctx.plan = plan
        ctx.save_for_backward(q, kv, *weights)
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, *weights = ctx.saved_tensors
        plan: Attention = ctx.plan
        heads = q.shape[1]
        k, v = kv.view(len(kv), 2, heads, -1).unbind(1)
        grad = grads[0].view_as(q)
        dq, dkv = torch.empty_like(q), torch.zeros_like(kv)
        dk, dv = dkv.view(len(kv), 2, heads, -1).unbind(1)
        for part, p in zip(plan.queries, weights, strict=True):
            dp = _scores(grad, v, plan.trunk, part, masked=False)
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            dq[part.rows] = _mixture(ds, k, plan.trunk, part)
            _spread(dv, p, grad, plan.trunk, part)
            _spread(dk, ds, q, plan.trunk, part)
        return dq.flatten(1).mul_(q.shape[2] ** -0.5), dkv, None, None


def _scores(q: Tensor, k: Tensor, trunk: int, part: Queries, *, masked: bool = True) -> Tensor:
    """[n, H, M + levels] `q_i · k_j` for the part's queries and their keys."""
    q = q[part.rows]
    dense = torch.matmul(q.transpose(0, 1), k[:trunk].permute(1, 2, 0)).transpose(0, 1)  # [n, H, M]
    if masked:
        dense = dense + part.mask.to(q.dtype)[:, None]
    own = [(q * _gather(k, keys)).sum(-1, keepdim=True) for keys in part.keys]
    return torch.cat([dense, *own], -1)


def _mixture(p: Tensor, v: Tensor, trunk: int, part: Queries) -> Tensor:
    """[n, H, e] `Σ_j p_ij v_j`."""
    out = torch.matmul(p[..., :trunk].transpose(0, 1), v[:trunk].transpose(0, 1)).transpose(0, 1)
    for column, keys in enumerate(part.keys, start=trunk):
        out = torch.addcmul(out, p[..., column, None], _gather(v, keys))
    return out


def _spread(dv: Tensor, p: Tensor, grad: Tensor, trunk: int, part: Queries) -> None:
    """`dv_j += Σ_i p_ij grad_i`, in place."""
    grad = grad[part.rows]
    dv[:trunk] += torch.matmul(p[..., :trunk].permute(1, 2, 0), grad.transpose(0, 1)).transpose(0, 1)
    for column, keys in enumerate(part.keys, start=trunk):
        piece = p[..., column, None] * grad  # [n, H, e]
        if keys.index is None:
            dv[keys.nodes] += piece
        else:
            size = keys.nodes.stop - keys.nodes.start
            total = torch.ops.aten.embedding_dense_backward(piece.flatten(1), keys.index, size, -1, False)
            dv[keys.nodes] += total.view(size, *piece.shape[1:])


def _gather(k: Tensor, keys: Keys) -> Tensor:
    """[n, H, e] the key of each query in one level."""
    level = k[keys.nodes]
    return level if keys.index is None else level.index_select(0, keys.index)
