"""GIPCOL (Xu et al., "GIPCOL: Graph-Injected Soft Prompting for Compositional Zero-Shot Learning", WACV 2024).

A prompt is a learned prefix and one vector a primitive, `[v_1..v_K, s, o]`. The primitives' vectors come out of a
graph network over states, objects and compositions, whose nodes start at token embeddings, a composition as the mean
of its primitives. The frozen text tower encodes the prompts; cross-entropy over seen compositions.

This version adds what the graph says to the vectors it started from, `s' = s + G(s)`, and its last layer starts at
zero: the frozen tower begins with words that it knows. These vectors are learned too; the published ones stay, and
what the graph says stands in their place. `edges: false` leaves the vectors as they are, which is CSP
with a learned prefix. The graph holds the compositions of the world that training is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.init import zeros_

from duplex.encoders.text import TextTower
from duplex.labels import Ints, LabelSpace
from duplex.layers.composition_graph import CompositionGraph, GraphNetwork
from duplex.layers.composition_index import Columns
from duplex.layers.factors import unit
from duplex.layers.prompt_paths import TEMPLATE, Prompts, Prototypes, Source
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting
from duplex.methods.inspectable import Exhibits
from duplex.options import Options


@dataclass(frozen=True)
class GipcolOptions(Options):
    context: Literal["learned", "fixed"] = "learned"  # the prefix
    template: str = TEMPLATE  # what the prefix starts from
    edges: bool = True
    layers: int = 2  # graph convolutions
    width: int = 1024  # between two of them
    dropout: float = 0.5

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.layers >= 1 and self.width > 0, "layers is at least 1, width positive; edges: false takes no graph"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"
        yield self.template.strip(), "template is empty; give at least one word such as 'a photo of'"


class GraphPrompts(Prompts):
    """Composition prompts whose primitives' vectors went through a graph network."""

    def __init__(self, labels: LabelSpace, tower: TextTower, context: Source, template: str) -> None:
        super().__init__(labels, tower, context=context, vocabulary="learned", paths="c", template=template)
        self.network: GraphNetwork | None = None

    def lexicon(self) -> Tensor:
        assert self.learned_rows is not None
        if self.network is None:
            return super().lexicon()
        states, count = len(self.labels.states), len(self.name_rows)
        context, names = self.learned_rows[:-count], self.learned_rows[-count:]  # the primitives' rows are the last
        found = self.network(names[:states], names[states:])[-1]
        return torch.cat([self.frozen_rows, context, names + torch.cat([found.states, found.objects])])


class Gipcol(Method[GipcolOptions]):
    Options = GipcolOptions

    def __init__(self, setting: Setting, options: GipcolOptions) -> None:
        super().__init__(setting, options)
        labels, tower = setting.labels, setting.tower
        self.scale = math.exp(tower.logit_scale)  # 1 / tau
        self.prompts = GraphPrompts(labels, tower, options.context, options.template)
        if options.edges:
            graph = CompositionGraph(labels.target(setting.world, "train"), len(labels.states), len(labels.objects))
            width, rate = options.width, options.dropout
            self.prompts.network = GraphNetwork(graph, tower.width, width, tower.width, options.layers, rate)
            for rows in self.prompts.network.weights[-1].parameters():
                zeros_(rows)
        self.columns = Columns(labels.pairs["train"], len(labels.objects))

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"})

    def shared(self) -> Prototypes:
        found: Prototypes = self.prompts(self.labels.pairs["train"], self.checkpointing)
        return found

    def logits(self, z: Tensor, rows: Tensor) -> Tensor:
        """`cos(z, t) / tau` [B, C]"""
        return self.scale * unit(z) @ rows.T

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        own = self.columns.places(batch.compositions)
        return {"ct": cross_entropy(self.logits(batch.z, shared.compositions), own)}

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        rows = self.prompts.encode(columns).compositions

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            return self.logits(inputs["cls"], rows).softmax(-1)

        return scores

    def exhibits(self) -> Exhibits:
        @torch.no_grad()
        def semantic(compositions: Ints) -> Tensor:
            return self.prompts.encode(compositions).compositions

        return replace(Exhibits(), features=lambda inputs: unit(inputs["cls"]), semantic=semantic)
