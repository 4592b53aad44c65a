"""CompCos (Mancini et al., "Open World Compositional Zero-Shot Learning", CVPR 2021).

Images x and compositions c = (s, o) are embedded on a unit sphere and compared by `p(x, c) = cos(w(x), phi(s, o))`: w
is a perceptron on the image feature, and `phi(s, o) = W [v_s ; v_o]` a linear map of the word vectors of state and
object. In the closed world the loss is a cross-entropy over seen compositions at temperature T. In the open world it is
a cross-entropy over all compositions, and unseen ones get a margin by their feasibility (plausibility) rho:

    f(x, c) = p(x, c)                     c seen
            = p(x, c) - alpha rho(c)      c unseen,   rho(s, o) = (rho_o + rho_s) / 2

rho_o is the largest cosine of o with another object seen with s, rho_s that of s with another state seen with o. `rho`
is computed from the word vectors after each epoch, and alpha rises to its final value over the first `margin_epochs`;
in the first epoch, before any rho, unseen compositions are excluded from the loss. The paper's ResNet-18 is the cached
encoder here; its image head is a perceptron.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.layers.factors import Mlp, unit
from duplex.methods.base import MethodContext
from duplex.methods.head import Composer, EmbeddingHead
from duplex.options import Count, Natural, NonNegative, Options, Positive, Rate


@dataclass(frozen=True)
class CompCosOptions(Options):
    width: Count = 512  # size of the space of images and compositions
    layers: Natural = 2  # hidden layers of the image head
    dropout: Rate = 0.1  # in the image head
    scale: Positive = 20.0  # 1 / T of cosines
    train_words: bool = True  # whether the primitives' word vectors are trained
    margin: NonNegative = 0.4  # final alpha; only in the open world
    margin_epochs: Count = 15  # epochs until alpha reaches its final value


class CompCos(EmbeddingHead[CompCosOptions]):
    """CompCos: the score is the cosine of an image's embedding and a composition's, made from two word vectors. In the
    open world, training gives unseen compositions margins by feasibility (plausibility)."""

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
            alpha = self.options.margin * min(1.0, epoch / self.options.margin_epochs)
            rho = self.feasibility(self.words.states, self.words.objects)
            self.margins.copy_(self.options.scale * alpha * torch.where(rho.isinf(), 0.0, rho))
