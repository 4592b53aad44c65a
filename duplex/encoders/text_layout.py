"""Where each query of a prompt tree finds its keys: a prompt tree's index tensors, on one device.

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

BLOCK = 16  # queries together, about: more of them waste products, fewer gather the same ancestors more often


@dataclass(frozen=True)
class Attention:
    """The index tensors of one attention call: `Q` queries in `C` blocks of at most `B`, with at most `S` keys each.

    States are rows `[R, 3 * width]` of queries, keys and values beside each other, cut into heads: `[R * 3 * H, e]`.
    """

    heads: int
    rows: Tensor  # [C*H*B + 2*C*H*S] where the blocks' queries, keys and values are among those
    mask: Tensor  # [C, 1, B, S] 0 for an ancestor or the node itself, -inf for another key
    slots: Tensor  # [Q, H] where each query's heads are in the blocks `[C*H*B]`
    asked: Tensor  # [C*H, B] the other way round: which of `[Q * H]` a slot holds
    spare: int  # slots at the end of the last block that hold no query
    taken: Tensor | None  # [Q] the states that are queries; None for all in order


@dataclass(frozen=True)
class Layout:
    """Index tensors of a tree. An *entry* is a distinct (row, depth): all that the first layer's products depend on."""

    entry_rows: Tensor  # [E]
    entry_depths: Tensor  # [E]
    layers: tuple[Attention, ...]  # the first takes entries for states, the last asks for the prompts' ends alone
    ends: Tensor  # [P] each prompt's place among the last layer's queries

    @classmethod
    def of(cls, tree: PromptTree, layers: int, heads: int, device: torch.device) -> Layout:
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
    """Queries in blocks, with the union of their ancestors for keys."""

    queries: Ints  # [Q] nodes
    keys: Ints  # [C, S] nodes; what is left over repeats the first
    mask: NDArray[np.float32]  # [C, B, S]

    @classmethod
    def of(cls, tree: PromptTree, queries: Ints) -> QueryBlocks:
        """Blocks of equal size, so that few slots are spare, and smaller where queries are fewer than nodes."""
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
        mask[total:, 0] = 0  # a spare slot asks for something, so that its softmax is a number
        return cls(queries, keys, mask.reshape(count, size, -1))

    def attention(self, states: Ints, heads: int, device: torch.device) -> Attention:
        """For states of which node `i` has number `states[i]`."""
        count, size = self.mask.shape[:2]
        total, head, taken = len(self.queries), np.arange(heads), states[self.queries]
        place = np.arange(total)
        slots = (place // size * heads)[:, None] * size + head * size + (place % size)[:, None]  # [Q, H]
        number = np.minimum(np.arange(count * size), total - 1).reshape(count, 1, size)  # a spare slot repeats the last
        asked = number * heads + head[:, None]  # [C, H, B]
        own, seen = taken[number], states[self.keys][:, None]
        parts = [kind * heads + head[:, None] + 3 * heads * nodes for kind, nodes in enumerate((own, seen, seen))]
        return Attention(
            heads=heads,
            rows=_put(np.concatenate([part.ravel() for part in parts]), device),
            mask=torch.from_numpy(self.mask[:, None]).to(device),
            slots=_put(slots, device),
            asked=_put(asked.reshape(count * heads, size), device),
            spare=count * size - total,
            taken=None if np.array_equal(taken, np.arange(len(states))) else _put(taken, device),
        )


def _put(array: Ints, device: torch.device) -> Tensor:
    """Thirty-two bits: an index for every head is as large as the features of a small tower."""
    return torch.from_numpy(array.astype(np.int32)).to(device)
