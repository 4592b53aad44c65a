"""What an evaluation refuses before it reads a score."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from duplex.assessment import assess
from duplex.errors import UsageError
from duplex.features.examples import Examples
from duplex.model.options import Options
from tests.model.world import features, small_labels, small_network


def test_k_goes_up_to_the_number_of_columns():
    labels = small_labels()
    columns = labels.target("closed", "test")
    own = np.resize(labels.pairs["test"], 8)
    examples = Examples(np.arange(8), features(8, 0), torch.as_tensor(own))
    network = small_network(Options(width=5))
    assert assess(network, examples, labels, columns, k=len(columns)).evidence.k == len(columns)
    with pytest.raises(UsageError, match=rf"k = 500 is more than the {len(columns)} compositions.*evaluation.k"):
        assess(network, examples, labels, columns, k=500)
