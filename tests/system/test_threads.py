"""So many threads inside, as many as before outside."""

from __future__ import annotations

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
def test_a_block_has_the_threads_it_asks_for(wanted, found):
    with threads(wanted):
        assert torch.get_num_threads() == found
    assert torch.get_num_threads() == 3


def test_a_block_that_fails_gives_them_back():
    with pytest.raises(KeyError), threads(1):
        raise KeyError
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("wanted", [0, -1, "all", 1.5, 2000, True])
def test_what_is_no_number_of_threads_is_refused(wanted):
    with pytest.raises(OptionError, match="threads"):
        TrainingOptions(learning_rate=0.1, batch_size=1, epochs=1, threads=wanted)
