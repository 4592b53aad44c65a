"""ADE (Hao et al., "Learning Attention as Disentangler for Compositional Zero-Shot Learning", CVPR 2023), over cached
features.

Two attention modules read an image's patch tokens, one for its state and one for its object, with the CLS feature as
the query: `v_s = A_s(x, x)`, `v_o = A_o(x, x)`. In training an image also attends to the tokens of a partner with its
state, `A_s(x, x')`, or with its object; as cross-attention can only read what the two have in common, it disentangles.
Concept features are compared with embedded words by cosine at temperature T:

    L = L_c + L_s + L_o + (L_s + L_o of the crossed features) + w L_reg

L_reg asks the attention of x to its partner's tokens and that of the partner to x's for equal spread: the paper
measures it as an earth mover's distance of attention maps; between sorted maps of T tokens it is the mean absolute
difference. The composition's feature is a linear map of [v_s; v_o]. `S = cos(v_c, g(s, o)) / T` plus both primitives'.
Partners are the next of the batch; an image without one has no crossed terms.
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
from duplex.methods.base import Batch, Method, Scorer, Setting
from duplex.methods.head import words_of
from duplex.options import Options
from duplex.parts.attention import in_blocks
from duplex.parts.factors import unit
from duplex.parts.heads import Columns, Composer, WordTable
from duplex.parts.partners import next_partner


@dataclass(frozen=True)
class AdeOptions(Options):
    width: int = 300  # of concept features and of words' embeddings
    scale: float = 20.0  # 1 / T
    regulariser: float = 1.0  # w

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0 and self.scale > 0, "width and scale are positive"
        yield self.regulariser >= 0, f"regulariser is {self.regulariser}; it is at least 0"


class ConceptAttention(nn.Module):
    """The query of one image over the tokens of another, and the attention it pays."""

    def __init__(self, dim: int, inside: int, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(dim, width), nn.Linear(inside, width), nn.Linear(inside, width)

    def forward(self, z: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, d], [B, T, w] -> unit features [B, e], weights [B, T]"""
        scores = (self.key(tokens) @ self.query(z)[:, :, None])[..., 0] / math.sqrt(self.query.out_features)
        weights = scores.softmax(-1)
        return unit((weights[:, None] @ self.value(tokens))[:, 0]), weights


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
        self.attend_s, self.attend_o = (ConceptAttention(setting.dim, inside, width) for _ in range(2))
        self.embed_s, self.embed_o = (nn.Linear(self.words.width, width) for _ in range(2))
        self.composer, self.join = Composer(self.words.width, width), nn.Linear(2 * width, width)

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "patch", "words"})

    def embedded(self, columns: Columns) -> Embedded:
        pairs = self.composer(self.words.states, self.words.objects, columns.states, columns.objects)
        return Embedded(unit(pairs), unit(self.embed_s(self.words.states)), unit(self.embed_o(self.words.objects)))

    def shared(self) -> Embedded:
        return self.embedded(self.columns)

    def joined(self, v_s: Tensor, v_o: Tensor) -> Tensor:
        return unit(self.join(torch.cat([v_s, v_o], dim=-1)))

    def losses(self, batch: Batch, shared: Embedded) -> dict[str, Tensor]:
        z, tokens = unit(batch.z), batch.inputs["patch"].to(self.words.states.dtype)
        own, n = batch.compositions, len(self.labels.objects)
        states, objects = own // n, own % n
        v_s, _ = self.attend_s(z, tokens)
        v_o, _ = self.attend_o(z, tokens)
        crossed_s, apart_s = self.crossed(self.attend_s, z, tokens, states, shared.states)
        crossed_o, apart_o = self.crossed(self.attend_o, z, tokens, objects, shared.objects)
        c, s, o = self.logits(v_s, v_o, shared)
        return {
            "c": cross_entropy(c, self.columns.places(own)),
            "s": cross_entropy(s, states),
            "o": cross_entropy(o, objects),
            "crossed": crossed_s + crossed_o,
            "reg": self.options.regulariser * (apart_s + apart_o),
        }

    def crossed(
        self, attend: ConceptAttention, z: Tensor, tokens: Tensor, own: Tensor, words: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of features read off partners, and how far apart the two attentions are."""
        partner, paired = next_partner(own[:, None] == own)
        v, there = attend(z, tokens[partner])
        _, back = attend(z[partner], tokens)
        terms = cross_entropy(self.options.scale * v @ words.T, own, reduction="none")
        apart = (there.sort(1).values - back.sort(1).values).abs().mean(1)
        mine = paired.to(terms) / paired.sum().clamp(min=1)  # a mean over images with a partner
        return terms @ mine, apart @ mine

    def logits(self, v_s: Tensor, v_o: Tensor, words: Embedded) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled cosines with compositions, states and objects."""
        rows = ((self.joined(v_s, v_o), words.compositions), (v_s, words.states), (v_o, words.objects))
        c, s, o = (self.options.scale * v @ w.T for v, w in rows)
        return c, s, o

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        asked = Columns(columns, len(self.labels.objects)).to(self.words.states.device)
        words = self.embedded(asked)

        @torch.no_grad()
        def some(cls: Tensor, patch: Tensor) -> Tensor:
            z, tokens = unit(cls), patch.to(self.words.states.dtype)
            c, s, o = self.logits(self.attend_s(z, tokens)[0], self.attend_o(z, tokens)[0], words)
            return c + s[:, asked.states] + o[:, asked.objects]

        patches, inside = self.setting.inputs["patch"]
        return lambda inputs: in_blocks(
            some, inputs["cls"], inputs["patch"], patches * (inside + 2 * self.options.width)
        )
