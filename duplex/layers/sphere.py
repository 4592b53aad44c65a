"""The unit sphere's geometry: logarithm, exponential and intrinsic mean."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

SMALL = 1e-7


def log_map(mu: Tensor, u: Tensor) -> Tensor:
    """`log_mu(u) = theta / sin(theta) (u - cos(theta) mu)`, `cos(theta) = mu . u`: `mu` [d], `u` [C, d] -> [C, d]."""
    cosine = (u @ mu).clamp(-1, 1)
    theta = cosine.arccos()
    factor = torch.where(theta > SMALL, theta / theta.sin().clamp(min=SMALL), 1.0)
    return factor[:, None] * (u - cosine[:, None] * mu)


def exp_map(mu: Tensor, v: Tensor) -> Tensor:
    """`exp_mu(v) = cos(|v|) mu + sin(|v|) v / |v|`: [C, d]."""
    length = v.norm(dim=-1, keepdim=True)
    return normalize(length.cos() * mu + torch.sinc(length / torch.pi) * v, dim=-1)


def intrinsic_mean(u: Tensor, weights: Tensor | None = None, rounds: int = 20) -> Tensor:
    """The point at which tangent vectors to the rows of `u`, weighted, cancel [d], by steps along their mean."""
    weights = u.new_ones(len(u)) if weights is None else weights
    shares = weights / weights.sum()
    mu = normalize(shares @ u, dim=-1)
    for _ in range(rounds):
        mu = exp_map(mu, (shares @ log_map(mu, u))[None])[0]
    return mu
