"""Where each query of a prompt tree finds its keys: a prompt tree's index tensors, on one device.

A query is a node, a key one of its ancestors or itself. Keys come in two kinds: trunk nodes, shared by so many queries
that all of them are scored densely under a mask, and a node's other ancestors, one of each level, which are gathered
(or, where every node of a level has exactly one child, just sliced).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duplex.encoders.prompt_tree import Ints, PromptTree


@dataclass(frozen=True)
class Keys:
    """The keys that `n` queries find in one level: key `index[i]` of the level for query `i`; None: key `i`."""

    nodes: slice
    index: Tensor | None  # [n]


@dataclass(frozen=True)
class Queries:
    """`n` queries of one level, with the trunk keys they may see and their keys in each level."""

    rows: slice  # among all queries
    mask: Tensor  # [n, M] 0 for a trunk ancestor (or itself), -inf for another trunk node
    keys: tuple[Keys, ...]


@dataclass(frozen=True)
class Attention:
    """All queries of one attention call. `trunk` is `M`; `nodes` are the queries' nodes, None for all in order."""

    trunk: int
    queries: tuple[Queries, ...]
    nodes: Tensor | None


@dataclass(frozen=True)
class Layout:
    """Index tensors of a tree. An *entry* is a distinct (row, depth): what the first layer's projections depend on."""

    entry_rows: Tensor  # [E]
    entry_depths: Tensor  # [E]
    entries: Tensor  # [T] the entry of each node
    every: Attention  # all nodes are queries
    final: Attention  # only the prompts' ends are
    ends: Tensor  # [P] each prompt's query of `final`

    @classmethod
    def of(cls, tree: PromptTree, device: torch.device) -> Layout:
        keys, entries = np.unique(tree.rows * tree.length + tree.depths, return_inverse=True)
        nodes, ends = np.unique(tree.ends, return_inverse=True)

        def put(array: Ints) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return cls(
            entry_rows=put(keys // tree.length),
            entry_depths=put(keys % tree.length),
            entries=put(entries),
            every=_attention(tree, None, device),
            final=_attention(tree, nodes, device),
            ends=put(ends),
        )


def _attention(tree: PromptTree, nodes: Ints | None, device: torch.device) -> Attention:
    chosen = np.arange(tree.tokens) if nodes is None else nodes
    levels = tree.levels[chosen]
    queries = []
    for level in range(-1, int(levels.max()) + 1):
        start, stop = np.searchsorted(levels, [level, level + 1])
        if stop > start:
            queries.append(_queries(tree, chosen[start:stop], level, slice(int(start), int(stop)), device))
    return Attention(tree.trunk, tuple(queries), None if nodes is None else torch.from_numpy(nodes).to(device))


def _queries(tree: PromptTree, nodes: Ints, level: int, rows: slice, device: torch.device) -> Queries:
    path = tree.ancestors[nodes]  # [n, L], itself first
    mask = np.full((len(nodes), tree.trunk), -np.inf, np.float32)
    query, up = np.nonzero((path >= 0) & (path < tree.trunk))
    mask[query, path[query, up]] = 0
    keys = tuple(_keys(tree, path[:, level - other], other, device) for other in range(level + 1))
    return Queries(rows, torch.from_numpy(mask).to(device), keys)


def _keys(tree: PromptTree, ancestors: Ints, level: int, device: torch.device) -> Keys:
    start, stop = (int(bound) for bound in np.searchsorted(tree.levels, [level, level + 1]))
    index = ancestors - start
    if len(index) == stop - start and (index == np.arange(len(index))).all():
        return Keys(slice(start, stop), None)
    return Keys(slice(start, stop), torch.from_numpy(index).to(device))
