"""One step of the local graph: from a batch's factors to refined visual prototypes (Eq. 12-18, Algorithm 1).

The graph is bipartite: messages go only into the prototypes of the batch's candidate compositions, from each image's
state factor, each image's object factor and each counterfactual. Their sums factor by state, by object and by cell of
the (state x object) grid, so no matrix over the graph's nodes is ever built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.labels import Ints, Target
from duplex.layers.counterfactual import cell_sums
from duplex.layers.factors import Fusion
from duplex.layers.indices import send

Message = Literal["state", "object", "counterfactual"]


@dataclass(frozen=True)
class Nodes:
    """What the graph needs of a mini-batch of `B` images."""

    z: Tensor  # composition features z^c [B, d]
    z_s: Tensor  # state factors [B, d]
    z_o: Tensor  # object factors [B, d]
    p_s: Tensor  # p(s | x) [B, M]
    p_o: Tensor  # p(o | x) [B, N]
    states: Tensor  # m_i [B]
    objects: Tensor  # n_i [B]

    def by_label(self, of_s: Ints, of_o: Ints) -> Nodes:
        """One factor node a state and one an object of the batch, so one counterfactual a cell: means over their images
        (`z_s` [S, d], `p_s` [S, M], `states` [S]; objects likewise), factors of unit length again. `of_s` and `of_o`
        are the images' states and objects on the host."""
        z_s, p_s, states = _means(of_s, self.z_s, self.p_s)
        z_o, p_o, objects = _means(of_o, self.z_o, self.p_o)
        return Nodes(self.z, normalize(z_s, dim=-1), normalize(z_o, dim=-1), p_s, p_o, states, objects)


def _means(labels: Ints, *rows: Tensor) -> tuple[Tensor, ...]:
    """Means of `rows` [B, k] over each label [G, k], and the labels [G]."""
    distinct, group, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    there, places, counts = send(rows[0].device, distinct, group, sizes)
    zeros = (values.new_zeros(len(distinct), values.shape[1]) for values in rows)
    sums = [zero.index_add(0, places, values) for zero, values in zip(zeros, rows, strict=True)]
    return *(total / counts[:, None] for total in sums), there


@dataclass(frozen=True)
class Candidates:
    """`C_cand = (S(B) x O(B)) & C_tgt` as the kept cells of a small grid (Eq. 12-13), and the pairs of factors whose
    counterfactual has such a label. Made of labels alone, on the host: the device is asked nothing."""

    compositions: Ints  # the kept cells as m * N + n, sorted [C]
    states: Tensor  # S(B), sorted [S]
    objects: Tensor  # O(B), sorted [O]
    partners_s: Tensor  # |O_cand(m)| of each state, at least 1 [S]
    partners_o: Tensor  # |S_cand(n)| of each object [O]
    row: Tensor  # place of each candidate's state in S(B) [C]
    column: Tensor  # place of its object in O(B) [C]
    i: Tensor  # pairs of factors (i, j) with a candidate's label (m_i, n_j) [P]
    j: Tensor
    cell: Tensor  # that candidate [P]

    @classmethod
    def of(cls, of_s: Ints, of_o: Ints, target: Target, n_objects: int, device: torch.device) -> Candidates:
        """From the states and the objects of a batch's factor nodes."""
        states, state_of = np.unique(of_s, return_inverse=True)
        objects, object_of = np.unique(of_o, return_inverse=True)
        grid = states[:, None] * n_objects + objects[None]  # [S, O]
        kept = target.holds(grid)
        row, column = np.nonzero(kept)
        place = np.full(kept.shape, -1, dtype=np.int64)
        place[row, column] = np.arange(len(row))
        of_pair = place[state_of][:, object_of]  # [B_s, B_o]
        i, j = np.nonzero(of_pair >= 0)
        partners = (kept.sum(axis).clip(min=1) for axis in (1, 0))
        there = send(device, states, objects, *partners, row, column, i, j, of_pair[i, j])
        return cls(grid[kept], *there)

    def __len__(self) -> int:
        return len(self.compositions)


LEAST_WEIGHT = 1e-20  # of a candidate's messages together; below it posteriors have underflowed


Sums = tuple[Tensor, Tensor]  # weighted messages [C, d], their weights [C, 1]


def aggregate(
    nodes: Nodes,
    candidates: Candidates,
    fusion: Fusion | None,
    messages: tuple[Message, ...],
    weighing: Literal["together", "by_kind"] = "together",
) -> tuple[Tensor, Tensor]:
    """`h_hat = sum(weight * message) / sum(weight)` of every candidate [C, d] (Eq. 15-16), and which candidates any
    message reached [C]: posteriors that are too sure of something else underflow to nothing.

    Weighed `by_kind`, `h_hat` is the mean, over the kinds that reach a candidate, of each kind's own weighted mean.
    """
    kinds = [_sums(kind, nodes, candidates, fusion) for kind in messages]
    if weighing == "by_kind":
        kinds = [(_mean(*kind), (kind[1].detach() > LEAST_WEIGHT).to(kind[1])) for kind in kinds]
    (total, weight), *others = kinds
    for more, heavier in others:
        total, weight = total + more, weight + heavier
    return _mean(total, weight), weight[:, 0].detach() > LEAST_WEIGHT


def _mean(total: Tensor, weight: Tensor) -> Tensor:
    return total / weight.clamp(min=LEAST_WEIGHT)


def _sums(kind: Message, nodes: Nodes, candidates: Candidates, fusion: Fusion | None) -> Sums:
    m, n = candidates.row, candidates.column  # place of each candidate in the grid [C]
    if kind == "state":
        p = nodes.p_s.index_select(1, candidates.states) / candidates.partners_s  # p(s_m|x_i) / |O_cand(m)|  [B, S]
        return (p.T @ nodes.z_s)[m], p.sum(0)[m, None]
    if kind == "object":
        p = nodes.p_o.index_select(1, candidates.objects) / candidates.partners_o  # p(o_n|x_j) / |S_cand(n)|  [B, O]
        return (p.T @ nodes.z_o)[n], p.sum(0)[n, None]
    return _counterfactuals(nodes, candidates, fusion)


def _counterfactuals(nodes: Nodes, candidates: Candidates, fusion: Fusion | None) -> Sums:
    """Weighted sums of the counterfactuals with each candidate's own label [C, d], and of their weights [C, 1].

    A pair `(i, j)` is kept when its label is a candidate; its weight is `p(s_{m_i}|x_i) p(o_{n_j}|x_j)`. Without a
    learned fusion `z^cf = normalise(z^c_i + z^c_j - mean z^c)`: what one image adds to the average and the other adds,
    in the space in which prototypes are compared with images.
    """
    i, j, cell, count = candidates.i, candidates.j, candidates.cell, len(candidates)
    own_s = nodes.p_s.gather(1, nodes.states[:, None])[:, 0]  # [B]
    own_o = nodes.p_o.gather(1, nodes.objects[:, None])[:, 0]  # [B]
    weight = own_s.index_select(0, i) * own_o.index_select(0, j)  # [P]
    pair = (nodes.z, nodes.z - nodes.z.mean(0)) if fusion is None else fusion.project(nodes.z_s, nodes.z_o)
    sums = cell_sums(*pair, weight, i, j, cell, count, rectified=fusion is not None and fusion.rectified)
    return sums, weight.new_zeros(count).index_add(0, cell, weight)[:, None]


def blend(rows: Tensor, aggregated: Tensor, momentum: float, renormalise: bool) -> Tensor:
    """`h' = lambda h + (1 - lambda) h_hat`, re-normalised (Eq. 17-18). At lambda = 1 the rows stay as they are."""
    if momentum == 1.0:
        return rows
    mixed = momentum * rows + (1.0 - momentum) * aggregated
    return normalize(mixed, dim=-1) if renormalise else mixed
