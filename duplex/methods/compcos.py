"""CompCos (Mancini et al., "Open World Compositional Zero-Shot Learning", CVPR 2021), over cached features.

Images and compositions meet on a unit sphere: `p(x, c) = cos(w(x), phi(s, o))`, `phi(s, o) = W [v_s ; v_o]`. In the
closed world the loss is a cross-entropy over seen compositions at temperature T. In the open world it is one over all
of them, where unseen ones get a margin by how infeasible they are:

    f(x, c) = p(x, c)                     c seen
            = p(x, c) - alpha rho(c)      c unseen,   rho(s, o) = (rho_o + rho_s) / 2

`rho` is taken from the primitives' vectors as they are after each epoch, and alpha rises to its value over the first
`margin_epochs`; in the first epoch, before any rho, unseen compositions stand aside. The paper's ResNet-18 is the
cached encoder here; its image head is a perceptron.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.layers.composition_index import Columns, Composer, Mlp
from duplex.layers.factors import unit
from duplex.methods.base import Setting
from duplex.methods.head import PairHead
from duplex.options import Options


@dataclass(frozen=True)
class CompCosOptions(Options):
    width: int = 512  # of the space in which images and compositions meet
    layers: int = 2  # hidden layers of the image head
    dropout: float = 0.1
    scale: float = 20.0  # 1 / T
    train_words: bool = True  # the primitives' vectors move from where the words put them
    margin: float = 0.4  # alpha; of the open world alone
    margin_epochs: int = 15

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.width > 0 and self.layers >= 0, "width is positive, layers at least 0"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"
        yield self.scale > 0, f"scale is {self.scale}; it is positive"
        yield self.margin >= 0 and self.margin_epochs >= 1, "margin is at least 0, margin_epochs at least 1"


class CompCos(PairHead[CompCosOptions]):
    Options = CompCosOptions

    def __init__(self, setting: Setting, options: CompCosOptions) -> None:
        super().__init__(setting, options, trained_words=options.train_words)
        width = options.width
        self.head = Mlp(setting.dim, width, width, options.layers, options.dropout)
        self.composer = Composer(self.words.width, width)
        if setting.world == "open":
            self.margins = self.held_back(options.scale)  # alpha rho(c) / T

    def image(self, z: Tensor) -> Tensor:
        return unit(self.head(unit(z)))

    def pairs(self, columns: Columns) -> Tensor:
        return unit(self.composer(self.words.states, self.words.objects, columns.states, columns.objects))

    def logits(self, image: Tensor, pairs: Tensor) -> Tensor:
        return self.options.scale * (image @ pairs.T)

    @torch.no_grad()
    def after_epoch(self, epoch: int) -> None:
        if self.margins is not None:
            alpha = self.options.margin * min(1.0, epoch / self.options.margin_epochs)
            rho = self.feasible(self.words.states, self.words.objects)
            self.margins.copy_(self.options.scale * alpha * torch.where(rho.isinf(), 0.0, rho))
