"""CANet (Wang et al., "Learning Conditional Attributes for Compositional Zero-Shot Learning", CVPR 2023), over cached
features.

An object is recognised by cosine with its embedded word, `p(o|x) ~ exp(cos(f_o(x), g_o(o)) / T)`. The embedding of a
state is conditioned on the recognised object and on the image: a hyper learner turns `beta = [g_o(o_x); f(x)]` into
the weights of one layer of the state's base learner,

    e_s(x) = W_2 relu((1 + A(beta)) * (W_1 w_s)),    A: one scale a hidden unit

and `p(s|x) ~ exp(cos(f_s(x), e_s(x)) / T)`. `f(x, s, o) = p(s|x) p(o|x)`; `L = L_s + L_o + L_c`, `L_c` over seen
compositions with the sum of the two cosines. The paper generates whole weight matrices; scales of hidden units are
their diagonal form, which keeps them small. `o_x` is the most probable object, in training as at inference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from duplex.labels import Ints
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting, columns_of
from duplex.methods.head import words_of
from duplex.options import Options
from duplex.parts.factors import unit
from duplex.parts.heads import Columns, Mlp, WordTable


@dataclass(frozen=True)
class CanetOptions(Options):
    width: int = 512
    layers: int = 1  # hidden layers of each image head
    dropout: float = 0.1
    scale: float = 20.0  # 1 / T
    conditional: bool = True  # without it a state has one embedding, whatever the image

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0 and self.layers >= 0, "width is positive, layers at least 0"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"
        yield self.scale > 0, f"scale is {self.scale}; it is positive"


class Canet(Method[CanetOptions]):
    Options = CanetOptions

    def __init__(self, setting: Setting, options: CanetOptions) -> None:
        super().__init__(setting, options)
        words = words_of(setting)
        self.words = WordTable(words.states, words.objects, trained=False)
        self.columns = Columns(setting.labels.pairs["train"], len(setting.labels.objects))
        width, layers, rate = options.width, options.layers, options.dropout
        self.see_s, self.see_o = (Mlp(setting.dim, width, width, layers, rate) for _ in range(2))
        self.embed_o = nn.Linear(self.words.width, width)
        self.first, self.second = nn.Linear(self.words.width, width), nn.Linear(width, width)
        self.hyper = Mlp(width + setting.dim, width, width, 1, rate) if options.conditional else None

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "words"})

    def cosines(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled cosines with all states [B, M] and all objects [B, N]."""
        z = unit(z)
        objects = unit(self.embed_o(self.words.objects))  # [N, e]
        to_objects = unit(self.see_o(z)) @ objects.T
        hidden = self.first(self.words.states)  # [M, e]
        if self.hyper is None:
            to_states = unit(self.see_s(z)) @ unit(self.second(relu(hidden))).T
        else:
            beta = torch.cat([objects[to_objects.argmax(1)], z], dim=-1)
            scales = 1 + self.hyper(beta)  # [B, e]
            states = unit(self.second(relu(scales[:, None] * hidden)))  # [B, M, e]
            to_states = (states @ unit(self.see_s(z))[:, :, None])[..., 0]
        return self.options.scale * to_states, self.options.scale * to_objects

    def losses(self, batch: Batch, shared: tuple[()]) -> dict[str, Tensor]:
        to_states, to_objects = self.cosines(batch.z)
        n, own = len(self.labels.objects), batch.compositions
        pairs = to_states[:, self.columns.states] + to_objects[:, self.columns.objects]
        return {
            "s": cross_entropy(to_states, own // n),
            "o": cross_entropy(to_objects, own % n),
            "c": cross_entropy(pairs, self.columns.places(own)),
        }

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        m, n = columns_of(self.labels, columns, self.words.states.device)

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            to_states, to_objects = self.cosines(inputs["cls"])
            return to_states.softmax(-1)[:, m] * to_objects.softmax(-1)[:, n]

        return scores
