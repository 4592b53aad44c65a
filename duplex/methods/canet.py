"""CANet: embeddings of states depend on the image and on the object recognised in it.

Wang et al., "Learning Conditional Attributes for Compositional Zero-Shot Learning", CVPR 2023.

    d_o = cos(f_o(x), w_o)                                                              an object's cosine
    beta = relu(MLP([w_(o_x); x]))
    e_s(x) = a_2 * W_2 relu(norm(a_1 * W_1 w_s)),    a_l = A_l beta
    d_s = cos(f_s(x), e_s(x)),    d_c = cos(f_c(x), g(w_s, w_o))           a state's, a composition's
    L = L_c + (L_s + L_o) / 2
    S = (1 - a) P_c + a P_s P_o,    P = (1 + d) / 2

* f_s, f_o, f_c: perceptrons from the image feature x to the space of word vectors w
* o_x: the most probable object;  beta: output of the hyper learner, which scales layers of e_s
* g: perceptron on both word vectors;  a: option `share`
* L_c, L_s, L_o: cross-entropies of cosines at temperature T, L_c over seen compositions

Word vectors are trained, as published. The sizes of layers are this repository's. With `form:
published`, the layers are those of the code: one hidden layer each, of the width of the image feature
in f, of two words in g and in the network with W_1, W_2; g ends with relu; x is not scaled to unit
length. The code also draws words and weights at random after it has read the word vectors: N(0, 0.01)
and N(0, 0.001), A_l after He et al.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import Form, WordMethod, WordOptions
from duplex.methods.layers import CompositionIndex, Mlp, unit
from duplex.options import Count, Natural, Positive, Rate, Share, refuse

CHUNK = 2**14  # compositions embedded at once


@dataclass(frozen=True)
class CanetOptions(WordOptions):
    width: Count = 512  # hidden units of every perceptron
    layers: Natural = 1  # hidden layers of each image head
    dropout: Rate = 0.1  # in every perceptron
    scale: Positive = 20.0  # 1 / T of cosines
    share: Share = 0.4  # weight a of P_s P_o in the score
    form: Form = "plain"  # published: layers and start of the published code

    def rules(self) -> Iterable[tuple[object, str]]:
        for name in ("width", "layers"):
            is_set = self.form == "published" and getattr(self, name) != getattr(type(self), name)
            yield refuse(is_set, f"form: published has no {name}; leave {name} out")


class ImageScaledNetwork(nn.Module):
    """Network that embeds all states for each image [B, M, w]; `beta` scales its two layers."""

    def __init__(self, word_width: int, width: int, options: CanetOptions) -> None:
        super().__init__()
        self.first = nn.Linear(word_width, width)
        self.second = nn.Linear(width, word_width)
        self.between = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Dropout(options.dropout))
        self.scale_first = nn.Linear(word_width, width)  # A_1
        self.scale_second = nn.Linear(word_width, word_width)  # A_2

    def forward(self, states: Tensor, beta: Tensor) -> Tensor:
        hidden = self.scale_first(beta)[:, None] * self.first(states)[None]
        return torch.mul(self.scale_second(beta)[:, None], self.second(self.between(hidden)))


class Canet(WordMethod[CanetOptions]):
    """CANet: cosines of the image with embeddings of the composition, its state and its object."""

    def __init__(self, context: MethodContext, options: CanetOptions) -> None:
        super().__init__(context, options, trained_words=True)
        self.is_published = options.form == "published"
        word = self.words.width
        rate = options.dropout
        image_width = context.dim if self.is_published else options.width
        pair_width = 2 * word if self.is_published else options.width
        join_width = word if self.is_published else options.width
        self.see_s = Mlp(context.dim, image_width, word, options.layers, rate)
        self.see_o = Mlp(context.dim, image_width, word, options.layers, rate)
        self.see_c = Mlp(context.dim, image_width, word, options.layers, rate)
        self.learner = ImageScaledNetwork(word, pair_width, options)
        self.join = Mlp(word + context.dim, join_width, word, 1, rate)
        self.compose = Mlp(2 * word, pair_width, word, 1, rate)  # g
        if self.is_published:
            self.compose.append(nn.ReLU())
            self._start_as_published()

    @torch.no_grad()
    def _start_as_published(self) -> None:
        scales = (self.learner.scale_first, self.learner.scale_second)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)
                if layer in scales:
                    nn.init.kaiming_normal_(layer.weight, nonlinearity="leaky_relu")
                else:
                    nn.init.normal_(layer.weight, std=0.001)
        nn.init.normal_(self.words.states, std=0.01)
        nn.init.normal_(self.words.objects, std=0.01)

    @classmethod
    def scores_new_words(cls, options: Any) -> bool:
        return bool(options.form == "plain")  # the published code's words start at random

    def read(self, cls: Tensor) -> Tensor:
        return cls.to(self.words.states.dtype) if self.is_published else unit(cls)

    def prepare(self, candidates: CompositionIndex) -> Tensor:
        rows = []
        for m, n in zip(candidates.states.split(CHUNK), candidates.objects.split(CHUNK), strict=True):
            states = self.words.states.index_select(0, m)
            objects = self.words.objects.index_select(0, n)
            rows.append(unit(self.compose(torch.cat([states, objects], dim=-1))))
        return torch.cat(rows)

    def cosines(self, z: Tensor) -> tuple[Tensor, Tensor]:
        objects = self.words.objects
        d_o = unit(self.see_o(z)) @ unit(objects).T
        beta = relu(self.join(torch.cat([objects[d_o.argmax(1)], z], dim=-1)))
        states = unit(self.learner(self.words.states, beta))  # [B, M, w]
        return (states @ unit(self.see_s(z))[:, :, None])[..., 0], d_o

    def losses(self, batch: Batch, shared: tuple[Tensor]) -> dict[str, Tensor]:
        z = self.read(batch.cls)
        scale = self.options.scale
        m, n = self.primitives(batch.compositions)
        d_s, d_o = self.cosines(z)
        d_c = unit(self.see_c(z)) @ shared[0].T
        own = self.train_candidates.positions_of_listed(batch.compositions)
        return {
            "state": cross_entropy(scale * d_s, m) / 2,
            "object": cross_entropy(scale * d_o, n) / 2,
            "composition": cross_entropy(scale * d_c, own),
        }

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Tensor) -> Tensor:
        z = self.read(inputs["cls"])
        a = self.options.share
        d_s, d_o = self.cosines(z)
        p_s, p_o = (1 + d_s) / 2, (1 + d_o) / 2
        p_c = (1 + unit(self.see_c(z)) @ prepared.T) / 2
        return (1 - a) * p_c + a * p_s[:, candidates.states] * p_o[:, candidates.objects]
