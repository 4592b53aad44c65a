from __future__ import annotations

import numpy as np
import pytest
import torch

from duplex.methods.paths import CompositionIndex, copy_to_device, mean_over
from tests.methods.loops import close
from tests.pretended import Pretended


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
def test_means_are_by_state_and_by_object(shape):
    columns = CompositionIndex(np.array([0, 1, 2, 5]), 3)  # of state 2 there are none
    rows = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_state, by_object = columns.means(rows, 3, 3)
    close(by_state, torch.stack([rows[:3].mean(0), rows[3], torch.zeros(shape)]))
    close(by_object, torch.stack([rows[0], rows[1], rows[2:].mean(0)]))
    close(mean_over(rows, columns.objects, 3), by_object)


def test_index_arrays_are_copied_to_a_device_unchanged(pretended: Pretended) -> None:
    lists = np.array([3, 1]), np.empty(0, dtype=np.int64), np.array([7, 8, 9])
    for device in map(torch.device, ("cpu", pretended.name, "meta")):
        copies = copy_to_device(device, *lists)
        assert [(tensor.device.type, len(tensor)) for tensor in copies] == [(device.type, n) for n in (2, 0, 3)]
        if device.type != "meta":  # without pinned memory, and without values
            assert [tensor.cpu().tolist() for tensor in copies] == [array.tolist() for array in lists]
