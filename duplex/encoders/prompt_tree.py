"""Prefix tree of prompts: under a causal mask, common prefixes need to be encoded only once.

A prompt is a list of *lexicon rows*, row numbers of a table of token embeddings. A node of the tree
is one distinct prefix; its depth is the position of its last token. Nodes are numbered depth first,
so consecutive nodes share most ancestors. Queries are divided into *blocks* of the same size; each
has one set of keys and a mask. With the ancestors A(i) of node i, itself included, and a head's width e,

    o_i = Σ_{j ∈ A(i)} p_ij v_j,    p_i = softmax_j(q_i·k_j / √e)

So a node's output is that of causal attention in every prompt that contains the node. Only inputs and
`p` are saved for the backward pass. It sums the gradients of shared keys in a fixed order, as
`embedding_dense_backward` sorts them instead of adding atomically.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from duplex.errors import DuplexError

Ints = NDArray[np.int64]
Prompts = Sequence[Sequence[int]] | NDArray[np.integer]

PAD = -1
BLOCK = 16  # queries per block, about: larger ones waste products, smaller ones gather more often


def pad_prompts(sequences: Prompts) -> Ints:
    """Put P prompts, lists of lexicon rows, into one array `[P, L]`, filled up with -1 (`PAD`)."""
    if isinstance(sequences, np.ndarray):
        rows = sequences.astype(np.int64, copy=False)
    else:
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        rows = np.full((len(lengths), int(lengths.max(initial=0))), PAD, np.int64)
        flat = np.fromiter(chain.from_iterable(sequences), np.int64, int(lengths.sum()))
        rows[np.arange(rows.shape[1]) < lengths[:, None]] = flat
    if not len(rows):
        raise DuplexError("there is no prompt to encode: the list of compositions is empty")
    return rows


def check_length(tokens: int, context_length: int) -> None:
    if tokens > context_length:
        raise DuplexError(
            f"a prompt has {tokens} tokens; this text tower reads at most {context_length}: "
            "shorten the context or the names of states and objects"
        )


@dataclass(frozen=True, eq=False)
class PromptTree:
    """Prefix tree of `P` prompts; each of `T` nodes is a prefix, stored as last token and parent."""

    rows: Ints  # [T] lexicon row of each node's token
    depths: Ints  # [T] position of each node's token
    parents: Ints  # [T] node of the token before, -1 for a first token
    ends: Ints  # [P] node of each prompt's last token

    @classmethod
    def of(cls, sequences: Prompts) -> PromptTree:
        rows = pad_prompts(sequences)
        order = np.lexsort(rows.T[::-1])  # sorted prompts reach nodes in depth-first order
        rows = rows[order]
        new = np.ones(rows.shape, bool)  # [P, L] whether a prompt is the first with this prefix
        np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=new[1:])
        new &= rows != PAD
        prompts, depths = np.nonzero(new)
        node = np.full(rows.shape, -1)  # [P, L]
        node[new] = np.arange(len(depths))
        np.maximum.accumulate(node, out=node)
        ends = np.empty_like(order)
        ends[order] = node[np.arange(len(rows)), (rows != PAD).sum(1) - 1]
        parents = np.where(depths == 0, -1, node[prompts, depths - 1])
        return cls(rows=rows[new], depths=depths, parents=parents, ends=ends)

    @property
    def tokens(self) -> int:
        """The number T of nodes, each of which is one token to encode."""
        return len(self.rows)

    @property
    def prompts(self) -> int:
        return len(self.ends)

    @property
    def length(self) -> int:
        return int(self.depths.max()) + 1

    @cached_property
    def ancestors(self) -> Ints:
        """The path from each node to the root [T, L]: the node, its parent, ...; filled up with -1."""
        table = np.full((self.tokens, self.length), -1, np.int64)
        node = np.arange(self.tokens)
        for column in table.T:
            column[:] = node
            node = np.where(node < 0, -1, self.parents[node])
        return table

    def sequences(self) -> Ints:
        """The prompts `[P, L]` as row numbers of token embeddings, padded with -1."""
        path = self.ancestors[self.ends]
        rows = np.full_like(path, PAD)
        prompt, up = np.nonzero(path >= 0)
        rows[prompt, self.depths[path[prompt, up]]] = self.rows[path[prompt, up]]
        return rows


def tree_blocks(sequences: Prompts, size: int) -> Iterator[tuple[Ints, PromptTree]]:
    """Sort prompts and cut them into blocks; yields indices of each block's prompts and their tree."""
    rows = pad_prompts(sequences)
    order = np.lexsort(rows.T[::-1])
    for start in range(0, len(order), size):
        prompts = order[start : start + size]
        yield prompts, PromptTree.of(rows[prompts])


def attend(states: Tensor, plan: AttentionPlan) -> Tensor:
    """Outputs [Q, width] of Q query tokens that attend to themselves and their ancestors.

    states: query, key and value of each of R tokens [R, 3 * width]. plan: queries and ancestors.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    with torch.autocast(states.device.type, enabled=False):
        output: Tensor = TreeAttention.apply(states.to(wide), plan).to(states.dtype)
    return output


class TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, plan: AttentionPlan) -> Tensor:
        blocks = AttentionInputs.of(states, plan)
        count, _, size, seen = plan.mask.shape
        scores = torch.bmm(blocks.q, blocks.k.mT).view(count, plan.heads, size, seen)
        scaled = torch.add(plan.mask, scores, alpha=blocks.width**-0.5)
        p = scaled.softmax(-1).flatten(0, 1)  # [C*H, B, S]
        ctx.plan = plan
        ctx.save_for_backward(states, p)
        outputs = torch.bmm(p, blocks.v).view(-1, blocks.width)
        return F.embedding(plan.slot_of_query, outputs).flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        states, p = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        each = AttentionInputs.of(states, plan).gradients(p, grads[0], plan)  # [C*H*B + 2*C*H*S, e]
        summed = torch.ops.aten.embedding_dense_backward(each, plan.rows, states.numel() // each.shape[1], -1, False)
        return summed.view_as(states), None


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys and values in the blocks of an `AttentionPlan`, all as views of `rows`."""

    width: int  # e, of one head
    rows: Tensor  # [C*H*B + 2*C*H*S, e]
    q: Tensor  # [C*H, B, e]
    k: Tensor  # [C*H, S, e]
    v: Tensor  # [C*H, S, e]

    @classmethod
    def of(cls, states: Tensor, plan: AttentionPlan) -> AttentionInputs:
        count, _, size, seen = plan.mask.shape
        width = states.shape[1] // (3 * plan.heads)
        rows = F.embedding(plan.rows, states.view(-1, width))
        parts = rows.split([count * plan.heads * length for length in (size, seen, seen)])
        return cls(width, rows, *(part.view(count * plan.heads, -1, width) for part in parts))

    def gradients(self, p: Tensor, grad: Tensor, plan: AttentionPlan) -> Tensor:
        """Gradients of queries, keys and values, which overwrite `self.rows` to save memory.

        p: attention weights. grad: gradients of outputs, `do` in blocks; `ds`: of scores.

            dv_j = Σ_i p_ij do_i,    dk_j = Σ_i ds_ij q_i / √e,    dq_i = Σ_j ds_ij k_j / √e
        """
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


@dataclass(frozen=True)
class AttentionPlan:
    """Index tensors by which `attend` lets query tokens attend to themselves and their ancestors.

    `Q` queries are put into `C` blocks of `B` slots, the last `unused_slots` empty; a block's queries
    share `S` keys. The tokens' queries, keys and values `[R, 3 * width]` are cut into `H` heads of
    width `e`: `[R * 3 * H, e]`. From them, `rows` gathers the blocks.
    """

    heads: int
    rows: Tensor  # [C*H*B + 2*C*H*S] rows of the cut states: the blocks' queries, keys and values
    mask: Tensor  # [C, 1, B, S] 0 for an ancestor or the node itself, -inf for another key
    slot_of_query: Tensor  # [Q, H] position of each query's heads in the blocks `[C*H*B]`
    query_of_slot: Tensor  # [C*H, B] the inverse: position in `[Q * H]` of each slot's query
    unused_slots: int  # at the end of the last block, without a query
    query_states: Tensor | None  # [Q] states that are queries; None for all of them in order


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """Index tensors to encode a `PromptTree`; the first layer reads E pairs of token and position."""

    entry_rows: Tensor  # [E]
    entry_depths: Tensor  # [E]
    # the first layer's states are entries; the last layer's queries are the prompts' ends
    layers: tuple[AttentionPlan, ...]
    ends: Tensor  # [P] each prompt's index among the last layer's queries

    @classmethod
    def of(cls, tree: PromptTree, layers: int, heads: int, device: torch.device) -> TreeLayout:
        keys, entries = np.unique(tree.rows * tree.length + tree.depths, return_inverse=True)
        nodes, ends = np.unique(tree.ends, return_inverse=True)
        every = np.arange(tree.tokens)
        whole = QueryBlocks.of(tree, every)
        final = QueryBlocks.of(tree, nodes)
        plans = [final.attention(entries if layers == 1 else every, heads, device)]
        if layers > 2:
            plans = [whole.attention(every, heads, device)] * (layers - 2) + plans
        if layers > 1:
            plans.insert(0, whole.attention(entries, heads, device))
        rows = _put(keys // tree.length, device)
        depths = _put(keys % tree.length, device)
        return cls(rows, depths, tuple(plans), _put(ends, device))


@dataclass(frozen=True)
class QueryBlocks:
    """Query nodes of a tree, in blocks; a block's keys are its queries and all their ancestors."""

    queries: Ints  # [Q] nodes
    keys: Ints  # [C, S] nodes; unused columns repeat the first
    mask: NDArray[np.float32]  # [C, B, S]

    @classmethod
    def of(cls, tree: PromptTree, queries: Ints) -> QueryBlocks:
        total = len(queries)
        size = math.ceil(total / math.ceil(tree.tokens / BLOCK))
        count = math.ceil(total / size)
        path = tree.ancestors[queries]  # [Q, L], itself first
        query, up = np.nonzero(path >= 0)
        pairs, inverse = np.unique(query // size * tree.tokens + path[query, up], return_inverse=True)
        block, node = np.divmod(pairs, tree.tokens)
        first = np.searchsorted(block, np.arange(count))
        slot = np.arange(len(pairs)) - first[block]
        keys = np.repeat(node[first][:, None], slot.max() + 1, axis=1)
        keys[block, slot] = node
        mask = np.full((count * size, keys.shape[1]), -np.inf, np.float32)
        mask[query, slot[inverse]] = 0
        mask[total:, 0] = 0  # an unused slot sees one key, so that its softmax is finite
        return cls(queries, keys, mask.reshape(count, size, -1))

    def attention(self, states: Ints, heads: int, device: torch.device) -> AttentionPlan:
        """Index tensors for a layer's attention; node `i` is row `states[i]` of the layer's input."""
        count, size = self.mask.shape[:2]
        total = len(self.queries)
        head = np.arange(heads)
        query_states = states[self.queries]
        in_order = np.array_equal(query_states, np.arange(len(states)))
        query = np.arange(total)
        blocks = (query // size * heads)[:, None]
        slots = blocks * size + head * size + (query % size)[:, None]  # [Q, H]
        number = np.minimum(np.arange(count * size), total - 1)  # unused slots repeat the last query
        number = number.reshape(count, 1, size)
        query_of_slot = number * heads + head[:, None]  # [C, H, B]
        q = query_states[number]
        k = states[self.keys][:, None]
        parts = []
        for kind, rows in enumerate((q, k, k)):
            parts.append(kind * heads + head[:, None] + 3 * heads * rows)
        return AttentionPlan(
            heads=heads,
            rows=_put(np.concatenate([part.ravel() for part in parts]), device),
            mask=torch.from_numpy(self.mask[:, None]).to(device),
            slot_of_query=_put(slots, device),
            query_of_slot=_put(query_of_slot.reshape(count * heads, size), device),
            unused_slots=count * size - total,
            query_states=None if in_order else _put(query_states, device),
        )


def _put(array: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(device)
