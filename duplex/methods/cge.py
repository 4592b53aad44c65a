"""CGE (Naeem et al., "Learning Graph Embeddings for Compositional Zero-shot Learning", CVPR 2021), over cached
features.

A graph of states, objects and compositions starts at word vectors; two graph convolutions `H' = relu(D^-1 A H W)` give
every composition its embedding h_c, of unit length, and an image is scored by a dot product `f(x) . h_c`. The loss is
a cross-entropy over seen compositions. The graph holds the compositions of the world that training is for; how others
get an embedding is said in `duplex.layers.composition_graph`. The paper's trained backbone is the cached encoder here,
as in its rows with a fixed one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from duplex.layers.composition_graph import CompositionGraph, GraphNetwork
from duplex.layers.composition_index import Columns, Mlp
from duplex.layers.factors import unit
from duplex.methods.base import Setting
from duplex.methods.head import PairHead
from duplex.options import Options


@dataclass(frozen=True)
class CgeOptions(Options):
    layers: int = 2  # graph convolutions; none: a composition is the mean of its words
    width: int = 4096  # between two of them
    out: int = 512  # of the last one
    image_layers: int = 2  # hidden layers of the image head; none: linear
    image_width: int = 768
    dropout: float = 0.5

    def rules(self) -> Iterable[tuple[object, str]]:
        yield self.layers >= 0 and self.image_layers >= 0, "layers and image_layers are at least 0"
        yield min(self.width, self.out, self.image_width) > 0, "width, out and image_width are positive"
        yield 0 <= self.dropout < 1, f"dropout is {self.dropout}; it lies in [0, 1)"


Row = TypeVar("Row", bound=CgeOptions)


class GraphHead(PairHead[Row], Generic[Row]):
    """An image head and a graph network."""

    def __init__(self, setting: Setting, options: Row) -> None:
        super().__init__(setting, options, trained_words=False)
        labels = setting.labels
        graph = CompositionGraph(labels.target(setting.world, "train"), len(labels.states), len(labels.objects))
        inside, rate = self.words.width, options.dropout
        self.network = GraphNetwork(graph, inside, options.width, options.out, options.layers, rate)
        self.head = Mlp(setting.dim, options.image_width, self.network.out, options.image_layers, rate)

    def image(self, z: Tensor) -> Tensor:
        found: Tensor = self.head(unit(z))
        return found

    def pairs(self, columns: Columns) -> Tensor:
        return unit(self.network.pairs(self.network(self.words.states, self.words.objects), columns))


class Cge(GraphHead[CgeOptions]):
    Options = CgeOptions
