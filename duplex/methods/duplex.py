"""Duplex (Peng et al.): semantic prototypes, and visual prototypes that training refines.

An image is compared with the text feature of each composition's learned prompt (semantic
prototype) and with an estimated mean image feature of each composition (visual prototype). The
codebook, the table of visual prototypes, is refined batch by batch in a local bipartite graph: the
prototypes of the batch's candidate compositions receive messages from each image's state and
object factor, and from each counterfactual (an image's state factor fused with another's object
factor). Sums of messages factor by state, object and cell of the (state x object) grid, so no
matrix over nodes is built. Equations in this file are the paper's (Eq. 5-22, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as option_field
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from duplex.labels import CandidateSet, Ints
from duplex.methods.base import Batch, Inputs, Inspectable, MethodContext, ScoreTerms
from duplex.methods.codebook import Codebook, TrainedCodebook, refined_rows
from duplex.methods.layers import Fusion, copy_to_device, mean_over, unit
from duplex.methods.paths import FactorPosteriors, PathOptions, Paths
from duplex.methods.portable import means_by_word, portable_paths
from duplex.methods.prompt_method import PathSumMethod
from duplex.methods.prompts import Prototypes
from duplex.methods.reading import PaperReading, with_preset
from duplex.options import Share, refuse

BLOCK_BYTES = {"cpu": 2**20}  # elsewhere 256 MiB
EPSILON = 1e-12
LEAST_WEIGHT = 1e-20  # of all messages to a candidate; below it posteriors have underflowed
Message = Literal["state", "object", "counterfactual"]


class CounterfactualSum(torch.autograd.Function):
    """Autograd function: weighted sum of counterfactuals per cell of the grid (Eq. 11, 15-16).

        out_c = sum of w_p z^cf_p over the image pairs p = (i, j) of cell c,    z^cf_p = normalise(relu(a_i + b_j))

    `a`, `b`: projected state and object factors [B, d]; no relu unless `rectified`. The at most
    `B^2` counterfactuals are computed in blocks that fit into the processor's cache, and again in
    the backward pass. Differentiable once.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, w: Tensor, i: Tensor, j: Tensor, cell: Tensor, cells: int, rectified: bool
    ) -> Tensor:
        """Sums [cells, d]: pair p adds `w[p]` times its counterfactual to row `cell[p]`."""
        out = a.new_zeros(cells, a.shape[1])
        for rows in _blocks(len(i), a):
            r, inverse = _counterfactuals(a, b, i[rows], j[rows], rectified)
            out.index_add_(0, cell[rows], r.mul_((w[rows] * inverse)[:, None]))
        ctx.save_for_backward(a, b, w, i, j, cell)
        ctx.rectified = rectified
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients with respect to `a`, `b` and `w`, given that with respect to the sums.

        With `r = relu(a_i + b_j)`, `u = r / |r|` and the gradient `g` of a pair's sum: `dw = g.u`,
        and where `r > 0`, both a_i and b_j receive `dr = w (g - u (g.u)) / |r|`. Unless
        `rectified`, relu and `r > 0` are left out.
        """
        a, b, w, i, j, cell = ctx.saved_tensors
        rectified: bool = ctx.rectified
        da = torch.zeros_like(a)
        db = torch.zeros_like(b)
        dw = torch.empty_like(w)
        for rows in _blocks(len(i), a):
            r, inverse = _counterfactuals(a, b, i[rows], j[rows], rectified)
            g = grads[0].index_select(0, cell[rows])
            dw[rows] = (g * r).sum(1) * inverse
            g.addcmul_(r, (dw[rows] * inverse)[:, None], value=-1)
            dr = g.mul_((w[rows] * inverse)[:, None])
            if rectified:
                dr.mul_(r > 0)
            da.index_add_(0, i[rows], dr)
            db.index_add_(0, j[rows], dr)
        return da, db, dw, None, None, None, None, None


def _counterfactuals(a: Tensor, b: Tensor, i: Tensor, j: Tensor, rectified: bool) -> tuple[Tensor, Tensor]:
    r = a.index_select(0, i).add_(b.index_select(0, j))
    if rectified:
        r.relu_()
    return r, torch.linalg.vector_norm(r, dim=1).clamp_(min=EPSILON).reciprocal_()


def _blocks(pairs: int, like: Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_BYTES.get(like.device.type, 2**28) // (like.shape[1] * like.element_size()))
    for start in range(0, pairs, size):
        yield slice(start, start + size)


@dataclass(frozen=True)
class MessageNodes:
    """Inputs of a batch's messages: features, factors, posteriors of words, and labels."""

    z: Tensor  # composition features z^c [B, d]
    z_s: Tensor  # state factors [B, d]
    z_o: Tensor  # object factors [B, d]
    p_s: Tensor  # p(s | x) [B, M]
    p_o: Tensor  # p(o | x) [B, N]
    states: Tensor  # m_i [B]
    objects: Tensor  # n_i [B]


@dataclass(frozen=True)
class BatchCandidates:
    """The candidates whose state and object both occur in a batch; their prototypes are refined.

    `C_cand = (S(B) x O(B)) & C_tgt` (Eq. 12-13): S(B) and O(B) are the batch's states and objects.
    `i`, `j` list pairs of images for which i's state with j's object is a candidate; `cell` lists
    the candidates' indices. All are computed from labels in the host's memory, so that nothing
    waits for the device.
    """

    compositions: Ints  # the candidates as m * N + n, ascending [C]
    states: Tensor  # S(B), ascending [S]
    objects: Tensor  # O(B), ascending [O]
    state_of: Tensor  # index of each image's state in S(B) [B]
    object_of: Tensor  # index of each image's object in O(B) [B]
    partners_s: Tensor  # number of candidates with each state, at least 1 [S]
    partners_o: Tensor  # number of candidates with each object, at least 1 [O]
    row: Tensor  # index of each candidate's state in S(B) [C]
    column: Tensor  # index of each candidate's object in O(B) [C]
    i: Tensor  # pairs of images (i, j) whose label (m_i, n_j) is a candidate [P]
    j: Tensor
    cell: Tensor  # index of that candidate [P]

    @classmethod
    def of(
        cls, states: Ints, objects: Ints, candidates: CandidateSet, n_objects: int, device: torch.device, diagonal: bool
    ) -> BatchCandidates:
        distinct_s, state_of = np.unique(states, return_inverse=True)
        distinct_o, object_of = np.unique(objects, return_inverse=True)
        grid = distinct_s[:, None] * n_objects + distinct_o[None]  # [S, O]
        inside = candidates.contains(grid)
        row, column = np.nonzero(inside)
        place = np.full(inside.shape, -1, dtype=np.int64)
        place[row, column] = np.arange(len(row))
        of_pair = place[state_of][:, object_of]  # [B, B]
        if not diagonal:
            np.fill_diagonal(of_pair, -1)
        i, j = np.nonzero(of_pair >= 0)
        partners_s = inside.sum(1).clip(min=1)
        partners_o = inside.sum(0).clip(min=1)
        labels = (distinct_s, distinct_o, state_of, object_of, partners_s, partners_o)
        return cls(grid[inside], *copy_to_device(device, *labels, row, column, i, j, of_pair[i, j]))

    def __len__(self) -> int:
        return len(self.compositions)

    def means_by_state(self, x: Tensor) -> Tensor:
        """Mean of `x` [B, ...] over the images of each of the batch's states [S, ...]."""
        return mean_over(x, self.state_of, len(self.states))

    def means_by_object(self, x: Tensor) -> Tensor:
        return mean_over(x, self.object_of, len(self.objects))


def mean_messages(
    nodes: MessageNodes,
    candidates: BatchCandidates,
    fusion: Fusion | None,
    messages: tuple[Message, ...],
    reading: PaperReading = PaperReading(),
) -> tuple[Tensor, Tensor]:
    """Mean message [C, d] to each candidate (Eq. 15-16); mask [C] of those that get any."""
    (total, weight), *others = [message_sums(kind, nodes, candidates, fusion, reading) for kind in messages]
    if reading.normalise == "by_kind":
        total, weight = _mean_of_kind(total, weight)
        others = [_mean_of_kind(*sums) for sums in others]
    for more, more_weight in others:
        total = total + more
        weight = weight + more_weight
    return total / weight.clamp(min=LEAST_WEIGHT), weight[:, 0].detach() > LEAST_WEIGHT


def _mean_of_kind(total: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean of a kind of messages, and 1; both 0 for a candidate without messages."""
    reached = (weight.detach() > LEAST_WEIGHT).to(weight.dtype)
    return reached * total / weight.clamp(min=LEAST_WEIGHT), reached


def message_sums(
    kind: Message,
    nodes: MessageNodes,
    candidates: BatchCandidates,
    fusion: Fusion | None,
    reading: PaperReading = PaperReading(),
) -> tuple[Tensor, Tensor]:
    """Weighted sum of candidates' messages of one `kind` [C, d], and of the weights [C, 1]."""
    if kind == "counterfactual":
        return _counterfactual_sums(nodes, candidates, fusion, by_label=reading.counterfactuals == "labels")
    if kind == "state":
        p = nodes.p_s.index_select(1, candidates.states) / candidates.partners_s  # [B, S]
        z = nodes.z_s
        own = candidates.state_of
        means = candidates.means_by_state
        place = candidates.row  # of each candidate's state [C]
    else:
        p = nodes.p_o.index_select(1, candidates.objects) / candidates.partners_o  # [B, O]
        z = nodes.z_o
        own = candidates.object_of
        means = candidates.means_by_object
        place = candidates.column  # of its object [C]
    if reading.factors == "labels":  # one node per label: the mean factor, and the mean posterior
        p = means(p)  # [S, S]
        z = unit(means(z))  # [S, d]
        own = torch.arange(len(p), device=p.device)
    if reading.edges == "label":  # no message to candidates of another label
        p = p * one_hot(own, p.shape[1])
    return (p.T @ z)[place], p.sum(0)[place, None]


def _counterfactual_sums(
    nodes: MessageNodes, candidates: BatchCandidates, fusion: Fusion | None, by_label: bool, weighted: bool = True
) -> tuple[Tensor, Tensor]:
    label_s = nodes.p_s.gather(1, nodes.states[:, None])[:, 0]  # p(s_{m_i}|x_i) [B]
    label_o = nodes.p_o.gather(1, nodes.objects[:, None])[:, 0]  # p(o_{n_j}|x_j) [B]
    if fusion is None:  # a feature plus another's difference from the mean
        a = nodes.z
        b = nodes.z - nodes.z.mean(0)
    else:
        a, b = fusion.project(nodes.z_s, nodes.z_o)
    i = candidates.i
    j = candidates.j
    cell = candidates.cell
    if by_label:  # one pair (m, n) per candidate, of means over their images
        a = candidates.means_by_state(a)
        b = candidates.means_by_object(b)
        label_s = candidates.means_by_state(label_s)
        label_o = candidates.means_by_object(label_o)
        i = candidates.row
        j = candidates.column
        cell = torch.arange(len(candidates), device=a.device)
    weight = label_s.index_select(0, i) * label_o.index_select(0, j)  # [P]
    if not weighted:
        weight = torch.ones_like(weight)
    rectified = fusion is not None and fusion.rectified
    sums = CounterfactualSum.apply(a, b, weight, i, j, cell, len(candidates), rectified)  # type: ignore[no-untyped-call]
    return sums, weight.new_zeros(len(candidates)).index_add(0, cell, weight)[:, None]


@torch.no_grad()
def compose_from_batch(
    nodes: MessageNodes, candidates: BatchCandidates, fusion: Fusion | None, reading: PaperReading
) -> Tensor:
    """Initial prototypes of candidates [C, d]: mean counterfactuals with their labels, of unit length (Eq. 11)."""
    by_label = reading.counterfactuals == "labels"
    sums, _ = _counterfactual_sums(nodes, candidates, fusion, by_label, weighted=False)
    return unit(sums)


class RefinedPrototypes(NamedTuple):
    """The refined prototypes of a batch's candidates, before they are written to the codebook."""

    compositions: Ints  # [C]
    rows: Tensor  # h' [C, d]
    begun: tuple[Ints, Tensor] | None = None  # candidates that were empty, and their initial prototypes


def refine(
    nodes: MessageNodes,
    compositions: Ints,
    candidates: CandidateSet,
    codebook: Codebook | TrainedCodebook,
    fusion: Fusion | None,
    messages: tuple[Message, ...],
    momentum: float,
    reading: PaperReading = PaperReading(),
) -> RefinedPrototypes:
    """Move the prototypes of a batch's candidates towards their mean message (Algorithm 1).

    Candidates without a prototype first get one from the batch, if `reading` says so; without
    `messages`, nothing else is done.

    fusion: computes counterfactuals; None: images i and j give `normalise(z_i + z_j - mean(z))`.
    momentum: weight lambda of the old prototypes; for an anchored codebook, of the initial ones.
    """
    n = len(codebook.labels.objects)
    states = compositions // n
    objects = compositions % n
    local = BatchCandidates.of(states, objects, candidates, n, nodes.z.device, reading.diagonal)
    composed = None
    begun = None
    empty = np.flatnonzero(codebook.is_empty(local.compositions)) if reading.unseen == "batch" else np.empty(0, int)
    if len(empty):
        composed = compose_from_batch(nodes, local, fusion, reading)
        begun = (local.compositions[empty], composed[copy_to_device(composed.device, empty)[0]])
    if not messages:
        composed_numbers, composed_rows = begun or (local.compositions[:0], nodes.z[:0])
        return RefinedPrototypes(composed_numbers, composed_rows, begun)
    aggregated, reached = mean_messages(nodes, local, fusion, messages, reading)
    rows = refined_rows(codebook, local.compositions, aggregated, reached, momentum, composed)
    return RefinedPrototypes(local.compositions, rows, begun)


@dataclass(frozen=True)
class DuplexOptions(PathOptions):
    """Options of `kind: duplex`, the Duplex paper's method; the defaults are the paper's choices."""

    # codebook (Eq. 10-11)
    seen_rows: Literal["data", "random"] = "data"  # of training pairs: mean features, or random
    unseen_rows: Literal["compose", "random"] = "compose"  # of other pairs: composed

    # local graph and write-back (Eq. 12-19)
    graph: bool = True  # whether the local graph refines prototypes in training
    messages: tuple[Message, ...] = ("state", "object", "counterfactual")  # sources of messages
    fusion: Literal["learned", "linear", "additive"] = "learned"  # Eq. 11, without its relu, or sums
    momentum: Share = 0.9  # lambda, the weight of a prototype's old value per refinement
    blend: Literal["recursive", "anchored"] = "recursive"  # old value: current or initial
    refine_over: Literal["world", "closed", "open"] = "world"  # whose candidates are refined

    # objective (Eq. 20) and inference (Eq. 21)
    losses: tuple[Literal["state", "object", "semantic", "visual"], ...] = ("state", "object", "semantic", "visual")
    inference: tuple[Literal["visual", "semantic", "factors"], ...] = ("visual", "semantic", "factors")

    reading: PaperReading = option_field(default_factory=PaperReading)  # what the paper leaves open, or `literal`

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Make options from a record of a file, in which `reading` may be `literal`."""
        return super().from_dict(with_preset(record) if isinstance(record, Mapping) else record)

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield from self.path_rules(self.losses, self.inference)
        if self.graph:
            yield refuse(self.paths != "three", "graph: true needs paths: three")
            yield refuse(not self.messages, "graph: true needs at least one kind in messages")
        repeated = len(set(self.messages)) < len(self.messages)
        yield refuse(repeated, "messages lists a kind twice; remove one")
        yield from self._reading_rules()

    def _reading_rules(self) -> Iterable[tuple[object, str]]:
        changed = self.reading.changed()
        message = "unseen_rows: random draws the prototypes that reading.unseen is about; leave one of them out"
        yield refuse("unseen" in changed and self.unseen_rows == "random", message)
        message = "reading.unseen: empty leaves unseen pairs without prototypes unless graph is true"
        yield refuse(self.reading.unseen == "empty" and not self.graph, message)
        composing = {"counterfactuals", "diagonal", "fusion_rank"} if self.composes else set[str]()
        about_graph = sorted(changed - {"softmax", "codebook", "unseen"} - composing)
        names = ", ".join(about_graph)
        message = f"reading: {names} only changes the local graph; set graph to true"
        yield refuse(about_graph and not self.graph, message)
        has_factors = "state" in self.messages or "object" in self.messages
        for name in ("edges", "factors"):
            message = f"reading.{name} needs state or object in messages"
            yield refuse(name in changed and not has_factors, message)
        about_pairs = (changed & {"counterfactuals", "diagonal", "fusion_rank"}) - composing
        message = "reading.counterfactuals, diagonal and fusion_rank need counterfactual in messages"
        yield refuse(about_pairs and "counterfactual" not in self.messages, message)
        message = "fusion: additive has no matrices; leave reading.fusion_rank out"
        yield refuse(self.fusion == "additive" and "fusion_rank" in changed, message)
        is_trained = self.reading.codebook == "trained"
        message = "reading.codebook: trained needs visual in losses"
        yield refuse(is_trained and "visual" not in self.losses, message)
        message = "reading.softmax: all already compares all compositions; leave semantic_negatives out"
        yield refuse(self.reading.softmax == "all" and self.semantic_negatives != "seen", message)

    def trained_losses(self) -> set[str]:
        trained = self.adapted or self.reading.codebook == "trained" or (self.graph and self.momentum < 1)
        return super().trained_losses() | ({"visual"} if trained else set())

    @property
    def composes(self) -> bool:
        """Whether batches give unseen pairs their initial prototypes."""
        return self.reading.unseen == "batch"

    @property
    def visual(self) -> bool:
        return "visual" in self.losses or "visual" in self.inference


class Duplex(PathSumMethod[DuplexOptions]):
    """Duplex: the score adds up posteriors by semantic and visual prototypes, and by factors."""

    def __init__(self, context: MethodContext, options: DuplexOptions) -> None:
        super().__init__(context, options)
        world = context.world if options.refine_over == "world" else options.refine_over
        labels = context.labels
        dim = context.tower.dim
        reading = options.reading
        anchored = options.blend == "anchored"
        is_trained = reading.codebook == "trained"
        rows = Codebook(
            labels,
            dim,
            unseen=options.unseen_rows if reading.unseen == "means" else "empty",
            random_seen=options.seen_rows == "random",
            anchored=anchored and not is_trained,
        )
        self.codebook = TrainedCodebook(labels, rows, anchored=anchored) if is_trained else rows
        every = np.arange(labels.size) if reading.softmax == "all" else None
        self.paths = Paths(labels, context.tower, options, world, negatives=every)
        sends = options.graph and "counterfactual" in options.messages
        fuses = sends or options.composes
        rectified = options.fusion == "learned"
        rank = reading.fusion_rank
        self.fusion = Fusion(dim, rectified=rectified, rank=rank) if fuses and options.fusion != "additive" else None
        if self.fusion is not None:
            self.fusion.requires_grad_(sends)  # nothing trains it if it only composes
        self.candidates = CandidateSet.of(labels, world, "train")  # C_tgt, to refine
        classes_world = world if every is None else "open"
        self.classes = CandidateSet.of(labels, classes_world, "train")  # of L_c^h
        self.pending: RefinedPrototypes | None = None  # by `losses`, for `after_batch`

    def start(self, train: Batch) -> None:
        self.codebook.start(unit(train.cls), train.compositions, seen=self.options.seen_rows == "data")

    @property
    def device(self) -> torch.device:
        return self.paths.negatives.device

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        names = self.options.losses
        z = self.paths.adapt(batch.cls)
        refines = self.options.visual and (self.options.graph or self.options.composes)
        losses, factors = self.paths.losses(z, batch.compositions, shared, names, with_factors=refines)
        self.pending = None
        if refines and factors is not None:
            self.pending = refine(
                self.nodes(z, factors, batch.compositions, shared),
                batch.compositions_np,
                self.candidates,
                self.codebook,
                self.fusion,
                messages=self.options.messages if self.options.graph else (),
                momentum=self.options.momentum,
                reading=self.options.reading,
            )
        if "visual" in names:
            (positions,) = copy_to_device(self.device, self.classes.positions(batch.compositions_np))
            logits = self.codebook.logits_over(self.classes.listed)(z, self.paths.scale)
            if self.pending is not None:  # refined prototypes replace those in the codebook
                (refined,) = copy_to_device(self.device, self.classes.positions(self.pending.compositions))
                logits = logits.index_copy(1, refined, self.paths.logits(z, self.pending.rows))
            losses["visual"] = cross_entropy(logits, positions)
        return {name: losses[name] for name in names}

    def nodes(self, z: Tensor, factors: FactorPosteriors, compositions: Tensor, t: Prototypes) -> MessageNodes:
        m, n = self.primitives(compositions)
        logs = factors.log_s, factors.log_o
        if self.options.reading.anchors == "detached":
            fixed = t._replace(states=t.states.detach(), objects=t.objects.detach())
            logs = self.paths.log_posteriors(factors.z_s, factors.z_o, fixed)
        return MessageNodes(z, factors.z_s, factors.z_o, logs[0].exp(), logs[1].exp(), m, n)

    def after_batch(self) -> None:
        if self.pending is None:
            return
        compositions, rows, begun = self.pending
        if begun is not None and self.codebook.initial is not None:
            self.codebook.initial.write_back(*begun)
        self.codebook.write_back(compositions, rows)
        self.pending = None

    @torch.no_grad()
    def score_terms(self, candidates: Ints) -> ScoreTerms:
        names = self.options.inference
        whole = len(candidates) == self.labels.size and bool((np.diff(candidates) > 0).all())
        listed = None if whole else candidates
        if self.options.reading.softmax == "all" and not whole:
            every = self.score_terms(np.arange(self.labels.size))
            columns = torch.as_tensor(candidates, device=self.device)
            return lambda inputs: ((name, term.index_select(1, columns)) for name, term in every(inputs))
        prototypes = self.paths.encode(candidates, names)
        states, objects = self.primitives(torch.as_tensor(candidates, device=self.device))
        visual = self.codebook.logits_over(listed) if "visual" in names else None

        @torch.no_grad()
        def terms(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
            z = self.paths.adapt(inputs["cls"])
            if visual is not None:
                yield "visual", visual(z, self.paths.scale).softmax(-1)
            yield from self.paths.score_terms(z, prototypes, states, objects, names)

        return terms

    @torch.no_grad()
    def portable(self, candidates: Ints) -> dict[str, Tensor] | None:
        if self.options.reading.softmax == "all" and len(candidates) < self.labels.size:
            return None  # an export has no other compositions to compare with
        tensors = portable_paths(self.paths, candidates, self.options.inference)
        if "visual" in self.options.inference:
            seen = self.labels.pairs["train"]
            tensors["visual"] = self.codebook.prototypes(candidates).detach()
            tensors |= means_by_word(self.codebook.prototypes(seen).detach(), self.labels, seen)
        return tensors

    def inspectable(self) -> Inspectable:
        visual = torch.no_grad()(self.codebook.prototypes)
        return replace(super().inspectable(), visual=visual, fuse=self.fusion)

    def summary(self) -> dict[str, int]:
        values = 0 if isinstance(self.codebook, TrainedCodebook) else self.labels.size * self.codebook.dim
        return {**super().summary(), "codebook_rows": self.labels.size, "codebook_values": values}

    def stored_values(self) -> int:
        values = super().stored_values()
        refines = self.options.visual and (self.options.graph or self.options.composes)
        if isinstance(self.codebook, Codebook) and refines:  # every candidate may be refined, and is then stored
            values += max(0, len(self.candidates) - self.codebook.stored_count) * (1 + self.codebook.dim)
        return values
