"""Co-CGE: CGE's graph for the open world, with feasibility.

Mancini et al., "Learning Graph Embeddings for Open World Compositional Zero-Shot Learning", TPAMI 2022.

    S = cos(f(x), h_c)                                                      a cross-entropy of S / T is the loss
    open world: messages of unseen compositions weigh max(0, rho(c)), the loss uses S - alpha rho(c) for them

* f(x), h_c: embeddings of an image and a composition, as in CGE (cge.py);  T: temperature
* rho(c): feasibility of an unseen composition, from the graph's embeddings of states and objects after each epoch
* alpha: rises to its final value over the first `margin_epochs`

In the first epoch unseen compositions send no messages and are excluded from the loss. In the closed world all messages
weigh one and there is no margin.
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
    """Co-CGE: CGE with cosines and, in the open world, margins by feasibility for unseen compositions."""

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
        self.raise_margins(rho, epoch)
