"""Examples: each split has its readable images."""

import numpy as np
import pandas as pd
import pytest
import torch

from duplex.errors import DuplexError
from duplex.features.tokens import join_labels
from duplex.labels import SPLITS, LabelSpace

ROWS = 12
PLACES = [SPLITS[row % len(SPLITS)] for row in range(ROWS)]
MANIFEST = pd.DataFrame(
    {
        "image": [f"{row}.jpg" for row in range(ROWS)], "state": ["red", "blue", "blue", "red"] * 3,
        "object": ["star", "star", "heart", "heart"] * 3, "split": PLACES,
    }
)  # fmt: skip
PAIRS = {str(split): list(zip(part["state"], part["object"], strict=True)) for split, part in MANIFEST.groupby("split")}
LABELS = LabelSpace.from_pairs(PAIRS)
INPUTS = {
    "cls": np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float16),
    "patch": np.random.default_rng(1).normal(size=(ROWS, 2, 3)).astype(np.float16),
}
BAD = np.isin(np.arange(ROWS), [0, 4, 5])


def test_a_split_has_its_readable_rows_in_the_order_of_the_manifest() -> None:
    found = join_labels(MANIFEST, LABELS, INPUTS, BAD)
    assert tuple(found) == SPLITS
    for split, examples in found.items():
        rows = [row for row in range(ROWS) if PLACES[row] == split and not BAD[row]]
        assert examples.rows.tolist() == rows and len(examples) == len(rows) > 0
        pairs = MANIFEST.iloc[rows]
        expected = LABELS.index(pairs["state"].tolist(), pairs["object"].tolist())
        assert examples.compositions.tolist() == expected.tolist()
        assert examples.cls.dtype == torch.float32 and examples.inputs["patch"].dtype == torch.float16
        assert np.array_equal(examples.cls.numpy(), INPUTS["cls"][rows].astype(np.float32))
        assert np.array_equal(examples.inputs["patch"].numpy(), INPUTS["patch"][rows])


def test_a_cache_of_another_length_is_refused() -> None:
    with pytest.raises(DuplexError, match=r"the manifest has 12 rows, but its feature cache has 11"):
        join_labels(MANIFEST, LABELS, INPUTS, BAD[1:])
