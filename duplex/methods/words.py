"""CompCos: images and compositions on a unit sphere, with margins by feasibility in the open world.

Mancini et al., "Open World Compositional Zero-Shot Learning", CVPR 2021.

    p(x, c) = cos(w(x), phi(s, o)),    phi(s, o) = W [v_s ; v_o]
    f(x, c) = p(x, c)                     c seen
            = p(x, c) - alpha rho(c)      c unseen,   rho(s, o) = (rho_o + rho_s) / 2

* w: perceptron on the image feature;  v: word vectors;  W: linear map
* rho(c): feasibility; rho_o is the largest cosine of o with another object seen with s, rho_s that of s with another
  state seen with o, computed from the word vectors after each epoch
* alpha: rises to its final value over the first `margin_epochs`

The loss is a cross-entropy at temperature T of p over seen compositions, or in the open world of f over all. In the
first epoch, before any rho, unseen compositions are excluded from it. The paper's ResNet-18 is the cached encoder here;
its image head is a perceptron.

CGE: a graph network embeds states, objects and compositions.

Naeem et al., "Learning Graph Embeddings for Compositional Zero-shot Learning", CVPR 2021.

    H' = relu(D^-1 A H W),    S = f(x) . h_c

* H: node features of states, objects and compositions, at first word vectors;  A, D: adjacency and degrees
* W: weights of one of two graph convolutions;  h_c: a composition's unit embedding after the last
* f(x): embedding of image x by a perceptron

The loss is a cross-entropy over seen compositions. The graph's compositions are all that the data set's splits list, or
in the open world all. The paper's trained backbone is the cached encoder here, as in its results with a fixed one.

Co-CGE: CGE's graph for the open world, with feasibility.

Mancini et al., "Learning Graph Embeddings for Open World Compositional Zero-Shot Learning", TPAMI 2022.

    S = cos(f(x), h_c)                                                      a cross-entropy of S / T is the loss
    open world: messages of unseen compositions weigh max(0, rho(c)), the loss uses S - alpha rho(c) for them

* f(x), h_c: embeddings of an image and a composition, as in CGE (cge.py);  T: temperature
* rho(c): feasibility of an unseen composition, from the graph's embeddings of states and objects after each epoch
* alpha: rises to its final value over the first `margin_epochs`

In the first epoch unseen compositions send no messages and are excluded from the loss. In the closed world all messages
weigh one and there is no margin.

KG-SP: independent classifiers of states and of objects.

Karthik et al., "KG-SP: Knowledge Guided Simple Primitives for Open World Compositional Zero-Shot Learning", CVPR 2022.

    L = L_s + L_o,    S = p(s|x) p(o|x)

* L_s, L_o, p(s|x), p(o|x): cross-entropies and posteriors of two perceptrons

The paper then excludes compositions with a low similarity in ConceptNet. Here evaluation excludes them, as for every
method, by a threshold on feasibility computed from word vectors (params.yaml, evaluation.word_vectors).

CGE with Duplex's visual prototypes, which needs no text tower.

"+ Visual Proto" in the Duplex paper's table of ResNet-18 features (Peng et al.).

    p(s|x) = softmax_s cos(z^s, V_s w_s) / T,    p(o|x) = softmax_o cos(z^o, V_o w_o) / T
    L = L_CGE + L_s + L_o + L_c^h
    S = p(c^t|x) + p(c^h|x) + p(s|x) p(o|x)

* L_CGE, p(c^t|x): loss and posterior of CGE (cge.py)
* L_c^h, p(c^h|x): loss and posterior by a codebook of visual prototypes, which a local graph refines (the Duplex
  paper's Eq. 10-18)
* z^s, z^o: state and object factor of an image, outputs of two small networks
* w, V: word vectors and their linear maps, in place of prompts;  T: temperature

`graph: false` leaves the prototypes at mean features of training images, and drops L_c^h.

Graph convolutions over primitives and compositions (CGE, duplex/methods/words.py), without an adjacency matrix.

    H' = D^-1 (A + I) H W

* H: node features of states, objects and the graph's compositions;  A: adjacency;  D: degrees;  W: weights

Each composition `c = (s, o)` adds the edges s-o, s-c and o-c. A composition has two neighbours, so its row of H' is a
mean of three; rows of states and objects are sums over their compositions. A composition outside of the graph receives
messages from its state and its object and sends none, so its embedding does not depend on the other candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, nll_loss, relu

from duplex.labels import CandidateSet, Ints, contains_sorted
from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.codebook import Codebook, Logits
from duplex.methods.duplex import FactorNodes, Message, RefinedPrototypes, refine
from duplex.methods.families import Composer, EmbeddingHead, SeenMethod
from duplex.methods.paths import CompositionIndex, Factors, Fusion, Mlp, copy_to_device, unit
from duplex.options import Count, Natural, NonNegative, Options, Positive, Rate, Share


@dataclass(frozen=True)
class CompCosOptions(Options):
    width: Count = 512  # size of the space of images and compositions
    layers: Natural = 2  # hidden layers of the image head
    dropout: Rate = 0.1  # in the image head
    scale: Positive = 20.0  # 1 / T of cosines
    train_words: bool = True  # whether the primitives' word vectors are trained
    margin: NonNegative = 0.4  # final alpha; only in the open world
    margin_epochs: Count = 15  # epochs until alpha reaches its final value


class CompCos(EmbeddingHead[CompCosOptions]):
    """CompCos: the cosine of an image's embedding and a composition's, made from two word vectors."""

    def __init__(self, context: MethodContext, options: CompCosOptions) -> None:
        super().__init__(context, options, trained_words=options.train_words, scale=options.scale)
        width = options.width
        self.head = Mlp(context.dim, width, width, options.layers, options.dropout)
        self.composer = Composer(self.words.width, width)
        if context.world == "open":
            self.margins = self.initial_margins()  # alpha rho(c) / T

    def embed_images(self, z: Tensor) -> Tensor:
        return unit(self.head(unit(z)))

    @torch.no_grad()
    def after_epoch(self, epoch: int) -> None:
        if self.margins is not None:
            self.raise_margins(self.feasibility(self.words.states, self.words.objects), epoch)


@dataclass(frozen=True)
class KgSpOptions(Options):
    layers: Natural = 2  # hidden layers of each classifier
    width: Count = 768  # hidden units of each classifier
    dropout: Rate = 0.5  # in each classifier


class KgSp(SeenMethod[KgSpOptions]):
    """KG-SP: the product of the posteriors of state and object."""

    def __init__(self, context: MethodContext, options: KgSpOptions) -> None:
        super().__init__(context, options)
        labels, width = context.labels, options.width
        self.states = Mlp(context.dim, width, len(labels.states), options.layers, options.dropout)
        self.objects = Mlp(context.dim, width, len(labels.objects), options.layers, options.dropout)

    def losses(self, batch: Batch, shared: tuple[()]) -> dict[str, Tensor]:
        z = unit(batch.cls)
        m, n = self.primitives(batch.compositions)
        return {"state": cross_entropy(self.states(z), m), "object": cross_entropy(self.objects(z), n)}

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: None) -> Tensor:
        z = unit(inputs["cls"])
        p_s, p_o = self.states(z).softmax(-1), self.objects(z).softmax(-1)
        return torch.mul(p_s[:, candidates.states], p_o[:, candidates.objects])


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


MESSAGES: tuple[Message, ...] = ("state", "object", "counterfactual")


@dataclass(frozen=True)
class CgeVisualOptions(CgeOptions):
    graph: bool = True  # whether the local graph refines visual prototypes
    momentum: Share = 0.9  # lambda, the weight of a prototype's old value per refinement
    scale: Positive = 20.0  # 1 / T of cosines with prototypes and words
    factor_width: Count = 768  # hidden units of each disentangler


class CgeVisual(GraphHead[CgeVisualOptions]):
    """CGE with visual prototypes and state and object factors."""

    def __init__(self, context: MethodContext, options: CgeVisualOptions) -> None:
        super().__init__(context, options)
        labels, dim = context.labels, context.dim
        self.codebook = Codebook(labels, dim, unseen="compose", random_seen=False)
        self.factors = Factors(dim, options.factor_width, residual=False)
        self.fusion = Fusion(dim) if options.graph else None
        self.embed_s, self.embed_o = nn.Linear(self.words.width, dim), nn.Linear(self.words.width, dim)
        self.candidates = CandidateSet.of(labels, context.world, "train")
        self._pending: RefinedPrototypes | None = None  # prototypes refined by `losses`, written by `after_batch`

    def start(self, train: Batch) -> None:
        self.codebook.start(unit(train.cls), train.compositions, seen=True)

    def posteriors(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """State and object factors [B, d] of unit features `z`, log p(s|x) [B, M] and log p(o|x) [B, N]."""
        z_s, z_o = self.factors(z)
        t_s, t_o = unit(self.embed_s(self.words.states)), unit(self.embed_o(self.words.objects))
        log_s = (self.options.scale * z_s @ t_s.T).log_softmax(-1)
        log_o = (self.options.scale * z_o @ t_o.T).log_softmax(-1)
        return z_s, z_o, log_s, log_o

    def losses(self, batch: Batch, shared: tuple[Tensor]) -> dict[str, Tensor]:
        z, scale = unit(batch.cls), self.options.scale
        m, n = self.primitives(batch.compositions)
        z_s, z_o, log_s, log_o = self.posteriors(z)
        losses = {**super().losses(batch, shared), "state": nll_loss(log_s, m), "object": nll_loss(log_o, n)}
        if self.fusion is not None:
            nodes = FactorNodes(z, z_s, z_o, log_s.exp(), log_o.exp(), m, n)
            own, momentum = batch.compositions_np, self.options.momentum
            self._pending = refine(nodes, own, self.candidates, self.codebook, self.fusion, MESSAGES, momentum)
            positions = self.candidates.positions
            target, refined = copy_to_device(z.device, positions(own), positions(self._pending.compositions))
            logits = self.codebook.logits_over(self.candidates.listed)(z, scale)
            logits = logits.index_copy(1, refined, scale * z @ self._pending.rows.T)
            losses["visual"] = cross_entropy(logits, target)
        return losses

    def after_batch(self) -> None:
        if self._pending is not None:
            self.codebook.write_back(*self._pending)
            self._pending = None

    def shared(self) -> tuple[Tensor]:
        return (super().prepare(self.train_candidates),)

    def prepare(self, candidates: CompositionIndex) -> tuple[Tensor, Logits]:
        return super().prepare(candidates), self.codebook.logits_over(candidates.compositions_np)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: tuple[Tensor, Logits]) -> Tensor:
        z, (embeddings, visual) = unit(inputs["cls"]), prepared
        _, _, log_s, log_o = self.posteriors(z)
        factors = (log_s[:, candidates.states] + log_o[:, candidates.objects]).exp()
        semantic = super().score(inputs, candidates, embeddings)
        return semantic.softmax(-1) + visual(z, self.options.scale).softmax(-1) + factors
