"""Refinement: one step of messages from a batch's factors into visual prototypes (paper: Eq. 12-18, Algorithm 1).

The local graph is bipartite: messages go only into the prototypes of the batch's candidate compositions, from each
image's state factor, each image's object factor and each counterfactual (an image's state factor fused with another
image's object factor). Their sums factor by state, by object and by cell of
the (state x object) grid, so no matrix over the graph's nodes is ever built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.labels import CandidateSet, Ints
from duplex.layers.codebook import Codebook
from duplex.layers.composition_index import copy_to_device
from duplex.layers.factors import Fusion

BLOCK_BYTES = {"cpu": 2**20}  # elsewhere 256 MiB
EPSILON = 1e-12


class CellSums(torch.autograd.Function):
    """Weighted sums of counterfactual features by cell of the (state x object) grid, with gradients (Eq. 11, 15-16).

    `out_c = sum of w_p z^cf_p` over the image pairs p = (i, j) in cell c, with `z^cf = normalise(relu(a_i + b_j))`,
    `a = M_s z^s`, `b = M_o z^o`; without the relu if not `rectified`.

    The up to `B^2` counterfactuals are not stored but computed in blocks that fit the processor's cache, and again in
    the backward pass; memory grows with the number of cells. Differentiable once in `a`, `b` and `w`.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, w: Tensor, i: Tensor, j: Tensor, cell: Tensor, cells: int, rectified: bool
    ) -> Tensor:
        """Return the sums [cells, d] from projected factors `a`, `b` [B, d].

        i, j, cell, w: images, cell and weight of each image pair [P].
        """
        out = a.new_zeros(cells, a.shape[1])
        for rows in _blocks(len(i), a):
            r, inverse = _counterfactuals(a, b, i[rows], j[rows], rectified)
            out.index_add_(0, cell[rows], r.mul_((w[rows] * inverse)[:, None]))
        ctx.save_for_backward(a, b, w, i, j, cell)
        ctx.rectified = rectified
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `a`, `b` and `w`.

        With `g` the gradient of a pair's cell and `u = r / |r|`, `dw = g.u` and `dr = w (g - u (g.u)) / |r|` where
        `r > 0`.
        """
        a, b, w, i, j, cell = ctx.saved_tensors
        rectified: bool = ctx.rectified
        da, db, dw = torch.zeros_like(a), torch.zeros_like(b), torch.empty_like(w)
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
    """Return the counterfactuals `r = relu(a_i + b_j)` [p, d], not normalised, and `1 / |r|` [p]."""
    r = a.index_select(0, i).add_(b.index_select(0, j))
    if rectified:
        r.relu_()
    return r, torch.linalg.vector_norm(r, dim=1).clamp_(min=EPSILON).reciprocal_()


def _blocks(pairs: int, like: Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_BYTES.get(like.device.type, 2**28) // (like.shape[1] * like.element_size()))
    for start in range(0, pairs, size):
        yield slice(start, start + size)


Message = Literal["state", "object", "counterfactual"]


@dataclass(frozen=True)
class FactorNodes:
    """Factors and posteriors of a mini-batch of `B` images, with their labels."""

    z: Tensor  # composition features z^c [B, d]
    z_s: Tensor  # state factors [B, d]
    z_o: Tensor  # object factors [B, d]
    p_s: Tensor  # p(s | x) [B, M]
    p_o: Tensor  # p(o | x) [B, N]
    states: Tensor  # m_i [B]
    objects: Tensor  # n_i [B]


@dataclass(frozen=True)
class LocalCandidates:
    """Candidates that combine a state and an object of the batch, `C_cand = (S(B) x O(B)) & C_tgt` (Eq. 12-13).

    They are cells of a small grid. Each pair of images `(i, j)` whose counterfactual has such a label belongs to a
    cell. Labels on the host suffice, so that nothing waits for the device.
    """

    compositions: Ints  # the candidates as m * N + n, rising [C]
    states: Tensor  # S(B), rising [S]
    objects: Tensor  # O(B), rising [O]
    partners_s: Tensor  # |O_cand(m)| of each state, at least 1 [S]
    partners_o: Tensor  # |S_cand(n)| of each object, at least 1 [O]
    row: Tensor  # place of each candidate's state in S(B) [C]
    column: Tensor  # place of its object in O(B) [C]
    i: Tensor  # pairs of images (i, j) whose label (m_i, n_j) is a candidate [P]
    j: Tensor
    cell: Tensor  # the place of that candidate [P]

    @classmethod
    def of(
        cls, states: Ints, objects: Ints, target: CandidateSet, n_objects: int, device: torch.device
    ) -> LocalCandidates:
        """Build the candidates of a batch from its images' `states` and `objects` [B].

        target: all candidates of the world. n_objects: number of objects N in the label space.
        """
        distinct_s, state_of = np.unique(states, return_inverse=True)
        distinct_o, object_of = np.unique(objects, return_inverse=True)
        grid = distinct_s[:, None] * n_objects + distinct_o[None]  # [S, O]
        inside = target.contains(grid)
        row, column = np.nonzero(inside)
        place = np.full(inside.shape, -1, dtype=np.int64)
        place[row, column] = np.arange(len(row))
        of_pair = place[state_of][:, object_of]  # [B, B]
        i, j = np.nonzero(of_pair >= 0)
        partners = (inside.sum(axis).clip(min=1) for axis in (1, 0))
        tensors = copy_to_device(device, distinct_s, distinct_o, *partners, row, column, i, j, of_pair[i, j])
        return cls(grid[inside], *tensors)

    def __len__(self) -> int:
        return len(self.compositions)


LEAST_WEIGHT = 1e-20  # of all messages to a candidate; below it posteriors have underflowed


def aggregate(
    nodes: FactorNodes, candidates: LocalCandidates, fusion: Fusion | None, messages: tuple[Message, ...]
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of the messages into each candidate, `h_hat` [C, d] (Eq. 15-16), and the mask of
    candidates that a message reached [C]: with very confident posteriors all weights may underflow to zero.

    messages: kinds of messages to use.
    """
    (total, weight), *others = [message_sums(kind, nodes, candidates, fusion) for kind in messages]
    for more, more_weight in others:
        total, weight = total + more, weight + more_weight
    return total / weight.clamp(min=LEAST_WEIGHT), weight[:, 0].detach() > LEAST_WEIGHT


def message_sums(
    kind: Message, nodes: FactorNodes, candidates: LocalCandidates, fusion: Fusion | None
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the messages of one kind to each candidate [C, d], and the sum of weights [C, 1].

    fusion: module that joins a state and an object feature to the feature of a counterfactual pair; None: their sum.
    """
    m, n = candidates.row, candidates.column  # place of each candidate in the grid [C]
    if kind == "state":
        p = nodes.p_s.index_select(1, candidates.states) / candidates.partners_s  # p(s_m|x_i) / |O_cand(m)|  [B, S]
        return (p.T @ nodes.z_s)[m], p.sum(0)[m, None]
    if kind == "object":
        p = nodes.p_o.index_select(1, candidates.objects) / candidates.partners_o  # p(o_n|x_j) / |S_cand(n)|  [B, O]
        return (p.T @ nodes.z_o)[n], p.sum(0)[n, None]
    return _counterfactual_sums(nodes, candidates, fusion)


def _counterfactual_sums(
    nodes: FactorNodes, candidates: LocalCandidates, fusion: Fusion | None
) -> tuple[Tensor, Tensor]:
    """Return weighted sums of the counterfactuals into each candidate [C, d], and of their weights [C, 1].

    The weight of an image pair `(i, j)` is `p(s_{m_i}|x_i) p(o_{n_j}|x_j)`. Without a learned fusion a
    counterfactual is `z^cf = normalise(z^c_i + z^c_j - mean z^c)`: the difference of each image from the average, added
    in the space in which prototypes are compared with images.
    """
    i, j, cell, count = candidates.i, candidates.j, candidates.cell, len(candidates)
    label_s = nodes.p_s.gather(1, nodes.states[:, None])[:, 0]  # p(s_{m_i}|x_i) [B]
    label_o = nodes.p_o.gather(1, nodes.objects[:, None])[:, 0]  # p(o_{n_j}|x_j) [B]
    weight = label_s.index_select(0, i) * label_o.index_select(0, j)  # [P]
    pair = (nodes.z, nodes.z - nodes.z.mean(0)) if fusion is None else fusion.project(nodes.z_s, nodes.z_o)
    rectified = fusion is not None and fusion.rectified
    sums = CellSums.apply(*pair, weight, i, j, cell, count, rectified)  # type: ignore[no-untyped-call]
    return sums, weight.new_zeros(count).index_add(0, cell, weight)[:, None]


def blend(rows: Tensor, aggregated: Tensor, momentum: float, renormalise: bool) -> Tensor:
    """Return the refined prototypes `normalise(lambda h + (1 - lambda) h_hat)` [C, d] (Eq. 17-18).

    rows: prototypes `h`. aggregated: means of messages `h_hat`. momentum: lambda; 1 returns `rows` unchanged.
    """
    if momentum == 1.0:
        return rows
    mixed = momentum * rows + (1.0 - momentum) * aggregated
    return normalize(mixed, dim=-1) if renormalise else mixed


class RefinedPrototypes(NamedTuple):
    """Refined prototypes of a batch, not yet written to the codebook."""

    compositions: Ints  # [C]
    rows: Tensor  # h' [C, d]


def refine(
    nodes: FactorNodes,
    compositions: Ints,
    target: CandidateSet,
    codebook: Codebook,
    fusion: Fusion | None,
    messages: tuple[Message, ...],
    momentum: float,
    renormalise: bool = True,
) -> RefinedPrototypes:
    """Return the refined prototypes of a batch's candidates: a weighted mean of the local graph's messages
    and of the old prototypes.

    The old prototypes are the codebook's current ones, or the initial ones of an anchored codebook (Algorithm 1).

    compositions: labels of the batch [B].
    target: all candidates of the world.
    fusion: module that joins a state and an object feature to the feature of a counterfactual pair; None: their sum.
    messages: kinds of messages to use.
    momentum: weight of the old prototypes, lambda.
    """
    n = len(codebook.labels.objects)
    candidates = LocalCandidates.of(compositions // n, compositions % n, target, n, nodes.z.device)
    aggregated, reached = aggregate(nodes, candidates, fusion, messages)
    rows = codebook.prototypes(candidates.compositions)
    anchor = rows if codebook.initial is None else codebook.initial.prototypes(candidates.compositions)
    blended = blend(anchor, aggregated, momentum, renormalise)
    return RefinedPrototypes(candidates.compositions, torch.where(reached[:, None], blended, rows))
