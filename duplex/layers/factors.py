"""Trained modules on image features: adapter, perceptron, disentanglers, fusion (the Duplex paper's Eq. 3-5, 11).

Two disentanglers extract a feature's state factor and object factor, its parts that show the state and the object;
fusion joins two factors to one feature, a counterfactual if they come from different images.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, normalize, relu


def zero_initialised(layer: nn.Linear) -> nn.Linear:
    """The layer, with weight and bias set to zero."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Bottleneck(nn.Module):
    """Two-layer network `Up(dropout(relu(Down(y))))` over the channels of `y`; its output is zero before training.

    `y` are features [B, d], tokens [B, T, w] or feature maps [B, w, H, W].
    """

    def __init__(self, channels: int, width: int, rate: float) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, width), zero_initialised(nn.Linear(width, channels))
        self.rate = rate

    def forward(self, y: Tensor) -> Tensor:
        cells = y.movedim(1, -1) if y.ndim == 4 else y
        update: Tensor = self.up(dropout(relu(self.down(cells)), self.rate, self.training))
        return update.movedim(-1, 1) if y.ndim == 4 else update


class Adapter(Bottleneck):
    """Residual bottleneck on features z: `z + scale * Up(dropout(relu(Down(z))))`; untrained, it returns z."""

    def __init__(self, dim: int, width: int, rate: float, scale: float) -> None:
        super().__init__(dim, width, rate)
        self.scale = scale

    def forward(self, z: Tensor) -> Tensor:  # [B, d] -> [B, d]
        return z + self.scale * super().forward(z)


class Mlp(nn.Sequential):
    """Perceptron: `layers` times (linear, layer norm, relu, dropout), then a linear map.

    Layer norm replaces the batch norm of some papers, so that features do not depend on the batch.
    """

    def __init__(self, inside: int, width: int, out: int, layers: int, dropout: float) -> None:
        sizes = [inside, *[width] * layers]
        parts: list[nn.Module] = []
        for a, b in pairwise(sizes):
            parts += [nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*parts, nn.Linear(sizes[-1], out))


class Disentangler(nn.Module):
    """Two-layer MLP that extracts a feature's part for state or object; `residual` adds the feature to its output."""

    def __init__(self, dim: int, width: int, residual: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, width), nn.Linear(width, dim)
        self.residual = residual

    def forward(self, z: Tensor) -> Tensor:  # [B, d] -> [B, d]
        out = self.second(relu(self.first(z)))
        return normalize(z + out if self.residual else out, dim=-1)


class Fusion(nn.Module):
    """Learned fusion of a state factor and an object factor, perhaps of different images (the Duplex paper's Eq. 11).

    `phi(z^s, z^o) = normalise(relu(M_s z^s + M_o z^o))`, without the relu unless `rectified`. The factors of each image
    are projected once, by `project`, and then combined with those of all other images.
    """

    def __init__(self, dim: int, *, rectified: bool = True) -> None:
        super().__init__()
        self.rectified = rectified
        self.state, self.object = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def project(self, z_s: Tensor, z_o: Tensor) -> tuple[Tensor, Tensor]:
        """Projections of state factors and of object factors [B, d]; fusion adds and normalises them."""
        return self.state(z_s), self.object(z_o)

    def forward(self, z_s: Tensor, z_o: Tensor) -> Tensor:
        """Each image's state factor fused with its object factor [B, d]."""
        state, object = self.project(z_s, z_o)
        joined = state + object
        return normalize(relu(joined) if self.rectified else joined, dim=-1)


class Factors(nn.Module):
    """Two networks that split features [B, d] into state parts and object parts (factors) [B, d], of unit length."""

    def __init__(self, dim: int, width: int, residual: bool) -> None:
        super().__init__()
        self.state, self.object = Disentangler(dim, width, residual), Disentangler(dim, width, residual)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.state(z), self.object(z)


def unit(z: Tensor) -> Tensor:
    """`z` with rows of unit length; half precision becomes float32."""
    return normalize(z.to(torch.float32) if z.dtype in (torch.float16, torch.bfloat16) else z, dim=-1)
