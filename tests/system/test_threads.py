"""`threads` sets the number of threads within its block only."""

import pytest
import torch

from duplex.options import OptionError, TrainingOptions
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


@pytest.mark.parametrize("wanted", [0, -1, "all", 1.5, 2000, True])
def test_an_invalid_number_of_threads_is_refused(wanted):
    with pytest.raises(OptionError, match="threads"):
        TrainingOptions(learning_rate=0.1, batch_size=1, epochs=1, threads=wanted)
