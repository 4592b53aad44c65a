"""Heads that compare an image's embedding with embeddings of compositions, both made from cached inputs and words."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.layers.composition_index import Columns, WordTable
from duplex.layers.word_feasibility import feasibility
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting, UnfinishedMethod, Words
from duplex.options import Options

Row = TypeVar("Row", bound=Options)
ASIDE = 10.0  # a cosine of this much less is none


class Pairs(NamedTuple):
    """Embeddings of the compositions that training tells apart [C, e]."""

    rows: Tensor


class PairHead(Method[Row], Generic[Row]):
    """`L = CE(compatibility(f(x), g(c)))` over the seen compositions, or over all of them in the open world.

    A subclass says how an image (`image`) and compositions (`pairs`) are embedded and how they are compared, and may
    hold unseen compositions back while it trains (`margins`).
    """

    margins: Tensor | None  # what training takes off a composition's logit [M*N]

    def __init__(self, setting: Setting, options: Row, *, trained_words: bool) -> None:
        super().__init__(setting, options)
        words = words_of(setting)
        self.words = WordTable(words.states, words.objects, trained=trained_words)
        seen = setting.labels.pairs["train"]
        learned = setting.labels.target("open", "train") if setting.world == "open" else seen
        self.columns = Columns(learned, len(setting.labels.objects))
        self.register_buffer("margins", None)

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "words"})

    def image(self, z: Tensor) -> Tensor:
        """[B, d] -> [B, e]"""
        raise UnfinishedMethod(type(self), "image")

    def pairs(self, columns: Columns) -> Tensor:
        """[C, e]"""
        raise UnfinishedMethod(type(self), "pairs")

    def logits(self, image: Tensor, pairs: Tensor) -> Tensor:
        """[B, e], [C, e] -> [B, C]"""
        return image @ pairs.T

    @torch.no_grad()
    def feasible(self, states: Tensor, objects: Tensor) -> Tensor:
        """`rho` [M*N] of vectors of the primitives, inf for seen compositions."""
        found = feasibility(states.cpu().numpy(), objects.cpu().numpy(), self.labels)
        return torch.as_tensor(found, dtype=torch.float32)

    def held_back(self, scale: float) -> Tensor:
        """Margins [M*N] of compositions that stand aside: 10 for a cosine of an unseen one, nothing for a seen one."""
        return torch.where(torch.as_tensor(self.labels.seen), 0.0, ASIDE * scale)

    def shared(self) -> Pairs:
        return Pairs(self.pairs(self.columns))

    def losses(self, batch: Batch, shared: Pairs) -> dict[str, Tensor]:
        logits = self.logits(self.image(batch.z), shared.rows)
        if self.margins is not None:
            logits = logits - self.margins[self.columns.compositions]
        return {"c": cross_entropy(logits, self.columns.places(batch.compositions))}

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        pairs = self.pairs(Columns(columns, len(self.labels.objects)).to(self.words.states.device))

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            return self.logits(self.image(inputs["cls"]), pairs)

        return scores


def words_of(setting: Setting) -> Words:
    """The word vectors of a method that `needs` them."""
    assert setting.words is not None
    return setting.words
