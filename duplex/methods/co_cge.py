"""Co-CGE (Mancini et al., "Learning Graph Embeddings for Open World Compositional Zero-Shot Learning", TPAMI 2022).

CGE's graph, compared by cosines at temperature T as in CompCos. In the open world the graph holds all compositions:
messages of an unseen one to its primitives weigh `max(0, rho(c))`, its feasibility, and the loss over all compositions
gives unseen ones the margin `alpha rho(c)`. Feasibility is computed from the graph's own embeddings of states and
objects after each epoch; alpha rises to its final value over the first `margin_epochs`. In the first epoch unseen
compositions send no messages and are excluded from the loss. In the closed world all messages weigh one and there is
no margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.layers.factors import unit
from duplex.methods.base import TaskContext
from duplex.methods.cge import CgeOptions, GraphHead
from duplex.options import Count, NonNegative, Positive


@dataclass(frozen=True)
class CoCgeOptions(CgeOptions):
    scale: Positive = 20.0  # 1 / T of cosines
    margin: NonNegative = 0.4  # final alpha; only in the open world
    margin_epochs: Count = 15  # epochs until alpha reaches its final value


class CoCge(GraphHead[CoCgeOptions]):
    """Co-CGE: cosines of image and graph embeddings; trained with feasibility margins in the open world."""

    def __init__(self, task: TaskContext, options: CoCgeOptions) -> None:
        super().__init__(task, options)
        self.scale = options.scale
        if task.world == "open":
            self.margins = self.initial_margins()  # alpha rho(c) / T
            self.network.graph.weights.copy_(torch.as_tensor(task.labels.seen))

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
