"""Prefix tree of prompts, to encode a common prefix once: under a causal mask, its hidden states are always the same.

A prompt is a sequence of *lexicon rows* (token embeddings, frozen or learned); a node of the tree is one distinct
prefix, and its depth is the position of its last token. Nodes are numbered depth first, so that a run of consecutive
nodes has few ancestors beside the run itself (see `text_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from duplex.errors import DuplexError

Ints = NDArray[np.int64]
Prompts = Sequence[Sequence[int]] | NDArray[np.integer]

PAD = -1


def pad_prompts(sequences: Prompts) -> Ints:
    """Prompts as an array `[P, L]` of token numbers (lexicon rows) with `PAD` after each prompt's end."""
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
        raise DuplexError("a prompt has a token index below 0; -1 is padding and may only follow the prompt's end")
    return rows


def check_length(tokens: int, context_length: int) -> None:
    """Raise DuplexError for prompts longer than a text tower's context."""
    if tokens > context_length:
        raise DuplexError(
            f"a prompt has {tokens} tokens; this text tower reads at most {context_length}: "
            "shorten the context or the names"
        )


@dataclass(frozen=True, eq=False)
class PromptTree:
    """A prefix tree of `P` prompts: `T` nodes, one per distinct prefix, in depth-first order."""

    rows: Ints  # [T] lexicon row of each node's token
    depths: Ints  # [T] position of each node's token
    parents: Ints  # [T] node of the token before, -1 for a first token
    ends: Ints  # [P] node of each prompt's last token

    @classmethod
    def of(cls, sequences: Prompts) -> PromptTree:
        """Build the tree of prompts, given as lists of token numbers or as an array `[P, L]` padded with -1."""
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
        return cls(
            rows=rows[new],
            depths=depths,
            parents=np.where(depths == 0, -1, node[prompts, depths - 1]),
            ends=ends,
        )

    @property
    def tokens(self) -> int:
        """Number T of nodes: the distinct prefixes of all prompts."""
        return len(self.rows)

    @property
    def prompts(self) -> int:
        return len(self.ends)

    @property
    def length(self) -> int:
        """Number of tokens of the longest prompt."""
        return int(self.depths.max()) + 1

    @cached_property
    def ancestors(self) -> Ints:
        """Table [T, L] with a row per node: the node, its parent and so on up to the first token, then -1."""
        table = np.full((self.tokens, self.length), -1, np.int64)
        node = np.arange(self.tokens)
        for column in table.T:
            column[:] = node
            node = np.where(node < 0, -1, self.parents[node])
        return table

    def sequences(self) -> Ints:
        """The prompts `[P, L]` that the tree was built from, padded with -1."""
        path = self.ancestors[self.ends]
        rows = np.full_like(path, PAD)
        prompt, up = np.nonzero(path >= 0)
        rows[prompt, self.depths[path[prompt, up]]] = self.rows[path[prompt, up]]
        return rows


def tree_blocks(sequences: Prompts, size: int) -> Iterator[tuple[Ints, PromptTree]]:
    """Split prompts into blocks of at most `size` prompts; yield each block's indices of prompts and prefix tree.

    Prompts are sorted first, so that those of a block share prefixes.
    """
    rows = pad_prompts(sequences)
    order = np.lexsort(rows.T[::-1])
    for start in range(0, len(order), size):
        prompts = order[start : start + size]
        yield prompts, PromptTree.of(rows[prompts])
