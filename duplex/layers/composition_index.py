"""Lists of compositions with their states and objects on a device, and copies of index arrays to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from duplex.labels import Ints


class CompositionIndex(nn.Module):
    """A sorted list of compositions on a device, with the state and the object of each."""

    compositions: Tensor
    states: Tensor
    objects: Tensor

    def __init__(self, compositions: Ints, n_objects: int) -> None:
        super().__init__()
        self.compositions_np = compositions  # on the host
        rows = torch.as_tensor(compositions)
        for name, value in (("compositions", rows), ("states", rows // n_objects), ("objects", rows % n_objects)):
            self.register_buffer(name, value, persistent=False)

    def positions(self, compositions: Tensor) -> Tensor:
        """Position of each of `compositions` in the list; undefined for compositions that are not in it."""
        return torch.searchsorted(self.compositions, compositions)

    def means(self, rows: Tensor, states: int, objects: int) -> tuple[Tensor, Tensor]:
        """Means by state [M, ...] and by object [N, ...] of `rows` [C, ...]; zero where there are none."""
        return mean_over(rows, self.states, states), mean_over(rows, self.objects, objects)


def mean_over(rows: Tensor, group: Tensor, count: int) -> Tensor:
    """Mean of the `rows` of each group [count, ...]; zero for an empty group."""
    sums = rows.new_zeros(count, *rows.shape[1:]).index_add(0, group, rows)
    sizes = rows.new_zeros(count).index_add(0, group, rows.new_ones(len(rows))).clamp(min=1)
    return sums / sizes.view(-1, *[1] * (rows.ndim - 1))


def copy_to_device(device: torch.device, *arrays: Ints) -> tuple[Tensor, ...]:
    """Index arrays as tensors on a device, by one asynchronous copy."""
    if device.type == "cpu":
        return tuple(torch.as_tensor(array) for array in arrays)
    whole = torch.from_numpy(np.concatenate(arrays))
    if torch.cuda.is_available():
        whole = whole.pin_memory()
    copied = whole.to(device, non_blocking=True)
    return tuple(torch.split(copied, [len(array) for array in arrays]))
