"""Prompts and the semantic prototypes that a frozen text tower makes of them (Eq. 1-2, 6-7)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from duplex.encoders.prompt_tree import PromptTree
from duplex.encoders.text import TextTower
from duplex.labels import Ints, LabelSpace, prompt_name
from duplex.layers.factors import unit

Source = Literal["learned", "fixed"]
TEMPLATE = "a photo of"


class Prototypes(NamedTuple):
    """Semantic prototypes, L2-normalised: of some compositions, of all states, of all objects."""

    compositions: Tensor  # t^c [C, d]
    states: Tensor  # t^s [M, d]; empty without the state path
    objects: Tensor  # t^o [N, d]; empty without the object path


class Prompts(nn.Module):
    """`P^c = [v^c_1..v^c_K, s_m, o_n]`, `P^s = [v^s.., s_m]`, `P^o = [v^o.., o_n]`.

    Every prompt is a sequence of rows of one lexicon `[V, width]`: start and end token, the context vectors of each
    path, and the primitives: one vector each where the vocabulary is learned (initialised with the mean of its name's
    token embeddings, shared by the three paths), the name's own tokens where it is fixed.
    """

    frozen_rows: Tensor
    _tower: list[TextTower]

    def __init__(
        self,
        labels: LabelSpace,
        tower: TextTower,
        *,
        context: Source = "fixed",
        vocabulary: Source = "fixed",
        paths: str = "cso",
        template: str = TEMPLATE,
    ) -> None:
        super().__init__()
        self.labels = labels
        self.paths = tuple(paths)
        self.vocabulary = vocabulary
        self._tower = [tower]  # in a list: the frozen tower is no part of this module's state
        words = tower.embedding(torch.tensor(tower.tokens(template)))  # [K, width]
        names = [tower.tokens(prompt_name(name)) for name in (*labels.states, *labels.objects)]

        ends = tower.embedding(torch.tensor([tower.start, tower.end]))  # [2, width]
        frozen, learned = [ends], list[Tensor]()
        shared = context == "fixed"  # a fixed context is the same rows for every path
        (frozen if shared else learned).append(words if shared else words.repeat(len(self.paths), 1))
        if vocabulary == "learned":
            learned.append(torch.stack([tower.embedding(torch.tensor(ids)).mean(0) for ids in names]))
            spans = [[row] for row in range(len(names))]
        else:
            frozen.append(torch.cat([tower.embedding(torch.tensor(ids)) for ids in names]))
            offsets = np.cumsum([0, *map(len, names)])
            spans = [list(range(a, b)) for a, b in pairwise(offsets.tolist())]

        self.register_buffer("frozen_rows", torch.cat(frozen), persistent=False)
        self.learned_rows = nn.Parameter(torch.cat(learned)) if learned else None
        self._lay_out(context, vocabulary, len(words), spans)
        self._tree: tuple[tuple[object, ...], PromptTree] | None = None
        self._encoded: Tensor | None = None  # what the tree's prompts say, where nothing of them is learned

    def _lay_out(self, context: Source, vocabulary: Source, k: int, spans: list[list[int]]) -> None:
        """Give every context and primitive its lexicon rows; the frozen rows stand before the learned ones."""
        frozen = len(self.frozen_rows)
        contexts = 1 if context == "fixed" else len(self.paths)
        first = 2 if context == "fixed" else frozen
        self.context_rows = {
            path: list(range(first + k * (i % contexts), first + k * (i % contexts) + k))
            for i, path in enumerate(self.paths)
        }
        fixed_start = 2 + (k if context == "fixed" else 0)
        learned_start = frozen + (0 if context == "fixed" else k * len(self.paths))
        start = learned_start if vocabulary == "learned" else fixed_start
        width = max(map(len, spans))
        table = np.full((len(spans), width), -1, dtype=np.int64)  # [M + N, longest name]
        for row, span in enumerate(spans):
            table[row, : len(span)] = np.asarray(span) + start
        self.name_rows = table

    @property
    def tower(self) -> TextTower:
        return self._tower[0]

    def lexicon(self) -> Tensor:
        """[V, width]"""
        if self.learned_rows is None:
            return self.frozen_rows
        return torch.cat([self.frozen_rows, self.learned_rows])

    def sequences(self, path: str, names: Sequence[Ints]) -> Ints:
        """Lexicon rows of prompts `[P, L]`, padded with -1: start, context, the named primitives, end."""
        count = len(names[0])
        head = np.tile(np.array([0, *self.context_rows[path]], dtype=np.int64), (count, 1))
        body = np.concatenate([head, *(self.name_rows[column] for column in names)], axis=1)
        return _close(body, end=1)

    def all_sequences(self, compositions: Ints) -> Ints:
        """The prompts of some compositions, and of all states and objects where those paths exist."""
        m, n, states = self.labels.state_of(compositions), self.labels.object_of(compositions), len(self.labels.states)
        blocks = [self.sequences("c", [m, n + states])]
        if "s" in self.paths:
            blocks.append(self.sequences("s", [np.arange(states)]))
            blocks.append(self.sequences("o", [np.arange(states, len(self.name_rows))]))
        longest = max(block.shape[1] for block in blocks)
        return np.concatenate([np.pad(b, ((0, 0), (0, longest - b.shape[1])), constant_values=-1) for b in blocks])

    def forward(self, compositions: Ints, checkpointing: bool = False) -> Prototypes:
        """Encode each distinct prompt once, keeping gradients to the learned rows. Prompts of which nothing is learned
        are encoded once and for all."""
        if not self._asks(compositions):
            return self._nothing()
        key = (compositions.tobytes(), self.frozen_rows.device, self.frozen_rows.dtype)
        if self._tree is None or self._tree[0] != key:
            self._tree, self._encoded = (key, PromptTree.of(self.all_sequences(compositions))), None
        if self._encoded is not None:
            return self._split(self._encoded, len(compositions))
        encoded = unit(self.tower.encode(self._tree[1], self.lexicon(), checkpoint=checkpointing))
        if self.learned_rows is None:
            self._encoded = encoded
        return self._split(encoded, len(compositions))

    @torch.no_grad()
    def encode(self, compositions: Ints) -> Prototypes:
        """The same without gradients, in blocks, so that an open world of any size fits."""
        if not self._asks(compositions):
            return self._nothing()
        encoded = self.tower.encode_blocks(self.all_sequences(compositions), self.lexicon())
        return self._split(unit(encoded), len(compositions))

    def _asks(self, compositions: Ints) -> bool:
        return len(compositions) > 0 or "s" in self.paths

    def _nothing(self) -> Prototypes:
        """No prompt at all: a method of visual prototypes alone."""
        empty = self.frozen_rows.new_empty(0, self.tower.dim)
        return Prototypes(empty, empty, empty)

    def _split(self, encoded: Tensor, count: int) -> Prototypes:
        """The compositions come first; without state and object paths nothing follows them."""
        states = count + len(self.labels.states)
        return Prototypes(encoded[:count], encoded[count:states], encoded[states:])


def _close(body: Ints, end: int) -> Ints:
    """Move each row's padding behind its tokens and put the end token after the last of them."""
    body = np.concatenate([body, np.full((len(body), 1), end, dtype=np.int64)], axis=1)
    order = np.argsort(body < 0, axis=1, kind="stable")
    return np.take_along_axis(body, order, axis=1)
