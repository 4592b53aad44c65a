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
    found = torch.zeros_like(own)
    for group in own.unique().tolist():
        mine = own == group
        found[mine] = transport(z[mine] @ rows[group].T).argmax(1)
    return found


def transport(similarity: Tensor) -> Tensor:
    """Sinkhorn-Knopp: a plan [n, K] near `exp(similarity / SHARPNESS)` whose columns weigh alike and so do its rows."""
    log = similarity / SHARPNESS
    for _ in range(ROUNDS):
        log = log - log.logsumexp(0, keepdim=True)  # each prototype the same mass
        log = log - log.logsumexp(1, keepdim=True)  # each image the same mass
    return log.exp()


def moved(rows: Tensor, z: Tensor, own: Tensor, cluster: Tensor, momentum: float) -> Tensor:
    """`p <- normalise(mu p + (1 - mu) mean of its images)`; a prototype without images stays, bit for bit."""
    groups, clusters, dim = rows.shape
    place = own * clusters + cluster
    sums = rows.new_zeros(groups * clusters, dim).index_add(0, place, z.to(rows))
    sizes = place.bincount(minlength=groups * clusters)[:, None]
    flat = rows.reshape(-1, dim)
    blended = normalize(momentum * flat + (1 - momentum) * sums / sizes.clamp(min=1), dim=-1)
    return torch.where(sizes > 0, blended, flat).reshape(rows.shape)
