"""Co-CGE (Mancini et al., "Learning Graph Embeddings for Open World Compositional Zero-Shot Learning", TPAMI 2022),
over cached features.

CGE's graph, compared by cosines at temperature T as CompCos does. In the open world the graph holds all compositions:
what primitives hear of an unseen one weighs `max(0, rho(c))`, its feasibility, and the loss over all compositions gives
unseen ones the margin `alpha rho(c)`. Feasibility is that of the graph's own embeddings of states and objects, made
anew after each epoch; alpha rises to its value over the first `margin_epochs`, and in the first epoch unseen
compositions are heard by none and stand aside. In the closed world all ties weigh one and no margin is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.layers.factors import unit
from duplex.methods.base import Setting
from duplex.methods.cge import CgeOptions, GraphHead


@dataclass(frozen=True)
class CoCgeOptions(CgeOptions):
    scale: float = 20.0  # 1 / T
    margin: float = 0.4  # alpha; of the open world alone
    margin_epochs: int = 15

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield self.scale > 0 and self.margin >= 0, "scale is positive, margin at least 0"
        yield self.margin_epochs >= 1, f"margin_epochs is {self.margin_epochs}; it is at least 1"


class CoCge(GraphHead[CoCgeOptions]):
    Options = CoCgeOptions

    def __init__(self, setting: Setting, options: CoCgeOptions) -> None:
        super().__init__(setting, options)
        if setting.world == "open":
            self.margins = self.held_back(options.scale)  # alpha rho(c) / T
            self.network.graph.weights.copy_(torch.as_tensor(setting.labels.seen))

    def image(self, z: Tensor) -> Tensor:
        return unit(super().image(z))

    def logits(self, image: Tensor, pairs: Tensor) -> Tensor:
        return self.options.scale * (image @ pairs.T)

    @torch.no_grad()
    def after_epoch(self, epoch: int) -> None:
        if self.margins is None:
            return
        training = self.network.training
        nodes = self.network.eval()(self.words.states, self.words.objects)[-1]
        self.network.train(training)
        rho = self.feasible(nodes.states, nodes.objects)
        alpha = self.options.margin * min(1.0, epoch / self.options.margin_epochs)
        self.network.graph.weights.copy_(torch.where(rho.isinf(), 1.0, rho.clamp(min=0)))
        self.margins.copy_(self.options.scale * alpha * torch.where(rho.isinf(), 0.0, rho))
