"""ADE (Hao et al., "Learning Attention as Disentangler for Compositional Zero-Shot Learning", CVPR 2023), over cached
features.

Three attention modules read an image's patch tokens, for its composition, its state and its object, with the CLS
feature as the query: `v_c = A_c(x, x)`, and likewise v_s and v_o. In training the last two read across images: x
attends to the tokens of a partner y with its state and another object, `A_s(x, y)`, and y to those of x; as
cross-attention can only read what the two have in common, it disentangles. Features are compared with embedded words
by cosine at temperature T:

    L = CE(v_c) + sum over s, o of [CE(A(x, y)) + CE(A(y, x))] + w L_reg

L_reg asks the attentions of x to y and of y to x for likeness where the two share the module's concept, and for
difference where they share the other one: `L_reg = D_s(x, y_s) + D_o(x, y_o) - D_s(x, y_o) - D_o(x, y_s)`. The paper
measures likeness as an earth mover's over attention between all tokens; here D is that distance of the two maps of the
CLS feature, sorted: the mean absolute difference over T tokens. `S = cos_c + a cos_s cos_o`. Partners are the next of
the batch, of the same composition where there is no other, or the image itself. The paper's attention has heads,
residuals and a feed-forward part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.layers.attention import in_blocks
from duplex.layers.composition_index import Columns, Composer, WordTable
from duplex.layers.factors import unit
from duplex.layers.partners import next_partner
from duplex.methods.base import Batch, Method, Scorer, Setting
from duplex.methods.head import words_of
from duplex.options import Options


@dataclass(frozen=True)
class AdeOptions(Options):
    width: int = 300  # of concept features and of words' embeddings
    scale: float = 50.0  # 1 / T
    regulariser: float = 1.0  # w
    product: float = 1.0  # a

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0 and self.scale > 0, "width and scale are positive"
        yield self.regulariser >= 0, f"regulariser is {self.regulariser}; it is at least 0"
        yield self.product >= 0, f"product is {self.product}; it is at least 0"


class ConceptAttention(nn.Module):
    """The query q of one image over the tokens y of another, and the attention it pays:
    `v = sum over t of a_t (V y_t + b_v)`, `a = softmax((K y_t + b_k) . q / sqrt(e))`.

    No token is projected: `(K y_t + b_k) . q = y_t . K^T q + b_k . q`, and as weights sum to one,
    `v = V (sum over t of a_t y_t) + b_v`.
    """

    def __init__(self, dim: int, inside: int, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(dim, width), nn.Linear(inside, width), nn.Linear(inside, width)

    def weights(self, z: Tensor, tokens: Tensor) -> Tensor:
        """[B, d], [B, T, w] -> a [B, T]"""
        q = self.query(z)  # [B, e]
        scores = (tokens @ (q @ self.key.weight)[:, :, None])[..., 0] + (q @ self.key.bias)[:, None]
        found: Tensor = (scores / math.sqrt(self.query.out_features)).softmax(-1)
        return found

    def forward(self, z: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, d], [B, T, w] -> unit features v [B, e], weights a [B, T]"""
        weights = self.weights(z, tokens)
        return unit(self.value((weights[:, None] @ tokens)[:, 0])), weights


class Embedded(NamedTuple):
    """Words in the concepts' space, of unit length."""

    compositions: Tensor  # [C, e]
    states: Tensor  # [M, e]
    objects: Tensor  # [N, e]


class Ade(Method[AdeOptions]):
    Options = AdeOptions

    def __init__(self, setting: Setting, options: AdeOptions) -> None:
        super().__init__(setting, options)
        words, width = words_of(setting), options.width
        self.words = WordTable(words.states, words.objects, trained=False)
        self.columns = Columns(setting.labels.pairs["train"], len(setting.labels.objects))
        inside = setting.inputs["patch"][1]
        self.attend_c, self.attend_s, self.attend_o = (ConceptAttention(setting.dim, inside, width) for _ in range(3))
        self.embed_s, self.embed_o = (nn.Linear(self.words.width, width) for _ in range(2))
        self.composer = Composer(self.words.width, width)

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "patch", "words"})

    def embedded(self, columns: Columns) -> Embedded:
        pairs = self.composer(self.words.states, self.words.objects, columns.states, columns.objects)
        return Embedded(unit(pairs), unit(self.embed_s(self.words.states)), unit(self.embed_o(self.words.objects)))

    def shared(self) -> Embedded:
        return self.embedded(self.columns)

    def losses(self, batch: Batch, shared: Embedded) -> dict[str, Tensor]:
        z, tokens = unit(batch.z), batch.inputs["patch"].to(self.words.states.dtype)
        own, n = batch.compositions, len(self.labels.objects)
        m, o = own // n, own % n
        y_s, y_o = partners(m, o), partners(o, m)
        v_c, _ = self.attend_c(z, tokens)
        loss_s, near_s = self.crossed(self.attend_s, z, tokens, y_s, m, shared.states)
        loss_o, near_o = self.crossed(self.attend_o, z, tokens, y_o, o, shared.objects)
        far_s, far_o = self.apart(self.attend_s, z, tokens, y_o), self.apart(self.attend_o, z, tokens, y_s)
        return {
            "c": cross_entropy(self.options.scale * v_c @ shared.compositions.T, self.columns.places(own)),
            "s": loss_s,
            "o": loss_o,
            "reg": self.options.regulariser * (near_s + near_o - far_s - far_o),
        }

    def crossed(
        self, attend: ConceptAttention, z: Tensor, tokens: Tensor, partner: Tensor, own: Tensor, words: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropies of features read off each other, and how far apart the two attentions are."""
        v, there = attend(z, tokens[partner])
        v_back, back = attend(z[partner], tokens)
        loss = sum(cross_entropy(self.options.scale * rows @ words.T, own) for rows in (v, v_back))
        assert isinstance(loss, Tensor)
        return loss, distance(there, back)

    @staticmethod
    def apart(attend: ConceptAttention, z: Tensor, tokens: Tensor, partner: Tensor) -> Tensor:
        """How far apart the attentions to and from partners are."""
        return distance(attend.weights(z, tokens[partner]), attend.weights(z[partner], tokens))

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        asked = Columns(columns, len(self.labels.objects)).to(self.words.states.device)
        words = self.embedded(asked)

        @torch.no_grad()
        def some(cls: Tensor, patch: Tensor) -> Tensor:
            z, tokens = unit(cls), patch.to(self.words.states.dtype)
            every = ((self.attend_c, words.compositions), (self.attend_s, words.states), (self.attend_o, words.objects))
            c, s, o = (attend(z, tokens)[0] @ rows.T for attend, rows in every)
            found: Tensor = c + self.options.product * s[:, asked.states] * o[:, asked.objects]
            return found

        patches, inside = self.setting.inputs["patch"]
        held = patches * inside  # numbers that an image takes
        return lambda inputs: in_blocks(some, inputs["cls"], inputs["patch"], held)


def partners(own: Tensor, other: Tensor) -> Tensor:
    """Of each image the next one with its `own` primitive and another `other`; else with its own; else itself [B]."""
    same = own[:, None] == own
    apart, found = next_partner(same & (other[:, None] != other))
    near, _ = next_partner(same)
    return torch.where(found, apart, near)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference of sorted attention maps [B, T]."""
    return (a.sort(1).values - b.sort(1).values).abs().mean()
