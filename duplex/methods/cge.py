"""CGE and Co-CGE: a graph network embeds states, objects and compositions.

Naeem et al., "Learning Graph Embeddings for Compositional Zero-shot Learning", CVPR 2021. Mancini
et al., "Learning Graph Embeddings for Open World Compositional Zero-Shot Learning", TPAMI 2022
(Co-CGE).

    H' = relu(D^-1 (A + I) H W)              a graph convolution, two by default; without relu in the last
    CGE:     S = f(x) . h_c
    Co-CGE:  S = cos(f(x), h_c) / T,  in the open world for unseen c  S - alpha rho(c) / T  in the loss

* H: features of nodes, at first word vectors;  A, D: adjacency, degree;  W: weights
* h_c: a composition's unit embedding after the last convolution;  f(x): embedding of image x
* T: temperature;  rho(c): feasibility, from embeddings of states and objects after each epoch
* alpha: rises to its final value over the first `margin_epochs`

The loss is a cross-entropy over seen compositions. The graph contains all compositions that the
data set's splits list, in the open world all compositions. There, Co-CGE weighs messages of unseen
compositions by max(0, rho(c)); in its first epoch they send none and are excluded from the loss.
The cached encoder replaces the papers' trained backbone, and f is a perceptron on the unit feature. In
the published code, f(x) is the raw feature on MIT-States and C-GQA (`image_head: none`), on UT-Zappos
`relu` of a linear map of it (`image_head: rectified`); Co-CGE always has the former.

No adjacency matrix is built: composition `c = (s, o)` adds the edges s-o, s-c and o-c. A
composition outside of the graph receives messages and sends none, so its embedding does not depend
on the other candidates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from duplex.labels import Ints, contains_sorted
from duplex.methods.base import MethodContext
from duplex.methods.families import EmbeddingHead, WordOptions
from duplex.methods.layers import CompositionIndex, Mlp, unit
from duplex.options import Count, Natural, NonNegative, Positive, Rate, refuse

IMAGE_WIDTH = 768  # hidden units of the image head


class NodeFeatures(NamedTuple):
    states: Tensor  # [M, w]
    objects: Tensor  # [N, w]
    compositions: Tensor  # [C, w]


class CompositionGraph(nn.Module):
    """Graph of words and pairs, averages over neighbours; `weights` [C]: of pairs' messages."""

    weights: Tensor

    def __init__(self, compositions: Ints, states: int, objects: int) -> None:
        super().__init__()
        self.columns = CompositionIndex(compositions, objects)
        self.sizes = states, objects
        self.register_buffer("weights", torch.ones(len(compositions)))

    def means(self, x: NodeFeatures) -> NodeFeatures:
        """Mean features of nodes and neighbours; `weights`: of edges to compositions."""
        m = self.columns.states
        n = self.columns.objects
        w = self.weights[:, None]
        to_states = w * (x.objects.index_select(0, n) + x.compositions)
        states = self._primitive_means(x.states, m, to_states, self.sizes[0])
        to_objects = w * (x.states.index_select(0, m) + x.compositions)
        objects = self._primitive_means(x.objects, n, to_objects, self.sizes[1])
        return NodeFeatures(states, objects, self.composition_means(x, x.compositions, self.columns))

    def _primitive_means(self, rows: Tensor, group: Tensor, messages: Tensor, count: int) -> Tensor:
        sums = rows + rows.new_zeros(count, rows.shape[1]).index_add(0, group, messages)
        degrees = 1 + 2 * self.weights.new_zeros(count).index_add(0, group, self.weights)
        return sums / degrees[:, None]

    @staticmethod
    def composition_means(x: NodeFeatures, rows: Tensor, columns: CompositionIndex) -> Tensor:
        """Mean [C, w] of each composition's own `rows`, its state's and its object's (in `x`)."""
        both = x.states.index_select(0, columns.states) + x.objects.index_select(0, columns.objects)
        return (rows + both) / 3


class GraphNetwork(nn.Module):
    """Graph network of `layers` convolutions; a call returns every layer's features."""

    def __init__(self, graph: CompositionGraph, inside: int, width: int, out: int, layers: int, rate: float) -> None:
        super().__init__()
        sizes = [inside, *[width] * (layers - 1), out] if layers else [inside]
        self.graph = graph
        self.rates = [rate] * layers  # of dropout before each convolution
        self.weights = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = sizes[-1]

    def forward(self, states: Tensor, objects: Tensor) -> list[NodeFeatures]:
        features = [NodeFeatures(states, objects, mean_pairs(states, objects, self.graph.columns))]
        for depth in range(len(self.weights)):
            dropped = [dropout(rows, self.rates[depth], self.training) for rows in features[-1]]
            means = self.graph.means(NodeFeatures(*dropped))
            features.append(NodeFeatures(*(self._layer(depth, rows) for rows in means)))
        return features

    def embed(self, features: list[NodeFeatures], columns: CompositionIndex) -> Tensor:
        """Embeddings [C, out] of any compositions; `features`: result of `forward`."""
        listed = self.graph.columns.compositions
        place = self.graph.columns.positions_of_listed(columns.compositions).clamp(max=len(listed) - 1)
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
    """The mean of state's and object's features of each composition in `columns` [C, w]."""
    return (states.index_select(0, columns.states) + objects.index_select(0, columns.objects)) / 2


@dataclass(frozen=True)
class CgeOptions(WordOptions):
    layers: Natural = 2  # graph convolutions; 0: embeddings are means of words
    width: Count = 4096  # outputs of every convolution but the last
    out: Count = 512  # outputs of the last convolution; with `image_head: none`, the feature's width
    image_head: Literal["perceptron", "rectified", "none"] = "perceptron"  # what makes f(x) of a feature
    image_layers: Natural = 2  # hidden layers of the perceptron; 0: a linear map
    dropout: Rate = 0.5  # before every convolution, and in the image head
    dropout_last: bool = True  # whether there is dropout before the last convolution

    def rules(self) -> Iterable[tuple[object, str]]:
        unused = {"perceptron": (), "rectified": ("image_layers",), "none": ("image_layers", "out")}
        for name in unused[self.image_head]:
            is_set = getattr(self, name) != getattr(type(self), name)
            yield refuse(is_set, f"image_head: {self.image_head} has no {name}; leave {name} out")
        yield refuse(self.image_head == "none" and not self.layers, "image_head: none needs layers")


CgeOptionsT = TypeVar("CgeOptionsT", bound=CgeOptions)


class GraphHead(EmbeddingHead[CgeOptionsT], Generic[CgeOptionsT]):
    """Base class of CGE and its variants: a perceptron embeds images, a graph network pairs."""

    def __init__(self, context: MethodContext, options: CgeOptionsT) -> None:
        super().__init__(context, options, trained_words=False)
        labels = context.labels
        candidates = labels.candidates(context.world, "train")
        graph = CompositionGraph(candidates, len(labels.states), len(labels.objects))
        rate = options.dropout
        kind = options.image_head
        out = context.dim if kind == "none" else options.out
        self.network = GraphNetwork(graph, self.words.width, options.width, out, options.layers, rate)
        if not options.dropout_last:
            self.network.rates[-1:] = [0.0]
        self.head: nn.Module = nn.Identity()
        if kind == "perceptron":
            self.head = Mlp(context.dim, IMAGE_WIDTH, self.network.out, options.image_layers, rate)
        elif kind == "rectified":
            self.head = nn.Sequential(nn.Linear(context.dim, self.network.out), nn.ReLU())

    def embed_images(self, z: Tensor) -> Tensor:
        is_raw = self.options.image_head != "perceptron"
        embedded: Tensor = self.head(z.to(self.words.states.dtype) if is_raw else unit(z))
        return embedded

    def prepare(self, candidates: CompositionIndex) -> Any:
        return unit(self.network.embed(self.network(self.words.states, self.words.objects), candidates))


class Cge(GraphHead[CgeOptions]):
    """CGE: the score is the dot product of image embedding and composition embedding."""


@dataclass(frozen=True)
class CoCgeOptions(CgeOptions):
    scale: Positive = 20.0  # 1 / T of cosines
    margin: NonNegative = 0.4  # final alpha; only in the open world
    margin_epochs: Count = 15  # epochs until alpha reaches its final value


class CoCge(GraphHead[CoCgeOptions]):
    """Co-CGE: scores are scaled cosines; open-world training subtracts feasibility margins."""

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
