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

Word vectors are trained, as published. The sizes of layers are this repository's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import WordMethod, WordOptions
from duplex.methods.layers import CompositionIndex, Mlp, unit
from duplex.options import Count, Natural, Positive, Rate, Share

CHUNK = 2**14  # compositions embedded at once


@dataclass(frozen=True)
class CanetOptions(WordOptions):
    width: Count = 512  # hidden units of every perceptron
    layers: Natural = 1  # hidden layers of each image head
    dropout: Rate = 0.1  # in every perceptron
    scale: Positive = 20.0  # 1 / T of cosines
    share: Share = 0.4  # weight a of P_s P_o in the score


class ImageScaledNetwork(nn.Module):
    """Network that embeds all states for each image [B, M, w]; `beta` scales its two layers."""

    def __init__(self, word_width: int, options: CanetOptions) -> None:
        super().__init__()
        width = options.width
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
        word = self.words.width
        width = options.width
        rate = options.dropout
        self.see_s = Mlp(context.dim, width, word, options.layers, rate)
        self.see_o = Mlp(context.dim, width, word, options.layers, rate)
        self.see_c = Mlp(context.dim, width, word, options.layers, rate)
        self.learner = ImageScaledNetwork(word, options)
        self.join = Mlp(word + context.dim, width, word, 1, rate)
        self.compose = Mlp(2 * word, width, word, 1, rate)  # g

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
        z = unit(batch.cls)
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
        z = unit(inputs["cls"])
        a = self.options.share
        d_s, d_o = self.cosines(z)
        p_s, p_o = (1 + d_s) / 2, (1 + d_o) / 2
        p_c = (1 + unit(self.see_c(z)) @ prepared.T) / 2
        return (1 - a) * p_c + a * p_s[:, candidates.states] * p_o[:, candidates.objects]
