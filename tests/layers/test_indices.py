"""Lists of indices on their way to a device."""

from __future__ import annotations

import numpy as np
import torch

from duplex.layers.indices import send
from tests.pretended import Pretended


def test_lists_arrive_as_they_are_on_a_cpu_and_on_a_device(pretended: Pretended) -> None:
    lists = np.array([3, 1]), np.empty(0, dtype=np.int64), np.array([7, 8, 9])
    for device in (torch.device("cpu"), torch.device(pretended.name)):
        found = send(device, *lists)
        assert [tensor.device.type for tensor in found] == [device.type] * 3
        assert [tensor.cpu().tolist() for tensor in found] == [array.tolist() for array in lists]
