"""Open readings of the paper's form; their losses have a twin in test_duplex."""

from __future__ import annotations

import pytest
import torch

from duplex.errors import UsageError
from duplex.methods.duplex import DuplexOptions as Options
from tests.methods.world import every_row, features, small_labels, small_method, step_of

SEEN = small_labels().pairs["train"].tolist()


def test_empty_rows_are_what_first_refines_them():
    """A row of nothing gives a logit of 0; blended with nothing, the messages' mean is all there is."""
    method = small_method(Options(width=5, adapter="none", unseen_rows="empty", momentum=0.9))
    unseen = [c for c in range(method.labels.size) if c not in SEEN]
    assert every_row(method)[unseen].count_nonzero() == 0
    torch.testing.assert_close(every_row(method)[SEEN].norm(dim=1), torch.ones(len(SEEN), dtype=torch.float64))
    step_of(method, features(len(SEEN), 5), SEEN, method.shared())
    refined = method._refined
    assert refined is not None
    touched = [c for c in refined.compositions.tolist() if c in unseen]
    assert touched
    method.after_batch()
    torch.testing.assert_close(every_row(method)[touched].norm(dim=1), torch.ones(len(touched), dtype=torch.float64))
    rest = [c for c in unseen if c not in touched]
    assert every_row(method)[rest].count_nonzero() == 0


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"nodes": "label", "fusion": "additive"}, "nodes: label needs fusion"),
        ({"blend": "anchored", "codebook": "trainable"}, "blend: anchored needs codebook: buffer"),
        ({"fusion_rank": 0}, "fusion_rank is 0"),
        ({"messages": ("state", "object", "state")}, "messages names a term twice"),
        ({"paths": "c", "losses": ("ct",), "inference": ("ct",)}, "graph: true needs paths: cso"),
        ({"fusion_rank": 4, "fusion": "additive"}, "fusion: additive has no matrices"),
    ],
)
def test_readings_that_exclude_each_other(row, sentence):
    with pytest.raises(UsageError, match=sentence):
        Options(**row)


@pytest.mark.parametrize(
    "row",
    [
        {"graph": False, "messages": ()},
        {"graph": False, "rows": "ema", "losses": ("s", "ch"), "inference": ("so",)},
        {"graph": False, "rows": "recomputed", "losses": ("s",), "inference": ("ch",)},
        {"nodes": "label", "fusion": "linear"},
        {"nodes": "image", "fusion": "additive"},
        {"blend": "anchored"},
        {"blend": "recursive", "codebook": "trainable"},
        {"fusion_rank": 4, "fusion": "linear"},
        {"paths": "c", "graph": False, "losses": ("ct", "ch"), "inference": ("ct",)},
    ],
    ids=str,
)
def test_readings_that_go_together(row):
    assert {name: getattr(Options(**row), name) for name in row} == row
