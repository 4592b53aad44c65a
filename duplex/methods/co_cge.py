"""Co-CGE (Mancini et al., "Learning Graph Embeddings for Open World Compositional Zero-Shot Learning", TPAMI 2022).

Compositions are embedded by CGE's graph of states, objects and compositions (duplex/methods/cge.py), and compared with
images by cosines at temperature T, as in CompCos. In the open world the graph holds all compositions, and `rho(c)`, the
feasibility (plausibility) of an unseen composition c, has two effects: its messages to its state and object weigh
`max(0, rho(c))`, and the loss, a cross-entropy over all compositions, subtracts the margin `alpha rho(c)` from its
cosine. Feasibility is computed from the graph's embeddings of states and objects after each epoch; alpha rises to its
final value over the first `margin_epochs`. In the first epoch unseen compositions send no messages and are excluded
from the loss. In the closed world all messages weigh one and there is no margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.layers.factors import unit
from duplex.methods.base import MethodContext
from duplex.methods.cge import CgeOptions, GraphHead
from duplex.options import Count, NonNegative, Positive


@dataclass(frozen=True)
class CoCgeOptions(CgeOptions):
    scale: Positive = 20.0  # 1 / T of cosines
    margin: NonNegative = 0.4  # final alpha; only in the open world
    margin_epochs: Count = 15  # epochs until alpha reaches its final value


class CoCge(GraphHead[CoCgeOptions]):
    """Co-CGE: the score is the cosine of an image's embedding and a composition's, which a graph network computes. In
    the open world, training gives unseen compositions margins by feasibility (plausibility)."""

    def __init__(self, context: MethodContext, options: CoCgeOptions) -> None:
        super().__init__(context, options)
        self.scale = options.scale
        if context.world == "open":
            self.margins = self.initial_margins()  # alpha rho(c) / T
            self.network.graph.weights.copy_(torch.as_tensor(context.labels.seen))

    def embed_images(self, z: Tensor) -> Tensor:
        return unit(super().embed_images(z))

    @torch.no_grad()
    def after_epoch(self, epoch: int) -> None:
        if self.margins is None:
            return
        training = self.network.training
        nodes = self.network.eval()(self.words.states, self.words.objects)[-1]
        self.network.train(training)
        rho = self.feasibility(nodes.states, nodes.objects)
        self.network.graph.weights.copy_(torch.where(rho.isinf(), 1.0, rho.clamp(min=0)))
        alpha = self.options.margin * min(1.0, epoch / self.options.margin_epochs)
        self.margins.copy_(self.options.scale * alpha * torch.where(rho.isinf(), 0.0, rho))
