"""Visual factors: the adapter, the two disentanglers and the counterfactual fusion (Eq. 3-5, 11)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, normalize, relu


class Adapter(nn.Module):
    """`z <- z + a Up(dropout(relu(Down(z))))`, starting as the identity: the up-projection is zero."""

    def __init__(self, dim: int, width: int, rate: float, scale: float) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(dim, width), nn.Linear(width, dim)
        self.rate, self.scale = rate, scale
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, z: Tensor) -> Tensor:  # [B, d] -> [B, d]
        moved: Tensor = self.up(dropout(relu(self.down(z)), self.rate, self.training))
        return z + self.scale * moved


class Disentangler(nn.Module):
    """`D^s` or `D^o`: a two-layer MLP, L2-normalised; `residual` adds its input."""

    def __init__(self, dim: int, width: int, residual: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, width), nn.Linear(width, dim)
        self.residual = residual

    def forward(self, z: Tensor) -> Tensor:  # [B, d] -> [B, d]
        out = self.second(relu(self.first(z)))
        return normalize(z + out if self.residual else out, dim=-1)


class Fusion(nn.Module):
    """`phi(z^s, z^o) = normalise(relu(M_s z^s + M_o z^o))` (Eq. 11), the relu where it is `rectified`.

    The two projections are applied to each image once; a counterfactual is made of two of their rows. With a `rank` r
    each is a product of a [d, r] and an [r, d] matrix.
    """

    def __init__(self, dim: int, *, rectified: bool = True, rank: int | None = None) -> None:
        super().__init__()
        self.rectified = rectified
        self.state, self.object = _projection(dim, rank), _projection(dim, rank)

    def project(self, z_s: Tensor, z_o: Tensor) -> tuple[Tensor, Tensor]:  # [B, d], [B, d]
        return self.state(z_s), self.object(z_o)

    def join(self, state: Tensor, object: Tensor) -> Tensor:
        """Counterfactuals of projected factors, [..., d] each."""
        joined = state + object
        return normalize(relu(joined) if self.rectified else joined, dim=-1)

    def forward(self, z_s: Tensor, z_o: Tensor) -> Tensor:
        return self.join(*self.project(z_s, z_o))


def _projection(dim: int, rank: int | None) -> nn.Module:
    if rank is None:
        return nn.Linear(dim, dim, bias=False)
    return nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False))


class Factors(nn.Module):
    """`z^s = D^s(z)`, `z^o = D^o(z)`."""

    def __init__(self, dim: int, width: int, residual: bool) -> None:
        super().__init__()
        self.state, self.object = Disentangler(dim, width, residual), Disentangler(dim, width, residual)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.state(z), self.object(z)


def unit(z: Tensor) -> Tensor:
    """L2-normalised float32."""
    return normalize(z.to(torch.float32) if z.dtype in (torch.float16, torch.bfloat16) else z, dim=-1)
