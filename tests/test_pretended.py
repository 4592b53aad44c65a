"""The pretended device refuses what a GPU refuses and counts the waits of the host."""

from typing import Any

import pytest
import torch

from tests.pretended import Pretended

NAME = Pretended.name


def test_tensors_of_two_devices_do_not_mix(pretended: Pretended) -> None:
    there, here = torch.ones(3, device=NAME), torch.ones(3)
    with pytest.raises(RuntimeError, match="same device: add"):
        _ = there + here
    assert (there + torch.tensor(2.0)).tolist() == [3.0] * 3  # as on a GPU
    with pytest.raises(TypeError, match="NumPy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=NAME, generator=torch.Generator())


@pytest.mark.parametrize(
    "work",
    [lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.nonzero(), lambda x: x[x > 0],
     lambda x: x[torch.tensor([0, 1])], lambda x: bool((x > 0).any()), lambda x: x.copy_(torch.zeros(3)),
     lambda x: torch.zeros(3).copy_(x)],
)  # fmt: skip
def test_each_wait_of_the_host_is_counted_once(pretended: Pretended, work: Any) -> None:
    x = torch.ones(3, device=NAME)
    pretended.reset()
    work(x)
    assert pretended.synchronisations.total() == 1


def test_asynchronous_copies_and_views_are_not_counted_as_waits(pretended: Pretended) -> None:
    x = torch.ones(2, 3, device=NAME)
    pretended.reset()
    x.to("cpu", non_blocking=True)
    x.copy_(torch.zeros(2, 3), non_blocking=True)
    y = x.T.reshape(-1)[1:].unsqueeze(0)
    assert pretended.synchronisations == {}
    y.mul_(2).sum()
    assert pretended.operations == {"_to_copy": 1, "copy_": 1, "mul_": 1, "sum": 1, "clone": 1}
