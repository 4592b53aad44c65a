"""Prompts as a prefix tree, so that a causal text tower computes each distinct prefix once.

Under a causal mask the hidden state of a token depends on the tokens before it and on nothing after it, so two prompts
that begin alike have equal states as far as they are alike. A prompt is a sequence of *lexicon rows* (token embeddings,
frozen or learned); a node of the tree is one distinct prefix, and its depth is its position.

Nodes are numbered depth first, for attention (see `text_layout`): the nodes below one node follow it directly, so
that a run of consecutive nodes has few ancestors beside the run itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError

Ints = NDArray[np.int64]
Prompts = Sequence[Sequence[int]] | NDArray[np.integer]

PAD = -1


def padded(sequences: Prompts) -> Ints:
    """[P, L] lexicon rows, `PAD` after each prompt's end."""
    if isinstance(sequences, np.ndarray):
        rows = sequences.astype(np.int64, copy=False)
        lengths = (rows != PAD).sum(1)
    else:
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        rows = np.full((len(lengths), int(lengths.max(initial=0))), PAD, np.int64)
        flat = np.fromiter(chain.from_iterable(sequences), np.int64, int(lengths.sum()))
        rows[np.arange(rows.shape[1]) < lengths[:, None]] = flat
    if not len(rows):
        raise DuplexError("there is no prompt to encode: the list of compositions is empty")
    if lengths.min() == 0:
        raise DuplexError(f"prompt {int(lengths.argmin())} has no tokens: every prompt needs its start and end token")
    if rows.min() < PAD or (rows == PAD)[np.arange(rows.shape[1]) < lengths[:, None]].any():
        raise DuplexError("a prompt names a lexicon row below 0: -1 may only follow a prompt's end")
    return rows


@dataclass(frozen=True, eq=False)
class PromptTree:
    """`T` nodes, depth first; `ends[p]` is the node of prompt `p`'s last token."""

    rows: Ints  # [T] lexicon row of each node's token
    depths: Ints  # [T] its position
    parents: Ints  # [T] the node before it, -1 for a first token
    ends: Ints  # [P]

    @classmethod
    def of(cls, sequences: Prompts) -> PromptTree:
        """The tree of prompts given as lists of lexicon rows, or as an array `[P, L]` padded with -1."""
        rows, depths, parents, ends = _trie(padded(sequences))
        bounds = np.searchsorted(depths, np.arange(depths[-1] + 2))
        place = _places(parents, _below(parents, bounds), bounds)
        order = np.argsort(place)
        above = parents[order]
        return cls(
            rows=rows[order],
            depths=depths[order],
            parents=np.where(above < 0, -1, place[above]),
            ends=place[ends],
        )

    @property
    def tokens(self) -> int:
        """`T`, the distinct tokens that are computed."""
        return len(self.rows)

    @property
    def prompts(self) -> int:
        return len(self.ends)

    @property
    def length(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.depths.max()) + 1

    @cached_property
    def ancestors(self) -> Ints:
        """[T, L] the node itself, its parent, and so on up; -1 past the first token."""
        table = np.full((self.tokens, self.length), -1, np.int64)
        node = np.arange(self.tokens)
        for column in table.T:
            column[:] = node
            node = np.where(node < 0, -1, self.parents[node])
        return table

    def sequences(self) -> Ints:
        """[P, L] the prompts back again, padded with -1."""
        path = self.ancestors[self.ends]
        rows = np.full_like(path, PAD)
        prompt, up = np.nonzero(path >= 0)
        rows[prompt, self.depths[path[prompt, up]]] = self.rows[path[prompt, up]]
        return rows


def blocks(sequences: Prompts, size: int) -> Iterator[tuple[Ints, PromptTree]]:
    """Trees of at most `size` prompts with the prompts' indices; sorted, so that blocks share prefixes."""
    rows = padded(sequences)
    order = np.lexsort(rows.T[::-1])
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        yield chosen, PromptTree.of(rows[chosen])


def _trie(sequences: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Distinct prefixes, depth by depth: a node is a distinct (parent, row)."""
    base = int(sequences.max()) + 1
    node = np.full(len(sequences), -1, np.int64)  # each prompt's node at the depth reached
    rows, depths, parents, count = [], [], [], 0
    for depth, column in enumerate(sequences.T):
        alive = np.flatnonzero(column != PAD)
        keys, inverse = np.unique((node[alive] + 1) * base + column[alive], return_inverse=True)
        node[alive] = count + inverse
        rows.append(keys % base)
        parents.append(keys // base - 1)
        depths.append(np.full(len(keys), depth))
        count += len(keys)
    return np.concatenate(rows), np.concatenate(depths), np.concatenate(parents), node


def _below(parents: Ints, bounds: Ints) -> Ints:
    """[T] how many nodes descend from each, summed from the deepest depth up; `bounds` delimit the depths."""
    below = np.zeros(len(parents), np.int64)
    for depth in range(len(bounds) - 2, 0, -1):
        here, above = slice(bounds[depth], bounds[depth + 1]), slice(bounds[depth - 1], bounds[depth])
        size = bounds[depth] - bounds[depth - 1]
        below[above] += np.bincount(parents[here] - bounds[depth - 1], below[here] + 1, size).astype(np.int64)
    return below


def _places(parents: Ints, below: Ints, bounds: Ints) -> Ints:
    """[T] each node's number, depth first: its parent's, one more, and as many as its earlier siblings take."""
    place = np.empty(len(parents), np.int64)
    for start, stop in pairwise(bounds):
        above = parents[start:stop]  # sorted: siblings lie together
        before = np.cumsum(below[start:stop] + 1) - below[start:stop] - 1
        eldest = np.searchsorted(above, above)
        place[start:stop] = np.where(above < 0, 0, place[above] + 1) + before - before[eldest]
    return place
