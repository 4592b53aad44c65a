"""CGE: a graph network embeds states, objects and compositions.

Naeem et al., "Learning Graph Embeddings for Compositional Zero-shot Learning", CVPR 2021.

    H' = relu(D^-1 A H W),    S = f(x) . h_c

* H: node features of states, objects and compositions, at first word vectors;  A, D: adjacency and degrees
* W: weights of one of two graph convolutions;  h_c: a composition's unit embedding after the last
* f(x): embedding of image x by a perceptron

The loss is a cross-entropy over seen compositions. The graph's compositions are all that the data set's splits list, or
in the open world all. The paper's trained backbone is the cached encoder here, as in its results with a fixed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from duplex.layers.composition_graph import CompositionGraph, GraphNetwork
from duplex.layers.composition_index import CompositionIndex
from duplex.layers.factors import Mlp, unit
from duplex.methods.base import MethodContext
from duplex.methods.head import EmbeddingHead
from duplex.options import Count, Natural, Options, Rate


@dataclass(frozen=True)
class CgeOptions(Options):
    layers: Natural = 2  # graph convolutions; 0: a composition's embedding is the mean of its words
    width: Count = 4096  # outputs of every convolution but the last
    out: Count = 512  # outputs of the last convolution
    image_layers: Natural = 2  # hidden layers of the image head; 0: a linear map
    image_width: Count = 768  # hidden units of the image head
    dropout: Rate = 0.5  # in the graph network and the image head


CgeOptionsT = TypeVar("CgeOptionsT", bound=CgeOptions)


class GraphHead(EmbeddingHead[CgeOptionsT], Generic[CgeOptionsT]):
    """Base class of CGE and its variants: a perceptron embeds images, and a graph network embeds compositions."""

    def __init__(self, context: MethodContext, options: CgeOptionsT) -> None:
        super().__init__(context, options, trained_words=False)
        labels = context.labels
        graph = CompositionGraph(labels.candidates(context.world, "train"), len(labels.states), len(labels.objects))
        word_width, rate = self.words.width, options.dropout
        self.network = GraphNetwork(graph, word_width, options.width, options.out, options.layers, rate)
        self.head = Mlp(context.dim, options.image_width, self.network.out, options.image_layers, rate)

    def embed_images(self, z: Tensor) -> Tensor:
        embedded: Tensor = self.head(unit(z))
        return embedded

    def prepare(self, candidates: CompositionIndex) -> Any:
        return unit(self.network.embed(self.network(self.words.states, self.words.objects), candidates))


class Cge(GraphHead[CgeOptions]):
    """CGE: dot products of an image's embedding and a composition's, which a graph network computes."""
