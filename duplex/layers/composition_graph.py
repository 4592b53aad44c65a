"""Graph convolutions over primitives and compositions (CGE, duplex/methods/cge.py), without an adjacency matrix.

    H' = D^-1 (A + I) H W

* H: node features of states, objects and the graph's compositions;  A: adjacency;  D: degrees;  W: weights

Each composition `c = (s, o)` adds the edges s-o, s-c and o-c. A composition has two neighbours, so its row of H' is a
mean of three; rows of states and objects are sums over their compositions. A composition outside of the graph receives
messages from its state and its object and sends none, so its embedding does not depend on the other candidates.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from duplex.labels import Ints, contains_sorted
from duplex.layers.composition_index import CompositionIndex


class NodeFeatures(NamedTuple):
    """Feature vectors of a graph's nodes."""

    states: Tensor  # [M, w]
    objects: Tensor  # [N, w]
    compositions: Tensor  # [C, w]


class CompositionGraph(nn.Module):
    """Graph of states, objects and compositions that averages features over each node's neighbours.

    `weights` [C] scale the messages from compositions to their states and objects (Co-CGE), not those in the other
    direction.
    """

    weights: Tensor

    def __init__(self, compositions: Ints, states: int, objects: int) -> None:
        super().__init__()
        self.columns = CompositionIndex(compositions, objects)
        self.sizes = states, objects
        self.register_buffer("weights", torch.ones(len(compositions)))

    def means(self, x: NodeFeatures) -> NodeFeatures:
        """For each node, the mean feature of the node and its neighbours, `D^-1 (A + I) X`."""
        m, n, w = self.columns.states, self.columns.objects, self.weights[:, None]
        states = self._primitive_means(x.states, m, w * (x.objects.index_select(0, n) + x.compositions), self.sizes[0])
        objects = self._primitive_means(x.objects, n, w * (x.states.index_select(0, m) + x.compositions), self.sizes[1])
        return NodeFeatures(states, objects, self.composition_means(x, x.compositions, self.columns))

    def _primitive_means(self, rows: Tensor, group: Tensor, messages: Tensor, count: int) -> Tensor:
        sums = rows + rows.new_zeros(count, rows.shape[1]).index_add(0, group, messages)
        degrees = 1 + 2 * self.weights.new_zeros(count).index_add(0, group, self.weights)
        return sums / degrees[:, None]

    @staticmethod
    def composition_means(x: NodeFeatures, rows: Tensor, columns: CompositionIndex) -> Tensor:
        """Per composition, the mean of its own feature in `rows`, its state's and its object's [C, w]."""
        both = x.states.index_select(0, columns.states) + x.objects.index_select(0, columns.objects)
        return (rows + both) / 3


class GraphNetwork(nn.Module):
    """Graph convolutions of `inside`, `width` and `out` channels, with relu between them and dropout before each."""

    def __init__(self, graph: CompositionGraph, inside: int, width: int, out: int, layers: int, rate: float) -> None:
        super().__init__()
        sizes = [inside, *[width] * (layers - 1), out] if layers else [inside]
        self.graph, self.rate = graph, rate
        self.weights = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = sizes[-1]

    def forward(self, states: Tensor, objects: Tensor) -> list[NodeFeatures]:
        """All nodes' features before the first layer and after each; compositions begin with the mean of both words."""
        features = [NodeFeatures(states, objects, mean_pairs(states, objects, self.graph.columns))]
        for depth in range(len(self.weights)):
            means = self.graph.means(NodeFeatures(*(dropout(rows, self.rate, self.training) for rows in features[-1])))
            features.append(NodeFeatures(*(self._layer(depth, rows) for rows in means)))
        return features

    def embed(self, features: list[NodeFeatures], columns: CompositionIndex) -> Tensor:
        """Embeddings [C, out] of any compositions, in the graph or not, given the result of `forward`."""
        listed = self.graph.columns.compositions
        place = self.graph.columns.positions(columns.compositions).clamp(max=len(listed) - 1)
        if bool(contains_sorted(self.graph.columns.compositions_np, columns.compositions_np).all()):
            return features[-1].compositions.index_select(0, place)
        rows = mean_pairs(features[0].states, features[0].objects, columns)
        for depth, nodes in enumerate(features[:-1]):
            rows = self._layer(depth, self.graph.composition_means(nodes, rows, columns))
        inside = (listed[place] == columns.compositions)[:, None]
        return torch.where(inside, features[-1].compositions.index_select(0, place), rows)

    def _layer(self, depth: int, rows: Tensor) -> Tensor:
        rows = self.weights[depth](rows)
        return rows if depth == len(self.weights) - 1 else relu(rows)


def mean_pairs(states: Tensor, objects: Tensor, columns: CompositionIndex) -> Tensor:
    """Mean of the state's and the object's feature of each composition [C, w]."""
    return (states.index_select(0, columns.states) + objects.index_select(0, columns.objects)) / 2
