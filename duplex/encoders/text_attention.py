"""Attention of each node of a prompt tree over its ancestors and itself.

With `q_i` a query and `A(i)` its node's ancestors and itself, `o_i = Σ_{j ∈ A(i)} p_ij v_j` and
`p_i = softmax_j(q_i·k_j / √e)` for every head of width `e`: the result of causal attention for that token in every
prompt that contains the node. The backward pass is written out: only the states and `p` are saved, and gradients of
shared keys are summed in a fixed order on every device, since `embedding_dense_backward` sorts instead of adding
atomically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duplex.encoders.text_layout import AttentionPlan


def attend(states: Tensor, plan: AttentionPlan) -> Tensor:
    """Return the output [Q, width] for states `[R, 3 * width]` of queries, keys and values side by side. The softmax
    runs in float32 or wider."""
    wide = torch.promote_types(states.dtype, torch.float32)
    output: Tensor = TreeAttention.apply(states.to(wide), plan).to(states.dtype)
    return output


class TreeAttention(torch.autograd.Function):
    """The attention of `attend` with its own backward pass; differentiable once, in `states`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, plan: AttentionPlan) -> Tensor:
        blocks = Gathered.of(states, plan)
        count, _, size, seen = plan.mask.shape
        scores = torch.bmm(blocks.q, blocks.k.mT).view(count, plan.heads, size, seen)
        p = torch.add(plan.mask, scores, alpha=blocks.width**-0.5).softmax(-1).flatten(0, 1)  # [C*H, B, S]
        ctx.plan = plan
        ctx.save_for_backward(states, p)
        return F.embedding(plan.slot_of_query, torch.bmm(p, blocks.v).view(-1, blocks.width)).flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        states, p = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        each = Gathered.of(states, plan).gradients(p, grads[0], plan)  # [C*H*B + 2*C*H*S, e]
        summed = torch.ops.aten.embedding_dense_backward(each, plan.rows, states.numel() // each.shape[1], -1, False)
        return summed.view_as(states), None


@dataclass(frozen=True)
class Gathered:
    """Queries, keys and values of one attention call, per block and head; all three are views of `rows`."""

    width: int  # e, of one head
    rows: Tensor  # [C*H*B + 2*C*H*S, e]
    q: Tensor  # [C*H, B, e]
    k: Tensor  # [C*H, S, e]
    v: Tensor  # [C*H, S, e]

    @classmethod
    def of(cls, states: Tensor, plan: AttentionPlan) -> Gathered:
        count, _, size, seen = plan.mask.shape
        width = states.shape[1] // (3 * plan.heads)
        rows = F.embedding(plan.rows, states.view(-1, width))
        parts = rows.split([count * plan.heads * length for length in (size, seen, seen)])
        return cls(width, rows, *(part.view(count * plan.heads, -1, width) for part in parts))

    def gradients(self, p: Tensor, grad: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the gradient of each gathered row from that of the output `[Q, H * e]`: `dv_j = Σ_i p_ij do_i`,
        `dk_j = Σ_i ds_ij q_i / √e` and `dq_i = Σ_j ds_ij k_j / √e`. Overwrites the rows, each after its last use."""
        do = F.embedding(plan.query_of_slot, grad.reshape(-1, self.width))  # [C*H, B, e]
        if plan.unused_slots:
            do.view(len(plan.mask), plan.heads, *do.shape[1:])[-1, :, -plan.unused_slots :].zero_()
        dp = torch.bmm(do, self.v.mT)
        ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype).mul_(self.width**-0.5)
        torch.bmm(p.mT, do, out=self.v)
        dk = torch.bmm(ds.mT, self.q)
        torch.bmm(ds, self.k, out=self.q)
        self.k.copy_(dk)
        return self.rows
