"""What an evaluation refuses before it reads a score."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from duplex.assessment import Field, assess
from duplex.errors import UsageError
from duplex.features.examples import Examples
from duplex.methods.duplex import DuplexOptions as Options
from tests.methods.world import features, small_labels, small_method


def test_k_goes_up_to_the_number_of_columns():
    labels = small_labels()
    columns = labels.target("closed", "test")
    own = np.resize(labels.pairs["test"], 8)
    examples = Examples(np.arange(8), {"cls": features(8, 0)}, torch.as_tensor(own))
    field = Field.of(small_method(Options(width=5)), columns)
    assert assess(field, examples, labels, k=len(columns)).evidence.k == len(columns)
    with pytest.raises(UsageError, match=rf"k = 500 is more than the {len(columns)} compositions.*evaluation.k"):
        assess(field, examples, labels, k=500)
