"""GIPCOL: a graph network computes the vectors of states and objects in the prompts.

Xu et al., "GIPCOL: Graph-Injected Soft Prompting for Compositional Zero-Shot Learning", WACV 2024.

    prompt = [v_1..v_K, s', o'],    s' = s + G(s),    o' = o + G(o)

* v: learned prefix;  s, o: vectors of state and object, initialised with token embeddings
* G: graph network over states, objects, compositions; a composition's input is the mean of both

The frozen text tower encodes prompts; the loss is a cross-entropy over seen compositions. In the
paper, s and o stay fixed and G's output replaces them (`words: replaced`). By default, they are
trained here, and G's last layer starts at zero, so that training starts with words that the tower
knows. The graph contains the compositions that the data set's splits list, in the open world all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.init import zeros_

from duplex.encoders.base import TextTower
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, Inspectable, MethodContext
from duplex.methods.cge import CompositionGraph, GraphNetwork
from duplex.methods.families import TextMethod, TextOptions
from duplex.methods.layers import CompositionIndex, unit
from duplex.methods.prompts import TEMPLATE, Prompts, Prototypes, Source
from duplex.options import Count, LearningRate, Rate, Template


@dataclass(frozen=True)
class GipcolOptions(TextOptions):
    context: Literal["learned", "fixed"] = "learned"  # whether the prefix is trained
    template: Template = TEMPLATE  # words whose tokens initialise the prefix
    layers: Count = 2  # graph convolutions
    width: Count = 1024  # outputs of every convolution but the last
    dropout: Rate = 0.5  # in the graph network
    words: Literal["added", "replaced"] = "added"  # G's output is added to s, o, or replaces them
    network_rate: LearningRate | None = None  # of the graph network; null: that of training
    network_decay: Rate | None = None  # its weight decay; null: that of training


class GraphPrompts(Prompts):
    """Prompts of compositions whose state and object vectors a graph network computes."""

    starts: Tensor
    learned_rows: nn.Parameter

    def __init__(
        self,
        labels: LabelSpace,
        tower: TextTower,
        context: Source,
        template: str,
        network: GraphNetwork,
        replaced: bool,
    ) -> None:
        super().__init__(labels, tower, context=context, vocabulary="learned", paths="composition", template=template)
        self.network = network
        self.replaced = replaced
        self.register_buffer("starts", self.learned_rows.detach().clone(), persistent=False)

    def lexicon(self) -> Tensor:
        states = len(self.labels.states)
        count = len(self.name_rows)
        names = (self.starts if self.replaced else self.dropped(self.learned_rows))[-count:]
        nodes = self.network(names[:states], names[states:])[-1]
        found = torch.cat([nodes.states, nodes.objects])
        words = self.dropped(found) if self.replaced else names + found
        return torch.cat([self.frozen_rows, self.learned_rows[:-count], words])


class Gipcol(TextMethod[GipcolOptions]):
    """GIPCOL: scores by prompts whose state and object vectors a graph network computes."""

    def __init__(self, context: MethodContext, options: GipcolOptions) -> None:
        super().__init__(context, options)
        labels = context.labels
        tower = context.tower
        replaced = options.words == "replaced"
        graph = CompositionGraph(labels.candidates(context.world, "train"), len(labels.states), len(labels.objects))
        network = GraphNetwork(graph, tower.width, options.width, tower.width, options.layers, options.dropout)
        for parameter in network.weights[-1].parameters() if not replaced else ():
            zeros_(parameter)
        self.prompts = GraphPrompts(labels, tower, options.context, options.template, network, replaced)

    def groups(self) -> list[dict[str, Any]]:
        options = {"lr": self.options.network_rate, "weight_decay": self.options.network_decay}
        own = {name: value for name, value in options.items() if value is not None}
        if not own:
            return super().groups()
        others = [each for name, each in self.named_parameters() if not name.startswith("prompts.network.")]
        return [{"params": others}, {"params": list(self.prompts.network.parameters()), **own}]

    def shared(self) -> Prototypes:
        return Prototypes(*self.prompts(self.labels.pairs["train"], self.checkpointing))

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        target = self.train_candidates.positions_of_listed(batch.compositions)
        return {"semantic": cross_entropy(self.logits(batch.cls, shared.compositions), target)}

    def prepare(self, candidates: CompositionIndex) -> Tensor:
        return self.prompts.encode(candidates.compositions_np).compositions

    def inspectable(self) -> Inspectable:
        return Inspectable(
            features=lambda inputs: unit(inputs["cls"]), semantic=lambda c: self.prompts.encode(c).compositions
        )
