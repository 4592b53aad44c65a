"""Several prototypes a primitive, kept by online clustering: assignment by optimal transport, movement by momentum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

SHARPNESS, ROUNDS = 0.05, 3  # entropy of the transport, and its iterations


def spread(z: Tensor, own: Tensor, rows: Tensor) -> Tensor:
    """First prototypes [G, K, d]: features of evenly chosen images of each group; one without images keeps its own."""
    found = rows.clone()
    for group in own.unique().tolist():
        mine = (own == group).nonzero()[:, 0]
        places = torch.arange(rows.shape[1], device=z.device) * len(mine) // rows.shape[1]
        found[group] = normalize(z[mine[places]], dim=-1).to(rows)
    return found


def assign(z: Tensor, own: Tensor, rows: Tensor) -> Tensor:
    """The prototype, among its group's, that transport gives each image [B]."""
    similarity = torch.bmm(rows.index_select(0, own), z[:, :, None].to(rows))[..., 0]  # [B, K]
    return transport(similarity, own, len(rows)).argmax(1)


def transport(similarity: Tensor, own: Tensor, groups: int) -> Tensor:
    """Sinkhorn-Knopp in every group at once: rows [B, K] of plans near `exp(similarity / SHARPNESS)` in which a group's
    columns weigh alike and so do its rows.

    Similarities are cosines, so exponents stay within 2 / SHARPNESS of each other: sums need no largest taken off.
    """
    log = similarity / SHARPNESS
    for _ in range(ROUNDS):
        masses = log.new_zeros(groups, log.shape[1]).index_add(0, own, log.exp())
        log = log - masses.log().index_select(0, own)  # each prototype of a group the same mass
        log = log - log.logsumexp(1, keepdim=True)  # each image the same mass
    return log.exp()


def moved(rows: Tensor, z: Tensor, own: Tensor, cluster: Tensor, momentum: float) -> Tensor:
    """`p <- normalise(mu p + (1 - mu) mean of its images)`; a prototype without images stays, bit for bit."""
    groups, clusters, dim = rows.shape
    place = own * clusters + cluster
    sums = rows.new_zeros(groups * clusters, dim).index_add(0, place, z.to(rows))
    sizes = sums.new_zeros(groups * clusters).index_add(0, place, sums.new_ones(len(place)))[:, None]
    flat = rows.reshape(-1, dim)
    blended = normalize(momentum * flat + (1 - momentum) * sums / sizes.clamp(min=1), dim=-1)
    return torch.where(sizes > 0, blended, flat).reshape(rows.shape)
