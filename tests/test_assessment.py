"""One pass over a split: what it refuses before it reads a score, its blocks, and the best compositions it keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from duplex.assessment import Field, assess, validation_auc
from duplex.errors import DuplexError, UsageError
from duplex.evaluation.evidence import Evidence
from duplex.evaluation.metrics import measure
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


def eight(split: str, own: Any = None) -> Examples:
    listed = small_labels().pairs[split]
    return Examples(
        np.arange(8), {"cls": features(8, 0)}, torch.as_tensor(np.resize(listed if own is None else own, 8))
    )


def test_blocks_of_images_change_nothing(monkeypatch):
    field = Field.of(small_method(Options(width=5)), small_labels().target("closed", "test"))
    examples = eight("test")
    whole = field.scorer(examples.inputs)
    monkeypatch.setattr("duplex.assessment.BLOCK_SCORES", 3 * len(field.columns))
    found = list(field.blocks(examples.inputs))
    assert [(rows.start, rows.stop) for rows, _ in found] == [(0, 3), (3, 6), (6, 8)]
    torch.testing.assert_close(torch.cat([scores for _, scores in found]), whole)


def test_the_best_compositions_are_those_that_may_be_with_the_bias_added():
    labels = small_labels()
    field = Field.of(small_method(Options(width=5)), labels.target("open", "test"))
    examples, live = eight("test"), np.arange(labels.size) % 4 != 1
    live |= labels.seen
    assert not live.all()
    scores = field.scorer(examples.inputs).numpy()
    assert assess(field, examples, labels).top.shape == (8, 0)
    for bias in (-1.0, 0.5):
        shifted = np.where(live, scores + np.where(labels.seen, 0, np.float32(bias)), -np.inf)
        found = assess(field, examples, labels, live=live, top=3, bias=bias).top
        assert (found == np.argsort(-shifted, axis=1)[:, :3]).all()
    assert assess(field, examples, labels, top=100).top.shape == (8, labels.size)


def test_a_label_outside_of_the_target_set_and_a_split_without_pictures_are_refused():
    labels = small_labels()
    columns = labels.target("closed", "val")
    outside = np.setdiff1d(np.arange(labels.size), columns)
    field = Field.of(small_method(Options(width=5)), columns)
    for own in outside[[0, -1]]:
        with pytest.raises(DuplexError, match="outside of its target set"):
            assess(field, eight("val", [own]), labels)
    with pytest.raises(DuplexError, match="no readable image"):
        assess(field, Examples(np.arange(0), {"cls": features(0, 0)}, torch.zeros(0, dtype=torch.long)), labels)


def test_validation_needs_images_of_both_kinds():
    labels, method = small_labels(), small_method(Options(width=5))
    seen = labels.pairs["val"][labels.seen[labels.pairs["val"]]]
    with pytest.raises(DuplexError, match="seen and of unseen pairs"):
        validation_auc(method, eight("val", seen), labels)
    assert 0 <= validation_auc(method, eight("val"), labels) <= 1


@pytest.mark.parametrize("world", ["closed", "open"])
def test_the_validation_auc_is_that_of_the_world_trained_for(world):
    labels, method = small_labels(), small_method(Options(width=5))
    columns, examples = labels.target(world, "val"), eight("val")
    target = np.searchsorted(columns, examples.compositions.numpy())
    rivals = Evidence(target, labels.seen[columns]).add(Field.of(method, columns).scorer(examples.inputs)).rivals()
    assert validation_auc(method, examples, labels, world) == pytest.approx(measure(rivals, 1, rounds=0).auc)
