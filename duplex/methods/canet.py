"""CANet (Wang et al., "Learning Conditional Attributes for Compositional Zero-Shot Learning", CVPR 2023), over cached
features.

Images are seen in the space of the words by three heads. An object is recognised by cosine with its word,
`d_o = cos(f_o(x), w_o)`, and the most probable one, o_x, says with the image how states look: a hyper learner turns
`beta = relu(MLP([w_(o_x); x]))` into scales of the layers of the states' base learner,

    e_s(x) = a_2 * W_2 relu(norm(a_1 * W_1 w_s)),    a_l = A_l beta,       d_s = cos(f_s(x), e_s(x))

A composition is recognised by `d_c = cos(f_c(x), g(w_s, w_o))`, g a perceptron. `L = L_c + (L_s + L_o) / 2`, each a
cross-entropy of cosines at temperature T, L_c over seen compositions. With P = (1 + d) / 2, scores are `(1 - a) P_c +
a P_s P_o`. Sizes of layers are this repository's; words are trained, as published.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from duplex.labels import Ints
from duplex.layers.composition_index import Columns, Mlp, WordTable
from duplex.layers.factors import unit
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting
from duplex.methods.head import Pairs, words_of
from duplex.options import Options

SOME = 2**14  # compositions embedded at a time


@dataclass(frozen=True)
class CanetOptions(Options):
    width: int = 512
    layers: int = 1  # hidden layers of each image head
    dropout: float = 0.1
    scale: float = 20.0  # 1 / T
    share: float = 0.4  # a
    conditional: bool = True  # without it a state has one embedding, whatever the image

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0 and self.layers >= 0, "width is positive, layers at least 0"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"
        yield self.scale > 0, f"scale is {self.scale}; it is positive"
        yield 0 <= self.share <= 1, f"share is {self.share}; it lies in [0, 1]"


class BaseLearner(nn.Module):
    """`a_2 * W_2 relu(norm(a_1 * W_1 w_s))` of all states for every image, or once where no image says anything."""

    def __init__(self, word: int, options: CanetOptions) -> None:
        super().__init__()
        width = options.width
        self.first, self.second = nn.Linear(word, width), nn.Linear(width, word)
        self.between = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Dropout(options.dropout))
        if options.conditional:
            self.scale_first, self.scale_second = nn.Linear(word, width), nn.Linear(word, word)  # A_1, A_2

    def forward(self, states: Tensor, beta: Tensor | None) -> Tensor:
        """[M, w], [B, w] -> [B, M, w]; without `beta` [1, M, w]"""
        hidden = self.first(states)[None]
        if beta is not None:
            hidden = self.scale_first(beta)[:, None] * hidden
        found: Tensor = self.second(self.between(hidden))
        return found if beta is None else self.scale_second(beta)[:, None] * found


class Canet(Method[CanetOptions]):
    Options = CanetOptions

    def __init__(self, setting: Setting, options: CanetOptions) -> None:
        super().__init__(setting, options)
        words = words_of(setting)
        self.words = WordTable(words.states, words.objects, trained=True)
        self.columns = Columns(setting.labels.pairs["train"], len(setting.labels.objects))
        word, width, layers, rate = self.words.width, options.width, options.layers, options.dropout
        self.see_s, self.see_o, self.see_c = (Mlp(setting.dim, width, word, layers, rate) for _ in range(3))
        self.learner = BaseLearner(word, options)
        self.join = Mlp(word + setting.dim, width, word, 1, rate) if options.conditional else None
        self.compose = Mlp(2 * word, width, word, 1, rate)  # g

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "words"})

    def shared(self) -> Pairs:
        return Pairs(self.pairs(self.columns))

    def pairs(self, columns: Columns) -> Tensor:
        """`g(w_s, w_o)` of unit length [C, w], some at a time: the perceptron is wider than what comes out."""
        states, objects = self.words.states, self.words.objects
        some = zip(columns.states.split(SOME), columns.objects.split(SOME), strict=True)
        rows = [torch.cat([states.index_select(0, m), objects.index_select(0, n)], dim=-1) for m, n in some]
        return torch.cat([unit(self.compose(row)) for row in rows])

    def cosines(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """d_s [B, M] and d_o [B, N]; `z` of unit length."""
        objects = self.words.objects
        to_objects = unit(self.see_o(z)) @ unit(objects).T
        beta = None
        if self.join is not None:
            beta = relu(self.join(torch.cat([objects[to_objects.argmax(1)], z], dim=-1)))
        states = unit(self.learner(self.words.states, beta))  # [B, M, w] or [1, M, w]
        return (states @ unit(self.see_s(z))[:, :, None])[..., 0], to_objects

    def losses(self, batch: Batch, shared: Pairs) -> dict[str, Tensor]:
        z, n, own = unit(batch.z), len(self.labels.objects), batch.compositions
        to_states, to_objects = self.cosines(z)
        to_pairs = unit(self.see_c(z)) @ shared.rows.T
        scale = self.options.scale
        return {
            "s": cross_entropy(scale * to_states, own // n) / 2,
            "o": cross_entropy(scale * to_objects, own % n) / 2,
            "c": cross_entropy(scale * to_pairs, self.columns.places(own)),
        }

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        asked = Columns(columns, len(self.labels.objects)).to(self.words.states.device)
        pairs, a = self.pairs(asked), self.options.share

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            z = unit(inputs["cls"])
            p_s, p_o = ((1 + d) / 2 for d in self.cosines(z))
            p_c = (1 + unit(self.see_c(z)) @ pairs.T) / 2
            return (1 - a) * p_c + a * p_s[:, asked.states] * p_o[:, asked.objects]

        return scores
