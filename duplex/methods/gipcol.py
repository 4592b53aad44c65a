"""GIPCOL: a graph network computes the vectors of states and objects in the prompts.

Xu et al., "GIPCOL: Graph-Injected Soft Prompting for Compositional Zero-Shot Learning", WACV 2024.

    prompt = [v_1..v_K, s', o'],    s' = s + G(s),    o' = o + G(o)

* v: learned prefix;  s, o: vectors of state and object, initialised with token embeddings
* G: graph network over states, objects, compositions; a composition's input is the mean of both

The frozen text tower encodes prompts; the loss is a cross-entropy over seen compositions. In the
paper, s and o stay fixed and G's output replaces them (`words: replaced`). By default, they are
trained here, and G's last layer starts at zero, so that training starts with words that the tower
knows. `edges: false` removes the network, which leaves CSP with a learned prefix. The graph
contains the compositions that the data set's splits list, in the open world all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.init import zeros_

from duplex.encoders.base import TextTower
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, Inspectable, MethodContext
from duplex.methods.cge import CompositionGraph, GraphNetwork
from duplex.methods.families import TextMethod, TextOptions
from duplex.methods.layers import CompositionIndex, unit
from duplex.methods.prompts import TEMPLATE, Prompts, Prototypes, Source
from duplex.options import Count, LearningRate, Rate, Template, refuse


@dataclass(frozen=True)
class GipcolOptions(TextOptions):
    context: Literal["learned", "fixed"] = "learned"  # whether the prefix is trained
    template: Template = TEMPLATE  # words whose tokens initialise the prefix
    edges: bool = True  # whether there is a graph network
    layers: Count = 2  # graph convolutions
    width: Count = 1024  # outputs of every convolution but the last
    dropout: Rate = 0.5  # in the graph network
    words: Literal["added", "replaced"] = "added"  # G's output is added to s, o, or replaces them
    network_rate: LearningRate | None = None  # of the graph network; null: that of training
    network_decay: Rate | None = None  # its weight decay; null: that of training

    def rules(self) -> Iterable[tuple[object, str]]:
        is_plain = self.words == "added" and self.network_rate is None and self.network_decay is None
        message = "edges: false uses no network; leave words, network_rate and network_decay out"
        yield refuse(not self.edges and not is_plain, message)


class GraphPrompts(Prompts):
    """Prompts of compositions whose state and object vectors a graph network computes."""

    starts: Tensor

    def __init__(self, labels: LabelSpace, tower: TextTower, context: Source, template: str, replaced: bool) -> None:
        super().__init__(labels, tower, context=context, vocabulary="learned", paths="composition", template=template)
        assert self.learned_rows is not None
        self.network: GraphNetwork | None = None
        self.replaced = replaced
        self.register_buffer("starts", self.learned_rows.detach().clone(), persistent=False)

    def lexicon(self) -> Tensor:
        if self.network is None or self.learned_rows is None:
            return super().lexicon()
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
        self.prompts = GraphPrompts(labels, tower, options.context, options.template, options.words == "replaced")
        if options.edges:
            candidates = labels.candidates(context.world, "train")
            graph = CompositionGraph(candidates, len(labels.states), len(labels.objects))
            width = options.width
            rate = options.dropout
            self.prompts.network = GraphNetwork(graph, tower.width, width, tower.width, options.layers, rate)
            for parameter in self.prompts.network.weights[-1].parameters() if options.words == "added" else ():
                zeros_(parameter)

    def groups(self) -> list[dict[str, Any]]:
        options = {"lr": self.options.network_rate, "weight_decay": self.options.network_decay}
        own = {name: value for name, value in options.items() if value is not None}
        if self.prompts.network is None or not own:
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
