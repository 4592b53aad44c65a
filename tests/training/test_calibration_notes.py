"""Training prints why a rule of feasibility cannot be followed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from duplex.errors import DuplexError
from duplex.features.tokens import Examples
from duplex.methods.duplex import DuplexOptions
from duplex.training.run import finish
from tests.methods.field import words
from tests.methods.world import features, small_labels, small_method

LABELS = small_labels()
SEEN = LABELS.pairs["val"][LABELS.seen[LABELS.pairs["val"]]]
UNSEEN = LABELS.pairs["val"][~LABELS.seen[LABELS.pairs["val"]]]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            SEEN,
            "validation images are of 0 unseen pairs, a feasibility threshold needs 2 or more: "
            "all pairs stay candidates\n",
        ),
        ([*SEEN, UNSEEN[0]], "validation images are of 1 unseen pair, a feasibility threshold needs 2 or more"),
        ([*SEEN, *UNSEEN], ""),
    ],
)
def test_auto_without_unseen_validation_pairs_says_that_all_pairs_compete(pairs, message, capsys):
    val = Examples(np.arange(8), {"cls": features(8, 4)}, torch.as_tensor(np.resize(pairs, 8)))
    spec = SimpleNamespace(name="m", worlds=("open",))
    settings = SimpleNamespace(feasibility="auto", thresholds=7)
    inputs = SimpleNamespace(labels=LABELS, words=words())
    if not message or len(pairs) > len(SEEN):
        found = finish(spec, small_method(DuplexOptions(width=5)), inputs, val, settings)  # type: ignore[arg-type]
        assert found.calibration["open"].threshold is None or not message
    else:
        with pytest.raises(DuplexError, match="validation AUC is undefined"):
            finish(spec, small_method(DuplexOptions(width=5)), inputs, val, settings)  # type: ignore[arg-type]
    error = capsys.readouterr().err
    assert error.startswith(message) and bool(error) == bool(message) and error.count("\n") <= 1
