"""Rows of the kind `prompts`: what is encoded, what is fixed, what it is scored by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from duplex.layers import portable
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


def test_what_is_trained_is_what_losses_reach():
    """Without losses nothing is, however much there is to learn."""
    method = small_method(PromptOptions(width=5))
    (group,) = method.groups()
    assert {id(part) for part in group["params"]} == {id(part) for part in method.parameters()} != set()
    assert small_method(PromptOptions(width=5, losses=())).groups() == []


@pytest.mark.parametrize("terms", [("ct", "so"), ("ct",), ("so",)], ids=str)
@pytest.mark.parametrize("residual", ["plain", "residual"])
def test_evidence_and_tensors_give_the_score(terms, residual):
    method = small_method(PromptOptions(width=5, inference=terms, disentangler=residual)).eval()
    columns, z = LABELS.target("open", "test"), features(4, 3)
    expected, found = scores_of(method, columns, z), dict(method.evidence(columns)({"cls": z}))
    assert list(found) == [{"ct": "semantic", "so": "factors"}[term] for term in terms]
    torch.testing.assert_close(sum(found.values()).float(), expected)
    tensors = method.portable(columns)
    for name, part in portable.terms(tensors, z):
        torch.testing.assert_close(part, found[name], rtol=1e-6, atol=1e-8)
    assert len(dict(portable.terms(tensors, z))) == len(terms)
    torch.testing.assert_close(method.probabilities(expected), expected / expected.sum(1, keepdim=True))


def test_what_can_be_seen_is_what_it_scores_with():
    method, z = small_method(PromptOptions(width=5)).eval(), features(4, 3)
    shown = method.exhibits()
    assert shown.names == ("features", "semantic", "factors")
    with torch.no_grad():
        zc = method.paths.features(z)
        assert torch.equal(shown.features({"cls": z}), zc)
        assert all(torch.equal(a, b) for a, b in zip(shown.factors({"cls": z}), method.paths.factors(zc), strict=True))
    columns = np.array([3, 0])
    assert torch.equal(shown.semantic(columns), method.paths.encode(columns, ("ct",)).compositions)
    assert not any(part.requires_grad for part in (shown.features({"cls": z}), *shown.factors({"cls": z})))
    assert small_method(PromptOptions(**CLIP, losses=())).exhibits().names == ("features", "semantic")


def test_only_what_is_asked_for_is_encoded():
    """Without `ct` no composition's prompt is; without state and object paths there are none of theirs."""
    method = small_method(PromptOptions(width=5, losses=("s", "o"), inference=("so",)))
    sizes = [tuple(map(len, found)) for found in (method.shared(), method.paths.encode(np.arange(5), ("so",)))]
    assert sizes == [(0, 4, 3), (0, 4, 3)]
    assert [len(part) for part in method.paths.encode(np.arange(5), ("ct", "so"))] == [5, 4, 3]
    single = small_method(PromptOptions(paths="c", losses=("ct",), inference=("ct",)))
    assert [len(part) for part in single.shared()] == [len(SEEN), 0, 0]
    assert [len(part) for part in single.paths.encode(np.arange(5), ("ct",))] == [5, 0, 0]
    assert [len(part) for part in single.paths.encode(np.arange(5), ())] == [0, 0, 0]


@pytest.mark.parametrize("wanted", [("ct",), ("s",), ("o",), ("s", "o"), ()], ids=str)
@pytest.mark.parametrize("ask", [True, False])
def test_losses_are_those_wanted_and_factors_come_where_they_are_needed(wanted, ask):
    method = small_method(PromptOptions(width=5, adapter="none"))
    every, factored = method.paths.losses(features(4, 1), SEEN[:4], method.shared(), ("s", "o", "ct"))
    assert factored is not None
    found, needed = method.paths.losses(features(4, 1), SEEN[:4], method.shared(), wanted, ask=ask)
    assert found.keys() == set(wanted) and all(torch.equal(found[name], every[name]) for name in wanted)
    assert (needed is None) == (not ask and not {"s", "o"} & set(wanted))


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"paths": "c", "losses": ("s", "ct"), "inference": ("ct",)}, "losses s and o need paths: cso"),
        ({"paths": "c", "losses": ("ct",)}, "inference so needs paths: cso"),
        ({"inference": ("ct", "ct")}, "inference names a term twice"),
        ({"adapter": "none", "context": "fixed", "vocabulary": "fixed", "losses": ("ct",)}, "trained"),
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
