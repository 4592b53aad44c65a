"""CompCos: images and compositions embedded on a sphere; feasibility sets open-world margins.

Mancini et al., "Open World Compositional Zero-Shot Learning", CVPR 2021.

    p(x, c) = cos(w(x), phi(s, o)),    phi(s, o) = W [v_s ; v_o]
    f(x, c) = p(x, c)                     c seen
            = p(x, c) - alpha rho(c)      c unseen,   rho(s, o) = (rho_o + rho_s) / 2

* w: perceptron on the image feature;  v: word vectors;  W: linear map
* rho(c): feasibility by word vectors after each epoch; rho_o is the largest cosine of o with another
  object seen with s, rho_s that of s with another state seen with o
* alpha: rises to its final value over the first `margin_epochs`

The loss is a cross-entropy at temperature T: of p over seen compositions, or in the open world of
f over all. In the first epoch, before rho is known, unseen compositions are excluded from it. The
cached encoder with a perceptron replaces the paper's ResNet-18.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.methods.base import MethodContext
from duplex.methods.families import Composer, EmbeddingHead, WordOptions
from duplex.methods.layers import Mlp, unit
from duplex.options import Count, Natural, NonNegative, Positive, Rate


@dataclass(frozen=True)
class CompCosOptions(WordOptions):
    width: Count = 512  # size of the space of images and compositions
    layers: Natural = 2  # hidden layers of the image head
    dropout: Rate = 0.1  # in the image head
    scale: Positive = 20.0  # 1 / T of cosines
    train_words: bool = True  # whether the primitives' word vectors are trained
    margin: NonNegative = 0.4  # final alpha; only in the open world
    margin_epochs: Count = 15  # epochs until alpha reaches its final value


class CompCos(EmbeddingHead[CompCosOptions]):
    """CompCos: the cosine of an image embedding and a composition's, made of two word vectors."""

    def __init__(self, context: MethodContext, options: CompCosOptions) -> None:
        super().__init__(context, options, trained_words=options.train_words, scale=options.scale)
        width = options.width
        self.head = Mlp(context.dim, width, width, options.layers, options.dropout)
        self.composer = Composer(self.words.width, width)
        if context.world == "open":
            self.margins = self.initial_margins()  # alpha rho(c) / T

    def embed_images(self, z: Tensor) -> Tensor:
        return unit(self.head(unit(z)))

    @torch.no_grad()
    def after_epoch(self, epoch: int) -> None:
        if self.margins is not None:
            self.raise_margins(self.feasibility(self.words.states, self.words.objects), epoch)
