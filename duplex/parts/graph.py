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
from duplex.parts.counterfactual import cell_sums
from duplex.parts.factors import Fusion
from duplex.parts.indices import send

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


@dataclass(frozen=True)
class Candidates:
    """`C_cand = (S(B) x O(B)) & C_tgt` as the kept cells of a small grid (Eq. 12-13), and the pairs of images whose
    counterfactual has such a label. Made of labels alone, on the host: the device is asked nothing."""

    compositions: Ints  # the kept cells as m * N + n, sorted [C]
    states: Tensor  # S(B), sorted [S]
    objects: Tensor  # O(B), sorted [O]
    partners_s: Tensor  # |O_cand(m)| of each state, at least 1 [S]
    partners_o: Tensor  # |S_cand(n)| of each object [O]
    row: Tensor  # place of each candidate's state in S(B) [C]
    column: Tensor  # place of its object in O(B) [C]
    i: Tensor  # pairs of images (i, j) with a candidate's label (m_i, n_j) [P]
    j: Tensor
    cell: Tensor  # that candidate [P]

    @classmethod
    def of(cls, compositions: Ints, target: Target, n_objects: int, device: torch.device) -> Candidates:
        """From the compositions [B] of a batch."""
        states, state_of = np.unique(compositions // n_objects, return_inverse=True)
        objects, object_of = np.unique(compositions % n_objects, return_inverse=True)
        grid = states[:, None] * n_objects + objects[None]  # [S, O]
        kept = target.holds(grid)
        row, column = np.nonzero(kept)
        place = np.full(kept.shape, -1, dtype=np.int64)
        place[row, column] = np.arange(len(row))
        of_pair = place[state_of.reshape(-1)][:, object_of.reshape(-1)]  # [B, B]
        i, j = np.nonzero(of_pair >= 0)
        partners = (kept.sum(axis).clip(min=1) for axis in (1, 0))
        there = send(device, states, objects, *partners, row, column, i, j, of_pair[i, j])
        return cls(grid[kept], *there)

    def __len__(self) -> int:
        return len(self.compositions)


LEAST_WEIGHT = 1e-20  # of a candidate's messages together; below it posteriors have underflowed


def aggregate(
    nodes: Nodes, candidates: Candidates, fusion: Fusion | None, messages: tuple[Message, ...]
) -> tuple[Tensor, Tensor]:
    """`h_hat = sum(weight * message) / sum(weight)` of every candidate [C, d] (Eq. 15-16), and which candidates any
    message reached [C]: posteriors that are too sure of something else underflow to nothing."""
    m, n = candidates.row, candidates.column  # place of each candidate in the grid [C]
    total = nodes.z_s.new_zeros(len(candidates), nodes.z_s.shape[1])
    weight = nodes.z_s.new_zeros(len(candidates), 1)
    if "state" in messages:
        p = nodes.p_s.index_select(1, candidates.states) / candidates.partners_s  # p(s_m|x_i) / |O_cand(m)|  [B, S]
        total = total + (p.T @ nodes.z_s)[m]
        weight = weight + p.sum(0)[m, None]
    if "object" in messages:
        p = nodes.p_o.index_select(1, candidates.objects) / candidates.partners_o  # p(o_n|x_j) / |S_cand(n)|  [B, O]
        total = total + (p.T @ nodes.z_o)[n]
        weight = weight + p.sum(0)[n, None]
    if "counterfactual" in messages:
        sums, weights = _counterfactuals(nodes, candidates, fusion)
        total, weight = total + sums, weight + weights
    return total / weight.clamp(min=LEAST_WEIGHT), weight[:, 0].detach() > LEAST_WEIGHT


def _counterfactuals(nodes: Nodes, candidates: Candidates, fusion: Fusion | None) -> tuple[Tensor, Tensor]:
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
    sums = cell_sums(*pair, weight, i, j, cell, count, rectified=fusion is not None)
    return sums, weight.new_zeros(count).index_add(0, cell, weight)[:, None]


def blend(rows: Tensor, aggregated: Tensor, momentum: float, renormalise: bool) -> Tensor:
    """`h' = lambda h + (1 - lambda) h_hat`, re-normalised (Eq. 17-18). At lambda = 1 the rows stay as they are."""
    if momentum == 1.0:
        return rows
    mixed = momentum * rows + (1.0 - momentum) * aggregated
    return normalize(mixed, dim=-1) if renormalise else mixed
