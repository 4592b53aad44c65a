"""Indices made on the host, where labels are known without asking a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from duplex.labels import Ints


def send(device: torch.device, *arrays: Ints) -> tuple[Tensor, ...]:
    """Lists of indices as tensors on a device: one copy, for which the host does not wait."""
    if device.type == "cpu":
        return tuple(torch.as_tensor(array) for array in arrays)
    whole = torch.from_numpy(np.concatenate(arrays))
    if torch.cuda.is_available():
        whole = whole.pin_memory()
    there = whole.to(device, non_blocking=True)
    return tuple(torch.split(there, [len(array) for array in arrays]))
