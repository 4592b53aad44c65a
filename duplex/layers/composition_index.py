"""Index arrays on a device: copies, and lists of compositions with their states and objects."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from duplex.labels import Ints


class CompositionIndex(nn.Module):
    """A sorted list of compositions on a device, with their states and objects."""

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
        """Return the position of each of `compositions` in the list; undefined for compositions that are not in it."""
        return torch.searchsorted(self.compositions, compositions)

    def means(self, rows: Tensor, states: int, objects: int) -> tuple[Tensor, Tensor]:
        """Return the means of `rows` [C, ...] by state and by object; zero for a state or object without compositions.

        states, objects: number of states and of objects.
        """
        return mean_over(rows, self.states, states), mean_over(rows, self.objects, objects)


def mean_over(rows: Tensor, group: Tensor, count: int) -> Tensor:
    """Return the mean of `rows` over each group [count, ...]; zero for an empty group."""
    sums = rows.new_zeros(count, *rows.shape[1:]).index_add(0, group, rows)
    sizes = rows.new_zeros(count).index_add(0, group, rows.new_ones(len(rows))).clamp(min=1)
    return sums / sizes.view(-1, *[1] * (rows.ndim - 1))


def copy_to_device(device: torch.device, *arrays: Ints) -> tuple[Tensor, ...]:
    """Return index arrays as tensors on a device, by one asynchronous copy."""
    if device.type == "cpu":
        return tuple(torch.as_tensor(array) for array in arrays)
    whole = torch.from_numpy(np.concatenate(arrays))
    if torch.cuda.is_available():
        whole = whole.pin_memory()
    copied = whole.to(device, non_blocking=True)
    return tuple(torch.split(copied, [len(array) for array in arrays]))
