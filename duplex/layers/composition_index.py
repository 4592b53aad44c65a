"""What heads over cached features are made of: perceptrons, word vectors as tables, cosines."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from duplex.labels import Ints


class Mlp(nn.Sequential):
    """`layers` times (linear, layer norm, relu, dropout), then a linear map. Without layers it is linear alone.

    Layer norm stands where some papers have batch norm: an image's features do not depend on its batch.
    """

    def __init__(self, inside: int, width: int, out: int, layers: int, dropout: float) -> None:
        sizes = [inside, *[width] * layers]
        parts: list[nn.Module] = []
        for a, b in pairwise(sizes):
            parts += [nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*parts, nn.Linear(sizes[-1], out))


class WordTable(nn.Module):
    """A vector a primitive, which starts at its word's; moved by gradients where `trained`."""

    states: Tensor
    objects: Tensor

    def __init__(self, states: Tensor, objects: Tensor, *, trained: bool) -> None:
        super().__init__()
        for name, vectors in (("states", states), ("objects", objects)):
            rows = normalize(vectors.detach().clone().to(torch.float32), dim=-1)  # [M, w], [N, w]
            if trained:
                self.register_parameter(name, nn.Parameter(rows))
            else:
                self.register_buffer(name, rows)

    @property
    def width(self) -> int:
        return self.states.shape[1]


class Composer(nn.Module):
    """`W [w_s ; w_o] + b` of pairs: each primitive goes through its half of `W` once."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.state, self.object = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, states: Tensor, objects: Tensor, m: Tensor, n: Tensor) -> Tensor:
        """`states` [M, w], `objects` [N, w], primitives `m`, `n` of each pair [C] -> [C, out]."""
        found: Tensor = self.state(states).index_select(0, m) + self.object(objects).index_select(0, n)
        return found


class Columns(nn.Module):
    """Some compositions on a device: their states, objects, and where a composition stands among them."""

    compositions: Tensor
    states: Tensor
    objects: Tensor

    def __init__(self, compositions: Ints, n_objects: int) -> None:
        super().__init__()
        self.host = compositions  # the same without asking the device
        rows = torch.as_tensor(compositions)
        for name, value in (("compositions", rows), ("states", rows // n_objects), ("objects", rows % n_objects)):
            self.register_buffer(name, value, persistent=False)

    def places(self, compositions: Tensor) -> Tensor:
        """Columns of compositions that are among them; they are sorted."""
        return torch.searchsorted(self.compositions, compositions)

    def means(self, rows: Tensor, states: int, objects: int) -> tuple[Tensor, Tensor]:
        """Means of rows [C, ...] over the compositions with each state and each object; nothing for one without."""
        return mean_over(rows, self.states, states), mean_over(rows, self.objects, objects)


def mean_over(rows: Tensor, group: Tensor, count: int) -> Tensor:
    sums = rows.new_zeros(count, *rows.shape[1:]).index_add(0, group, rows)
    sizes = rows.new_zeros(count).index_add(0, group, rows.new_ones(len(rows))).clamp(min=1)
    return sums / sizes.view(-1, *[1] * (rows.ndim - 1))
