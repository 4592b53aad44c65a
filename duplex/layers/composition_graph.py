"""Graph convolutions over primitives and compositions (Naeem et al., "Learning Graph Embeddings for Compositional
Zero-shot Learning", CVPR 2021), without a matrix over the nodes.

Nodes are states, objects and the graph's compositions. Each composition `c = (s, o)` ties s to o, s to c and o to c;
with self-loops a layer is `H' = D^-1 (A + I) H W`. As every composition has exactly two neighbours, its row is a mean
of three, and those of the primitives are sums over their compositions.

A composition outside of the graph listens to its two primitives and is heard by none: its embedding depends on nothing
else that is asked for.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from duplex.labels import Ints, contains_sorted
from duplex.layers.composition_index import Columns


class Nodes(NamedTuple):
    """Rows of every kind of node."""

    states: Tensor  # [M, w]
    objects: Tensor  # [N, w]
    pairs: Tensor  # [C, w]


class CompositionGraph(nn.Module):
    """Row-normalised means over neighbours. `weights` [C] of compositions weigh what primitives hear of them, and of
    each other by them (Co-CGE); a composition hears its primitives in full."""

    weights: Tensor

    def __init__(self, compositions: Ints, states: int, objects: int) -> None:
        super().__init__()
        self.columns = Columns(compositions, objects)
        self.sizes = states, objects
        self.register_buffer("weights", torch.ones(len(compositions)))

    def start(self, states: Tensor, objects: Tensor) -> Nodes:
        """A composition starts as the mean of its primitives."""
        return Nodes(states, objects, mean_pairs(states, objects, self.columns))

    def means(self, x: Nodes) -> Nodes:
        """`D^-1 (A + I) X`"""
        m, n, w = self.columns.states, self.columns.objects, self.weights[:, None]
        states = self._primitives(x.states, m, w * (x.objects.index_select(0, n) + x.pairs), self.sizes[0])
        objects = self._primitives(x.objects, n, w * (x.states.index_select(0, m) + x.pairs), self.sizes[1])
        return Nodes(states, objects, self.heard(x, x.pairs, self.columns))

    def _primitives(self, own: Tensor, group: Tensor, messages: Tensor, count: int) -> Tensor:
        sums = own + own.new_zeros(count, own.shape[1]).index_add(0, group, messages)
        degrees = 1 + 2 * self.weights.new_zeros(count).index_add(0, group, self.weights)
        return sums / degrees[:, None]

    @staticmethod
    def heard(x: Nodes, own: Tensor, columns: Columns) -> Tensor:
        """Means at compositions, of themselves and of their primitives [C, w]."""
        both = x.states.index_select(0, columns.states) + x.objects.index_select(0, columns.objects)
        return (own + both) / 3


class GraphNetwork(nn.Module):
    """`layers` graph convolutions with relu between them; each drops out of what comes into it."""

    def __init__(self, graph: CompositionGraph, inside: int, width: int, out: int, layers: int, rate: float) -> None:
        super().__init__()
        sizes = [inside, *[width] * (layers - 1), out] if layers else [inside]
        self.graph, self.rate = graph, rate
        self.weights = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = sizes[-1]
        self._asked: tuple[Columns, bool] | None = None

    def forward(self, states: Tensor, objects: Tensor) -> list[Nodes]:
        """The nodes before the first layer and after each."""
        found = [self.graph.start(states, objects)]
        for depth in range(len(self.weights)):
            means = self.graph.means(Nodes(*(dropout(rows, self.rate, self.training) for rows in found[-1])))
            found.append(Nodes(*(self._layer(depth, rows) for rows in means)))
        return found

    def pairs(self, found: list[Nodes], columns: Columns) -> Tensor:
        """Embeddings of any compositions `columns` [C, out], those of the graph from what was `found`."""
        mine = self.graph.columns.compositions
        place = self.graph.columns.places(columns.compositions).clamp(max=max(len(mine) - 1, 0))
        inside = mine[place] == columns.compositions if len(mine) else torch.zeros_like(place, dtype=torch.bool)
        if self._holds(columns):
            return found[-1].pairs.index_select(0, place)
        rows = mean_pairs(found[0].states, found[0].objects, columns)
        for depth, nodes in enumerate(found[:-1]):
            rows = self._layer(depth, self.graph.heard(nodes, rows, columns))
        if not len(mine):
            return rows
        return torch.where(inside[:, None], found[-1].pairs.index_select(0, place), rows)

    def _holds(self, columns: Columns) -> bool:
        """Whether all of some compositions are the graph's: found out on the host, once for columns that are asked for
        again."""
        if self._asked is None or self._asked[0] is not columns:
            self._asked = columns, bool(contains_sorted(self.graph.columns.host, columns.host).all())
        return self._asked[1]

    def _layer(self, depth: int, rows: Tensor) -> Tensor:
        rows = self.weights[depth](rows)
        return rows if depth == len(self.weights) - 1 else relu(rows)


def mean_pairs(states: Tensor, objects: Tensor, columns: Columns) -> Tensor:
    return (states.index_select(0, columns.states) + objects.index_select(0, columns.objects)) / 2
