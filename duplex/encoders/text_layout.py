"""Index tensors for attention over a prompt tree: the keys of each query.

A query is a node, a key one of its ancestors or itself. Nodes are numbered depth first, so the ancestors of a run of
consecutive queries are the run itself and the few nodes above its first: one *block* of queries shares one set of
keys under a mask, and all blocks are small matrix products of one size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.encoders.prompt_tree import Ints, PromptTree

BLOCK = 16  # queries per block, about: larger blocks waste products, smaller ones gather ancestors more often


@dataclass(frozen=True)
class AttentionPlan:
    """The index tensors of one attention call: `Q` queries in `C` blocks of at most `B`, with at most `S` keys each.

    States are rows `[R, 3 * width]` of queries, keys and values beside each other, cut into heads: `[R * 3 * H, e]`.
    """

    heads: int
    rows: Tensor  # [C*H*B + 2*C*H*S] rows of the cut states that hold the blocks' queries, keys and values
    mask: Tensor  # [C, 1, B, S] 0 for an ancestor or the node itself, -inf for another key
    slot_of_query: Tensor  # [Q, H] position of each query's heads in the blocks `[C*H*B]`
    query_of_slot: Tensor  # [C*H, B] the inverse: position in `[Q * H]` of each slot's query
    unused_slots: int  # at the end of the last block, without a query
    query_states: Tensor | None  # [Q] states that are queries; None for all of them in order


@dataclass(frozen=True)
class TreeLayout:
    """The index tensors of a tree. An *entry* is a distinct (row, depth): the input of the first layer's products."""

    entry_rows: Tensor  # [E]
    entry_depths: Tensor  # [E]
    layers: tuple[AttentionPlan, ...]  # the first one's states are entries, the last one's queries the prompts' ends
    ends: Tensor  # [P] each prompt's index among the last layer's queries

    @classmethod
    def of(cls, tree: PromptTree, layers: int, heads: int, device: torch.device) -> TreeLayout:
        keys, entries = np.unique(tree.rows * tree.length + tree.depths, return_inverse=True)
        nodes, ends = np.unique(tree.ends, return_inverse=True)
        every = np.arange(tree.tokens)
        whole, final = QueryBlocks.of(tree, every), QueryBlocks.of(tree, nodes)
        plans = [final.attention(entries if layers == 1 else every, heads, device)]
        if layers > 2:
            plans = [whole.attention(every, heads, device)] * (layers - 2) + plans
        if layers > 1:
            plans.insert(0, whole.attention(entries, heads, device))
        rows, depths = _put(keys // tree.length, device), _put(keys % tree.length, device)
        return cls(rows, depths, tuple(plans), _put(ends, device))


@dataclass(frozen=True)
class QueryBlocks:
    """Queries in blocks, whose keys are the union of the queries' ancestors."""

    queries: Ints  # [Q] nodes
    keys: Ints  # [C, S] nodes; unused columns repeat the first
    mask: NDArray[np.float32]  # [C, B, S]

    @classmethod
    def of(cls, tree: PromptTree, queries: Ints) -> QueryBlocks:
        """Make blocks of equal size, so that few slots are unused; smaller ones if queries are fewer than nodes."""
        total = len(queries)
        count = -(-tree.tokens // BLOCK)
        size = -(-total // count)
        count = -(-total // size)
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
        """Return the index tensors for states in which node `i` is row `states[i]`."""
        count, size = self.mask.shape[:2]
        total, head = len(self.queries), np.arange(heads)
        query_states = states[self.queries]
        query = np.arange(total)
        slots = (query // size * heads)[:, None] * size + head * size + (query % size)[:, None]  # [Q, H]
        number = np.minimum(np.arange(count * size), total - 1).reshape(count, 1, size)  # unused slots repeat the last
        query_of_slot = number * heads + head[:, None]  # [C, H, B]
        q, k = query_states[number], states[self.keys][:, None]
        parts = [kind * heads + head[:, None] + 3 * heads * rows for kind, rows in enumerate((q, k, k))]
        return AttentionPlan(
            heads=heads,
            rows=_put(np.concatenate([part.ravel() for part in parts]), device),
            mask=torch.from_numpy(self.mask[:, None]).to(device),
            slot_of_query=_put(slots, device),
            query_of_slot=_put(query_of_slot.reshape(count * heads, size), device),
            unused_slots=count * size - total,
            query_states=None if np.array_equal(query_states, np.arange(len(states))) else _put(query_states, device),
        )


def _put(array: Ints, device: torch.device) -> Tensor:
    """Move indices to a device as int32: with one per head, int64 would take as much memory as small features."""
    return torch.from_numpy(array.astype(np.int32)).to(device)
