"""Co-CGE (Mancini et al., "Learning Graph Embeddings for Open World Compositional Zero-Shot Learning", TPAMI 2022),
over cached features.

CGE's graph, compared by cosines at temperature T as CompCos does. In the open world the graph holds all compositions:
an unseen one's ties weigh `max(0, rho(c))`, its feasibility, and the loss over all compositions gives unseen ones the
margin `alpha rho(c)`. Feasibility is that of the word vectors, which stay; the paper's is that of the graph's
embeddings, refreshed in training. In the closed world all ties weigh one and no margin is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.methods.base import Setting
from duplex.methods.cge import CgeOptions, GraphHead
from duplex.parts.factors import unit
from duplex.parts.heads import Columns


@dataclass(frozen=True)
class CoCgeOptions(CgeOptions):
    scale: float = 20.0  # 1 / T
    margin: float = 0.4  # alpha; of the open world alone

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield self.scale > 0 and self.margin >= 0, "scale is positive, margin at least 0"


class CoCge(GraphHead[CoCgeOptions]):
    Options = CoCgeOptions

    def __init__(self, setting: Setting, options: CoCgeOptions) -> None:
        super().__init__(setting, options)
        if setting.world == "open":
            rho = self.feasible()
            weights = self.network.graph.weights
            weights.copy_(torch.where(rho.isinf(), 1.0, rho.clamp(min=0)))
            self.margins = options.scale * options.margin * torch.where(rho.isinf(), 0.0, rho)

    def image(self, z: Tensor) -> Tensor:
        return unit(super().image(z))

    def pairs(self, columns: Columns) -> Tensor:
        return unit(super().pairs(columns))

    def logits(self, image: Tensor, pairs: Tensor) -> Tensor:
        return self.options.scale * (image @ pairs.T)
