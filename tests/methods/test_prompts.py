"""Rows of the kind `prompts`: what is encoded, what is fixed, what it is scored by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from duplex.methods.duplex import DuplexOptions
from duplex.methods.prompts import PromptOptions
from duplex.options import OptionError
from tests.methods import twin
from tests.methods.world import features, scores_of, small_labels, small_method, step_of

LABELS = small_labels()
SEEN = torch.as_tensor(LABELS.pairs["train"])
CLIP: dict[str, Any] = {
    "context": "fixed",
    "vocabulary": "fixed",
    "paths": "c",
    "adapter": "none",
    "inference": ("ct",),
}


def test_losses_are_those_of_duplex_without_its_codebook():
    """The same parts under the same names: three paths are Duplex less `L_c^h`."""
    prompts, duplex = small_method(PromptOptions(width=5)), small_method(DuplexOptions(width=5, graph=False))
    prompts.paths.load_state_dict(duplex.paths.state_dict())
    z = features(5, 0)
    ours, theirs = (step_of(method.eval(), z, SEEN[:5]).losses for method in (prompts, duplex))
    assert list(ours) == ["s", "o", "ct"]
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0)


def test_a_prompt_of_which_nothing_is_learned_is_encoded_once(monkeypatch):
    method = small_method(PromptOptions(**{**CLIP, "adapter": "feature"}, losses=("ct",)))
    tower, calls = method.paths.prompts.tower, []
    encode = tower.encode
    monkeypatch.setattr(tower, "encode", lambda *args, **more: calls.append(1) or encode(*args, **more))
    first = [tensor.clone() for tensor in method.shared()]
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(method.shared(), first, strict=True))
    assert len(calls) == 1
    learned = small_method(PromptOptions(paths="c", losses=("ct",), inference=("ct",)))
    learned.shared()
    learned.shared()
    assert len(calls) == 3, "learned prompts are encoded at every step"


def test_zero_shot_scores_are_the_softmax_of_the_words():
    method = small_method(PromptOptions(**CLIP, losses=()))
    columns = LABELS.target("closed", "test")
    z = features(4, 1)
    t = method.paths.semantic(columns)
    expected = twin.posteriors(twin.unit(z), t, method.paths.scale)
    torch.testing.assert_close(scores_of(method, columns, z).double(), expected, rtol=1e-6, atol=1e-7)
    assert method.groups() == []


@pytest.mark.parametrize("negatives", ["seen", "target"])
def test_a_composition_is_told_from_seen_pairs_or_from_the_target_set(negatives):
    method = small_method(PromptOptions(width=5, adapter="none", losses=("ct",), semantic_negatives=negatives))
    columns = LABELS.pairs["train"] if negatives == "seen" else LABELS.target("closed", "train")
    z, own = features(3, 2), SEEN[[1, 4, 6]]
    t = method.paths.semantic(columns)
    places = torch.as_tensor(np.searchsorted(columns, own))
    expected = cross_entropy(method.paths.scale * twin.unit(z) @ t.T, places)
    torch.testing.assert_close(step_of(method, z, own).losses["ct"], expected)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"paths": "c"}, "paths: cso"),
        ({"losses": ("ct", "ct")}, "twice"),
        ({**CLIP, "losses": ("ct",)}, "trained"),
        ({"inference": ()}, "at least one"),
        ({"template": " "}, "template"),
    ],
)
def test_contradicting_options_are_refused(row, word):
    with pytest.raises(OptionError, match=word):
        PromptOptions(**row)
