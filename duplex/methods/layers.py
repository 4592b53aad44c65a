"""Layers and tensor functions of several methods: bottlenecks, MLPs, disentanglers, fusion."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, normalize, relu

from duplex.labels import Ints

QUICK = 1.702  # QuickGELU's constant


def unit(z: Tensor) -> Tensor:
    """Scale the rows of `z` to unit length; half precision is converted to float32."""
    return normalize(z.to(torch.float32) if z.dtype in (torch.float16, torch.bfloat16) else z, dim=-1)


def part_scales(variances: Tensor, parts: Sequence[int]) -> Tensor:
    """Factors [d] after which the features of each joined encoder have the total variance 1.

    variances: of each column of features [d]; parts: widths of the encoders' features, or none.
    """
    if not parts:
        return torch.ones_like(variances)
    scales = []
    for own in variances.split(list(parts)):
        scales.append(own.sum().clamp(min=1e-12).rsqrt().expand(len(own)))
    return torch.cat(scales)


def zero_initialised(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class QuickGelu(nn.Module):
    """OpenAI's approximation of GELU, `x sigmoid(1.702 x)`."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(QUICK * x)


class Bottleneck(nn.Module):
    """`Up(dropout(relu(Down(y))))` for y [B, d], [B, T, w] or [B, w, H, W]; untrained, it is 0."""

    def __init__(self, channels: int, width: int, rate: float) -> None:
        super().__init__()
        self.down = nn.Linear(channels, width)
        self.up = zero_initialised(nn.Linear(width, channels))
        self.rate = rate

    def forward(self, y: Tensor) -> Tensor:
        cells = y.movedim(1, -1) if y.ndim == 4 else y
        update: Tensor = self.up(dropout(relu(self.down(cells)), self.rate, self.training))
        return update.movedim(-1, 1) if y.ndim == 4 else update


class Adapter(Bottleneck):
    """Residual bottleneck, `z + scale * Up(dropout(relu(Down(z))))`; untrained, it returns z."""

    def __init__(self, dim: int, width: int, rate: float, scale: float) -> None:
        super().__init__(dim, width, rate)
        self.scale = scale

    def forward(self, z: Tensor) -> Tensor:  # [B, d] -> [B, d]
        return z + self.scale * super().forward(z)


class Mlp(nn.Sequential):
    """MLP with `layers` hidden layers (linear, layer norm, relu, dropout)."""

    def __init__(self, inside: int, width: int, out: int, layers: int, dropout: float) -> None:
        sizes = [inside, *[width] * layers]
        parts: list[nn.Module] = []
        for a, b in pairwise(sizes):
            parts += [nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*parts, nn.Linear(sizes[-1], out))


class Disentangler(nn.Module):
    """Two-layer MLP for a feature's state or object factor."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(dim, width)
        self.second = nn.Linear(width, dim)

    def forward(self, z: Tensor) -> Tensor:  # [B, d] -> [B, d]
        return normalize(self.second(relu(self.first(z))), dim=-1)


class BatchNormHead(nn.Sequential):
    """One layer, `dropout(relu(batch_norm(linear(z))))`."""

    def __init__(self, dim: int) -> None:
        super().__init__(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, z: Tensor) -> Tensor:  # [B, d] -> [B, d]
        self[1].train(self.training and len(z) > 1)
        for layer in self:
            z = layer(z)
        return z


class BatchNormDisentangler(nn.Module):
    """Disentangler `normalise(dropout(relu(batch_norm(linear(z)))))`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = BatchNormHead(dim)

    def forward(self, z: Tensor) -> Tensor:  # [B, d] -> [B, d]
        return normalize(self.layers(z), dim=-1)


class FactorNetworks(nn.Module):
    """Two networks that map features [B, d] to state and object factors [B, d] of unit length."""

    def __init__(self, dim: int, width: int, batch_norm: bool = False) -> None:
        super().__init__()

        def network() -> Disentangler | BatchNormDisentangler:
            return BatchNormDisentangler(dim) if batch_norm else Disentangler(dim, width)

        self.state = network()
        self.object = network()

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.state(z), self.object(z)


class Fusion(nn.Module):
    """Fuses factors: `normalise(relu(M_s z^s + M_o z^o))` (Eq. 11); `rank`: of M_s and M_o."""

    def __init__(self, dim: int, *, rectified: bool = True, rank: int | None = None) -> None:
        super().__init__()
        self.rectified = rectified
        self.state = _matrix(dim, rank)
        self.object = _matrix(dim, rank)

    def project(self, z_s: Tensor, z_o: Tensor) -> tuple[Tensor, Tensor]:
        """`M_s z^s` and `M_o z^o` [B, d], from which all pairs of these factors are fused."""
        return self.state(z_s), self.object(z_o)

    def forward(self, z_s: Tensor, z_o: Tensor) -> Tensor:
        state, object = self.project(z_s, z_o)
        joined = state + object
        return normalize(relu(joined) if self.rectified else joined, dim=-1)


def _matrix(dim: int, rank: int | None) -> nn.Module:
    if rank is None:
        return nn.Linear(dim, dim, bias=False)
    return nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False))


class CompositionIndex(nn.Module):
    """A sorted list of compositions on a device, with the state and the object of each."""

    compositions: Tensor
    states: Tensor
    objects: Tensor

    def __init__(self, compositions: Ints, n_objects: int) -> None:
        super().__init__()
        self.compositions_np = compositions  # on the host
        rows = torch.as_tensor(compositions)
        parts = {"compositions": rows, "states": rows // n_objects, "objects": rows % n_objects}
        for name, value in parts.items():
            self.register_buffer(name, value, persistent=False)

    def positions_of_listed(self, compositions: Tensor) -> Tensor:
        """Positions of `compositions` in the list, all of which must be listed."""
        return torch.searchsorted(self.compositions, compositions)

    def means(self, rows: Tensor, states: int, objects: int) -> tuple[Tensor, Tensor]:
        """Mean of `rows` [C, ...] per state [M, ...] and object [N, ...]; 0 if there is none."""
        return mean_over(rows, self.states, states), mean_over(rows, self.objects, objects)


def mean_over(rows: Tensor, group: Tensor, count: int) -> Tensor:
    """Mean of `rows` over each of `count` groups [count, ...]; 0 for an empty group."""
    sums = rows.new_zeros(count, *rows.shape[1:]).index_add(0, group, rows)
    sizes = rows.new_zeros(count).index_add(0, group, rows.new_ones(len(rows))).clamp(min=1)
    return sums / sizes.view(-1, *[1] * (rows.ndim - 1))


def copy_to_device(device: torch.device, *arrays: Ints) -> tuple[Tensor, ...]:
    """Convert index arrays to tensors on a device, in a single asynchronous copy."""
    if device.type == "cpu":
        return tuple(torch.as_tensor(array) for array in arrays)
    whole = torch.from_numpy(np.concatenate(arrays))
    if torch.cuda.is_available():
        whole = whole.pin_memory()
    return tuple(torch.split(whole.to(device, non_blocking=True), [len(array) for array in arrays]))
