"""`threads` sets the number of threads within its block only."""

import pytest
import torch

from duplex.system.threads import threads


@pytest.fixture(autouse=True)
def three():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("wanted", "found"), [(1, 1), (2, 2), ("auto", 3)])
def test_only_the_block_runs_with_the_wanted_threads(wanted, found):
    with threads(wanted):
        assert torch.get_num_threads() == found
    assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), threads(wanted):
        raise KeyError
    assert torch.get_num_threads() == 3
