"""Text prompts of compositions, states and objects, encoded by a frozen text tower (Eq. 1-2, 6-7).

The template `TEMPLATE` ("a photo of") is set here: text towers (`duplex.encoders`) know tokens
only. `prompt_method` has the method that scores with prompts (`kind: prompts`). The equations are
those of the Duplex paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from duplex.encoders.base import TextTower
from duplex.encoders.prompt_tree import PromptTree
from duplex.errors import DuplexError
from duplex.labels import Ints, LabelSpace, prompt_name
from duplex.methods.layers import copy_to_device, unit
from duplex.methods.team import ALONE, Team

Source = Literal["learned", "fixed"]
PathsOption = Literal["composition", "three"]
TEMPLATE = "a photo of"


class Prototypes(NamedTuple):
    """Semantic prototypes (text features or embedded words) of compositions, states, objects."""

    compositions: Tensor  # t^c [C, d]
    states: Tensor  # t^s [M, d]; empty without the state path
    objects: Tensor  # t^o [N, d]; empty without the object path


def following_tokens(tower: TextTower, text: str, before: str = TEMPLATE) -> list[int]:
    """Token ids of `text` as it stands after the words `before`; some tokenizers encode it differently alone."""
    opening = tower.tokens(before)
    whole = tower.tokens(f"{before} {text}")
    if whole[: len(opening)] != opening:
        raise DuplexError(
            f"prompts are joined from words, but this encoder's tokenizer encodes {before!r} differently before "
            f"{text!r}; choose another encoder, such as ViT-B-32"
        )
    return whole[len(opening) :]


def name_tokens(tower: TextTower, name: str, before: str = TEMPLATE) -> list[int]:
    """Token ids of a state's or an object's name in a prompt that begins with the words `before`."""
    tokens = following_tokens(tower, prompt_name(name), before)
    if not tokens:
        raise DuplexError(f"the tokenizer of this encoder finds no word in the name {name!r}; rename it")
    return tokens


def frame_embeddings(tower: TextTower) -> tuple[Tensor, Tensor]:
    """Embeddings of the tokens before and after every prompt, each [1, width], or [0, width] if there is none."""
    opening = [] if tower.start is None else [tower.start]
    closing = [] if tower.end is None else [tower.end]
    return tower.embedding(opening), tower.embedding(closing)


class Prompts(nn.Module):
    """Text prompts of compositions, states and objects, encoded by the frozen text tower.

    A prompt consists of K context vectors and the names' vectors: `P^c = [v^c_1..v^c_K, s_m, o_n]`
    for a composition, `P^s = [v^s.., s_m]` for a state, `P^o = [v^o.., o_n]` for an object. All
    are rows of the table `lexicon`.

    context: "learned" trains vectors of each path, initialised with the template; "fixed" uses it.
    vocabulary: "learned" trains one vector per name, at first the mean of its tokens.
    state_end: words after the name in a state's prompt.
    """

    frozen_rows: Tensor
    tower: TextTower
    word_dropout = 0.0  # of learned names, when training encodes them; set by training
    team: Team = ALONE  # which divides the prompts in training; set by training

    def __init__(
        self,
        labels: LabelSpace,
        tower: TextTower,
        *,
        context: Source = "fixed",
        vocabulary: Source = "fixed",
        paths: PathsOption = "three",
        template: str = TEMPLATE,
        state_end: str = "",
        unscaled: bool = False,
    ) -> None:
        super().__init__()
        self.unscaled = unscaled  # whether features keep the length that the tower gives them
        self.labels = labels
        self.paths = ("composition", "state", "object") if paths == "three" else ("composition",)
        self.vocabulary = vocabulary
        self.__dict__["tower"] = tower  # so that the frozen tower is not part of the state
        words = tower.embedding(torch.tensor(tower.tokens(template)))  # [K, width]
        names = [name_tokens(tower, name, template) for name in (*labels.states, *labels.objects)]
        opening, closing = frame_embeddings(tower)
        self.opening_rows = list(range(len(opening)))  # of the start token, if there is one
        self.closing_rows = list(range(len(opening), len(opening) + len(closing)))
        frozen = [opening, closing]
        learned = list[Tensor]()
        if context == "fixed":
            frozen.append(words)
        else:
            learned.append(words.repeat(len(self.paths), 1))
        if vocabulary == "fixed":
            lengths = list(map(len, names))
            frozen.append(torch.cat([tower.embedding(torch.tensor(ids)) for ids in names]))
        else:
            lengths = [1] * len(names)
            learned.append(torch.stack([tower.embedding(torch.tensor(ids)).mean(0) for ids in names]))
        frozen.append(tower.embedding(following_tokens(tower, state_end, template)))
        self.register_buffer("frozen_rows", torch.cat(frozen), persistent=False)
        self.state_end_rows = np.arange(len(self.frozen_rows) - len(frozen[-1]), len(self.frozen_rows))
        self.learned_rows = nn.Parameter(torch.cat(learned)) if learned else None
        if vocabulary == "learned":
            new = torch.from_numpy(~np.concatenate(labels.trained_words)).nonzero()[:, 0]
            self.fixed_rows = {"learned_rows": new - len(names)}  # counted from the table's end

        # frozen rows (ends, context, names), then learned ones (contexts, names)
        ends = len(opening) + len(closing)
        first = ends if context == "fixed" else len(self.frozen_rows)
        starts = [first + (0 if context == "fixed" else i * len(words)) for i in range(len(self.paths))]
        self.context_rows = {
            path: list(range(start, start + len(words))) for path, start in zip(self.paths, starts, strict=True)
        }
        first_name = ends if vocabulary == "fixed" else len(self.frozen_rows)
        if context == vocabulary:
            first_name = starts[-1] + len(words)
        offsets = first_name + np.cumsum([0, *lengths[:-1]])
        tokens = np.arange(max(lengths))
        # [M + N, longest]
        self.name_rows = np.where(tokens < np.array(lengths)[:, None], offsets[:, None] + tokens, -1)
        self._trees: tuple[tuple[object, ...], list[tuple[TextTower, PromptTree, Tensor | None]]] | None = None
        self._encoded: Tensor | None = None  # of the tree's prompts, if none is learned
        self.held: HeldPrompts | None = None  # set by `encoded_once`

    def lexicon(self) -> Tensor:
        if self.learned_rows is None:
            return self.frozen_rows
        return torch.cat([self.frozen_rows, self.dropped(self.learned_rows)])

    def dropped(self, rows: Tensor) -> Tensor:
        """`rows`; in training, elements of the words of states and objects drop out."""
        if not (self.word_dropout and self.training and torch.is_grad_enabled()):
            return rows
        names = len(self.name_rows)
        return torch.cat([rows[:-names], dropout(rows[-names:], self.word_dropout)])

    def sequences(self, path: str, names: Sequence[Ints]) -> Ints:
        """Prompts as rows of `lexicon` [P, L]: start, context, `names`, end, then -1 as padding.

        names: for each name in a prompt, indices [P] into all states followed by all objects.
        """
        count = len(names[0])
        first = np.array([*self.opening_rows, *self.context_rows[path]], dtype=np.int64)
        head = np.tile(first, (count, 1))
        body = np.concatenate([head, *(self.name_rows[column] for column in names)], axis=1)
        last = [*(self.state_end_rows if path == "state" else ()), *self.closing_rows]
        body = np.concatenate([body, np.tile(np.array(last, dtype=np.int64), (count, 1))], axis=1)
        order = np.argsort(body < 0, axis=1, kind="stable")  # padding comes last
        return np.take_along_axis(body, order, axis=1)

    def all_sequences(self, compositions: Ints) -> list[tuple[TextTower, Ints]]:
        """(text tower, prompts that it encodes); one entry, unless each path has its own tower."""
        m = self.labels.state_of(compositions)
        n = self.labels.object_of(compositions)
        states = len(self.labels.states)
        blocks = {"composition": self.sequences("composition", [m, n + states])}
        if "state" in self.paths:
            blocks["state"] = self.sequences("state", [np.arange(states)])
            blocks["object"] = self.sequences("object", [np.arange(states, len(self.name_rows))])
        if towers := getattr(self.tower, "of_paths", {}):
            return [(towers.get(path, self.tower), rows) for path, rows in blocks.items() if len(rows)]
        longest = max(rows.shape[1] for rows in blocks.values())
        padded = [np.pad(b, ((0, 0), (0, longest - b.shape[1])), constant_values=-1) for b in blocks.values()]
        return [(self.tower, np.concatenate(padded))]

    def forward(self, compositions: Ints, checkpointing: bool = False) -> Prototypes:
        """Encode prompts with gradients; if no vector is learned, only once."""
        if not len(compositions) and "state" not in self.paths:
            return self._split(self.frozen_rows.new_empty(0, self.tower.dim), 0)
        together = self.team.size > 1 and self.is_divisible and self.training and torch.is_grad_enabled()
        key = (compositions.tobytes(), self.frozen_rows.device, self.frozen_rows.dtype, together)
        if self._trees is None or self._trees[0] != key:
            sequences = self.all_sequences(compositions)
            make = self._tree_of_part if together else lambda rows: (PromptTree.of(rows), None)
            self._trees = (key, [(tower, *make(rows)) for tower, rows in sequences])
            self._encoded = None
        if self._encoded is not None:
            return self._split(self._encoded, len(compositions))
        lexicon = self.lexicon()
        parts = []
        for tower, tree, places in self._trees[1]:
            features = tower.encode(tree, lexicon, checkpoint=checkpointing)
            parts.append(features if places is None else self.team.join(features, len(places))[places])
        encoded = self.scaled(torch.cat(parts))
        if self.learned_rows is None and not getattr(self.tower, "is_trained", False):
            self._encoded = encoded
        return self._split(encoded, len(compositions))

    @property
    def is_divisible(self) -> bool:
        """Whether processes may each encode a part of the prompts: these change, and no dropout is inside the tower."""
        return self.learned_rows is not None and not getattr(self.tower, "is_trained", False)

    def _tree_of_part(self, rows: Ints) -> tuple[PromptTree, Tensor | None]:
        """The tree of the prompts that this process encodes, and the place of each prompt among all processes'."""
        total = len(rows)
        if not self.team.divides(total):
            return PromptTree.of(rows), None
        order = np.lexsort(rows.T[::-1])  # neighbours have the longest common beginnings
        (places,) = copy_to_device(self.frozen_rows.device, np.argsort(order))
        return PromptTree.of(rows[order[self.team.part(total)]]), places

    @torch.no_grad()
    def encode(self, compositions: Ints) -> Prototypes:
        """Encode prompts without gradients, of states and objects too if these have paths."""
        if not len(compositions) and "state" not in self.paths:
            return self._split(self.frozen_rows.new_empty(0, self.tower.dim), 0)
        if self.held is not None and (found := self.held.find(compositions)) is not None:
            return found
        lexicon = self.lexicon()
        parts = [tower.encode_blocks(rows, lexicon) for tower, rows in self.all_sequences(compositions)]
        encoded = self._split(self.scaled(torch.cat(parts)), len(compositions))
        if self.held is not None:
            self.held.lists.append((compositions.copy(), encoded))
        return encoded

    def scaled(self, features: Tensor) -> Tensor:
        return features if self.unscaled else unit(features)

    def _split(self, encoded: Tensor, count: int) -> Prototypes:
        states = count + len(self.labels.states)
        return Prototypes(encoded[:count], encoded[count:states], encoded[states:])


class HeldPrompts:
    """Lists of compositions with their encoded prompts."""

    def __init__(self, parts: bool) -> None:
        self.parts = parts  # whether a part of a list may be read from it; its last bits can then be others
        self.lists: list[tuple[Ints, Prototypes]] = []

    def find(self, compositions: Ints) -> Prototypes | None:
        """The prompts of the sorted `compositions`, if they were encoded."""
        for listed, encoded in self.lists:
            if np.array_equal(listed, compositions):
                return encoded
            if not self.parts or len(listed) < len(compositions):
                continue
            places = np.searchsorted(listed, compositions).clip(max=len(listed) - 1)
            if np.array_equal(listed[places], compositions):
                rows = torch.from_numpy(places).to(encoded.compositions.device)
                return encoded._replace(compositions=encoded.compositions[rows])
        return None


@contextmanager
def encoded_once(method: nn.Module, *, parts: bool = False) -> Iterator[None]:
    """Context manager in which a method's parameters stay as they are: each list of prompts is encoded once.

    parts: also take the prompts of fewer compositions from a list with all of them.
    """
    prompts = [part for part in method.modules() if isinstance(part, Prompts)]
    for each in prompts:
        each.held = HeldPrompts(parts)
    try:
        yield
    finally:
        for each in prompts:
            each.held = None


def encode_words(labels: LabelSpace, tower: TextTower) -> tuple[Tensor, Tensor]:
    """Features of the prompts "a photo of <state>" [M, d] and "a photo of <object>" [N, d]."""
    _, states, objects = Prompts(labels, tower).encode(np.empty(0, dtype=np.int64))
    return states, objects
