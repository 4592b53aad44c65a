"""One step of the local graph: from a batch's factors to refined visual prototypes (Eq. 12-18, Algorithm 1).

The graph is bipartite: messages go only into the prototypes of the batch's candidate compositions, from each image's
state factor, each image's object factor and each counterfactual. Their sums factor by state, by object and by cell of
the (state x object) grid, so no matrix over the graph's nodes is ever built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.parts.counterfactual import cell_sums
from duplex.parts.factors import Fusion

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

    def by_label(self) -> Nodes:
        """One factor node a state and one an object of the batch, so one counterfactual a cell: means over their images
        (`z_s` [S, d], `p_s` [S, M], `states` [S]; objects likewise), factors of unit length again."""
        states, of_s = self.states.unique(return_inverse=True)
        objects, of_o = self.objects.unique(return_inverse=True)
        z_s, z_o = normalize(_means(self.z_s, of_s, states), dim=-1), normalize(_means(self.z_o, of_o, objects), dim=-1)
        return Nodes(self.z, z_s, z_o, _means(self.p_s, of_s, states), _means(self.p_o, of_o, objects), states, objects)


def _means(rows: Tensor, group: Tensor, groups: Tensor) -> Tensor:
    """Mean of `rows` [B, k] over each of `groups`: [G, k]."""
    sums = rows.new_zeros(len(groups), rows.shape[1]).index_add(0, group, rows)
    return sums / group.bincount(minlength=len(groups))[:, None]


@dataclass(frozen=True)
class Candidates:
    """`C_cand = (S(B) x O(B)) & C_tgt` as the kept cells of a small grid (Eq. 12-13)."""

    states: Tensor  # S(B), sorted [S]
    objects: Tensor  # O(B), sorted [O]
    state_of: Tensor  # place of each image's state in S(B) [B]
    object_of: Tensor  # place of each image's object in O(B) [B]
    kept: Tensor  # [S, O] bool
    compositions: Tensor  # the kept cells as m * N + n, sorted [C]

    @classmethod
    def of(cls, states: Tensor, objects: Tensor, is_target: Tensor, n_objects: int) -> Candidates:
        """`is_target [M*N]` is the target set as a mask."""
        distinct_s, state_of = states.unique(return_inverse=True)
        distinct_o, object_of = objects.unique(return_inverse=True)
        grid = distinct_s[:, None] * n_objects + distinct_o[None]  # [S, O]
        kept = is_target[grid]
        return cls(distinct_s, distinct_o, state_of, object_of, kept, grid[kept])


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
    kept, cells = candidates.kept, candidates.kept.nonzero()
    m, n = cells[:, 0], cells[:, 1]  # place of each candidate in the grid [C]
    if kind == "state":
        p = nodes.p_s[:, candidates.states] / kept.sum(1).clamp(min=1)  # p(s_m|x_i) / |O_cand(m)|  [B, S]
        return (p.T @ nodes.z_s)[m], p.sum(0)[m, None]
    if kind == "object":
        p = nodes.p_o[:, candidates.objects] / kept.sum(0).clamp(min=1)  # p(o_n|x_j) / |S_cand(n)|  [B, O]
        return (p.T @ nodes.z_o)[n], p.sum(0)[n, None]
    return _counterfactuals(nodes, candidates, fusion)


def _counterfactuals(nodes: Nodes, candidates: Candidates, fusion: Fusion | None) -> Sums:
    """Weighted sums of the counterfactuals with each candidate's own label [C, d], and of their weights [C, 1].

    A pair `(i, j)` is kept when its label is a candidate; its weight is `p(s_{m_i}|x_i) p(o_{n_j}|x_j)`. Without a
    learned fusion `z^cf = normalise(z^c_i + z^c_j - mean z^c)`: what one image adds to the average and the other adds,
    in the space in which prototypes are compared with images.
    """
    i, j = candidates.kept[candidates.state_of][:, candidates.object_of].nonzero(as_tuple=True)  # kept pairs [P]
    place = torch.full_like(candidates.kept, -1, dtype=torch.long)
    place[candidates.kept] = torch.arange(len(candidates.compositions), device=place.device)
    cell = place[candidates.state_of[i], candidates.object_of[j]]  # [P]
    own_s = nodes.p_s.gather(1, nodes.states[:, None])[:, 0]  # [B]
    own_o = nodes.p_o.gather(1, nodes.objects[:, None])[:, 0]  # [B]
    weight = own_s.index_select(0, i) * own_o.index_select(0, j)  # [P]
    pair = (nodes.z, nodes.z - nodes.z.mean(0)) if fusion is None else fusion.project(nodes.z_s, nodes.z_o)
    count = len(candidates.compositions)
    sums = cell_sums(*pair, weight, i, j, cell, count, rectified=fusion is not None and fusion.rectified)
    return sums, weight.new_zeros(count).index_add(0, cell, weight)[:, None]


def blend(rows: Tensor, aggregated: Tensor, momentum: float, renormalise: bool) -> Tensor:
    """`h' = lambda h + (1 - lambda) h_hat`, re-normalised (Eq. 17-18). At lambda = 1 the rows stay as they are."""
    if momentum == 1.0:
        return rows
    mixed = momentum * rows + (1.0 - momentum) * aggregated
    return normalize(mixed, dim=-1) if renormalise else mixed
