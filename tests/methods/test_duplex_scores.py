"""Duplex as it is asked afterwards: blocks of all compositions, what spoke, what an export holds, what can be seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from duplex.layers import portable
from duplex.layers.trained_codebook import TrainedCodebook
from duplex.methods.duplex import DuplexOptions as Options
from tests.methods import twin
from tests.methods.world import DIM, every_row, features, scores_of, small_labels, small_method, step_of

LABELS = small_labels()
SEEN, EVERY = LABELS.pairs["train"], np.arange(LABELS.size)
NAMES = {"ch": "visual", "ct": "semantic", "so": "factors"}


def refined(**row: Any) -> Any:
    """A method after a write-back."""
    method = small_method(Options(width=5, **row))
    if method.options.graph:
        step_of(method, features(5, 1), SEEN[:5])
        method.after_batch()
    return method.eval()


@pytest.mark.parametrize("states", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("terms", [("ch", "so"), ("ch",), ("so",)], ids=str)
def test_a_sweep_in_blocks_of_states_is_the_scorer(terms, states):
    method, z = refined(inference=terms), features(5, 2)
    whole, blocks = scores_of(method, EVERY, z), list(method.sweep(states)({"cls": z}))
    assert [first for first, _ in blocks] == list(range(0, LABELS.size, states * len(LABELS.objects)))
    assert all(part.dtype == torch.float32 and not part.requires_grad for _, part in blocks)
    torch.testing.assert_close(torch.cat([part for _, part in blocks], dim=1), whole, rtol=1e-5, atol=1e-7)


def test_a_sweep_is_offered_where_nothing_of_the_size_of_all_pairs_is_needed():
    assert small_method(Options(width=5)).sweep(2) is None
    assert small_method(Options(width=5, inference=("ch",), codebook="trainable")).sweep(2) is None
    assert refined(unseen_rows="random", inference=("ch",)).sweep(2) is not None


@pytest.mark.parametrize("terms", [("ch", "ct", "so"), ("ct",), ("ch",)], ids=str)
@pytest.mark.parametrize("columns", [LABELS.target("closed", "test"), EVERY, EVERY[::-1].copy()])
def test_evidence_and_tensors_give_the_score(terms, columns):
    method, z = refined(inference=terms), features(4, 3)
    expected, found = scores_of(method, columns, z), dict(method.evidence(columns)({"cls": z}))
    assert found.keys() == {NAMES[term] for term in terms}
    assert not any(part.requires_grad for part in found.values())
    torch.testing.assert_close(sum(found.values()).float(), expected)
    tensors = method.portable(columns)
    assert not any(tensor.requires_grad for tensor in tensors.values())
    exported = dict(portable.terms(tensors, z))
    assert exported.keys() == found.keys()
    for name, part in exported.items():
        torch.testing.assert_close(part, found[name], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(method.probabilities(expected).sum(1), torch.ones(4))
    assert ("mean.all" in tensors) == ("ch" in terms)
    if "ch" in terms:
        rows = every_row(method)[SEEN]
        torch.testing.assert_close(tensors["mean.all"], rows.mean(0))
        torch.testing.assert_close(tensors["mean.states"][0], rows[SEEN // len(LABELS.objects) == 0].mean(0))


def test_all_compositions_in_their_order_are_asked_of_the_codebook_as_a_whole(monkeypatch):
    method, asked = refined(inference=("ch",)), []
    over = method.codebook.over
    monkeypatch.setattr(method.codebook, "over", lambda columns=None: asked.append(columns) or over(columns))
    repeated = np.sort(np.r_[EVERY[1:], 3])
    for columns in (EVERY, EVERY[::-1].copy(), EVERY[:-1], repeated):
        asked.clear()
        method.evidence(columns)
        (found,) = asked
        assert found is None if columns is EVERY else np.array_equal(found, columns)


def test_what_can_be_seen_is_what_it_scores_with():
    method, z = refined(), features(4, 5)
    shown = method.exhibits()
    assert torch.equal(shown.visual(EVERY), every_row(method)) and not shown.visual(EVERY).requires_grad
    z_s, z_o = shown.factors({"cls": z})
    fused = twin.learned_fusion(z_s, z_o, method.fusion.state.weight, method.fusion.object.weight)
    expected = torch.stack([fused(i, i) for i in range(4)]).detach()
    torch.testing.assert_close(shown.joined(z_s, z_o), expected)
    assert not shown.joined(z_s, z_o).requires_grad
    assert refined(fusion="additive").exhibits().joined is None
    assert refined(graph=False).exhibits().joined is None


def test_what_is_trained_is_what_losses_reach():
    """Without losses nothing is, however much there is to learn."""
    method = small_method(Options(width=5))
    (group,) = method.groups()
    assert {id(part) for part in group["params"]} == {id(part) for part in method.parameters()}
    assert method.summary()["parameters"] == sum(part.numel() for part in method.parameters())
    assert method.summary()["codebook_rows"] == LABELS.size
    assert small_method(Options(width=5, losses=())).groups() == []


@pytest.mark.parametrize(("losses", "inference"), [(("s", "o", "ct"), ("ch",)), (("ch",), ("ct",)), (("ct",), ("ct",))])
def test_rows_are_refined_where_anything_asks_for_them(losses, inference):
    method = small_method(Options(width=5, losses=losses, inference=inference))
    before = every_row(method)
    step = step_of(method, features(4, 1), SEEN[:4])
    assert step.losses.keys() == set(losses)
    method.after_batch()
    assert torch.equal(every_row(method), before) == ("ch" not in (*losses, *inference))


def test_a_write_back_happens_once():
    method = small_method(Options(width=5))
    step_of(method, features(4, 1), SEEN[:4])
    method.after_batch()
    method.codebook.commit(SEEN, twin.unit(features(len(SEEN), 9)))
    after = every_row(method)
    method.after_batch()
    assert torch.equal(every_row(method), after)


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        ({}, {"s", "o", "ct", "ch"}),
        ({"adapter": "none"}, {"s", "o", "ct", "ch"}),
        ({"adapter": "none", "momentum": 1.0}, {"s", "o", "ct"}),
        ({"adapter": "none", "graph": False}, {"s", "o", "ct"}),
        ({"adapter": "none", "graph": False, "codebook": "trainable"}, {"s", "o", "ct", "ch"}),
        ({"adapter": "none", "context": "fixed"}, {"s", "o", "ct", "ch"}),
        ({"adapter": "none", "context": "fixed", "vocabulary": "fixed"}, {"s", "o", "ch"}),
        ({"context": "fixed", "vocabulary": "fixed"}, {"s", "o", "ct", "ch"}),
        ({"paths": "c", "graph": False, "losses": ("ct",), "inference": ("ct",)}, {"ct", "ch"}),
    ],
)
def test_what_each_loss_could_train(row, reached):
    """A loss that reaches nothing has no gradient; one that does has."""
    options = Options(width=5, adapter_dropout=0.0, **row)
    assert options.reached() == reached
    method, z = small_method(options), features(5, 2)
    losses = step_of(method, z, SEEN[:5]).losses
    assert {name for name, value in losses.items() if value.requires_grad} == reached & set(options.losses)


def test_the_kind_of_codebook_and_its_size():
    method = small_method(Options(width=5, codebook="trainable"))
    assert isinstance(method.codebook, TrainedCodebook) and every_row(method).shape == (LABELS.size, DIM)
    assert every_row(method).requires_grad
    with torch.no_grad():
        assert not method.codebook.rows_of(EVERY).requires_grad
