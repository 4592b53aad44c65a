"""Scores of Duplex: terms, exported tensors, inspectable features."""

from typing import Any

import numpy as np
import pytest
import torch

from duplex.methods import portable
from duplex.methods.duplex import DuplexOptions as Options
from tests.methods import twin
from tests.methods.world import every_row, features, scores_of, small_labels, small_method, step_of

LABELS = small_labels()
SEMANTIC: dict[str, Any] = {"losses": ("semantic",), "inference": ("semantic",)}
SEEN, EVERY = LABELS.pairs["train"], np.arange(LABELS.size)


def refined(**row: Any) -> Any:
    """Return a method after a write-back."""
    method = small_method(Options(width=5, **row))
    if method.options.graph:
        step_of(method, features(5, 1), SEEN[:5])
        method.after_batch()
    return method.eval()


@pytest.mark.parametrize("row", [{}, {"adapter": "none"}], ids=str)
@pytest.mark.parametrize("terms", [("visual", "semantic", "factors"), ("semantic",), ("visual",)], ids=str)
@pytest.mark.parametrize("columns", [LABELS.candidates("closed", "test"), EVERY, EVERY[::-1].copy(), EVERY[:-1]])
def test_terms_and_exported_tensors_sum_to_the_score(row, terms, columns):
    method, z = refined(inference=terms, **row), features(4, 3)
    expected, found = scores_of(method, columns, z), dict(method.score_terms(columns)({"cls": z}))
    assert found.keys() == set(terms)
    assert not any(part.requires_grad for part in found.values())
    torch.testing.assert_close(sum(found.values()).float(), expected)
    tensors = method.portable(columns)
    assert not any(tensor.requires_grad for tensor in tensors.values())
    exported = dict(portable.score_terms(tensors, z))
    assert exported.keys() == found.keys()
    for name, part in exported.items():
        torch.testing.assert_close(part, found[name], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(method.probabilities(expected).sum(1), torch.ones(4))
    assert ("mean.all" in tensors) == ("visual" in terms)
    if "visual" in terms:
        rows = every_row(method)[SEEN]
        torch.testing.assert_close(tensors["mean.all"], rows.mean(0))
        torch.testing.assert_close(tensors["mean.states"][0], rows[SEEN // len(LABELS.objects) == 0].mean(0))


def test_inspectable_features_are_those_of_the_scores():
    method, z = refined(), features(4, 5)
    shown = method.inspectable()
    assert torch.equal(shown.visual(EVERY), every_row(method)) and not shown.visual(EVERY).requires_grad
    z_s, z_o = shown.factors({"cls": z})
    fused = twin.learned_fusion(z_s, z_o, method.fusion.state.weight, method.fusion.object.weight)
    expected = torch.stack([fused([i], [i]) for i in range(4)]).detach()
    torch.testing.assert_close(shown.fuse(z_s, z_o), expected)
    assert not shown.fuse(z_s, z_o).requires_grad
    assert refined(fusion="additive").inspectable().fuse is None
    assert refined(graph=False).inspectable().fuse is None


@pytest.mark.parametrize(
    ("losses", "inference"),
    [(("state", "object", "semantic"), ("visual",)), (("visual",), ("semantic",)), (("semantic",), ("semantic",))],
)
def test_prototypes_are_refined_if_a_loss_or_a_term_is_visual(losses, inference):
    method = small_method(Options(width=5, losses=losses, inference=inference))
    before = every_row(method)
    assert step_of(method, features(4, 1), SEEN[:4]).losses.keys() == set(losses)
    method.after_batch()
    assert torch.equal(every_row(method), before) == ("visual" not in (*losses, *inference))


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({}, {"state", "object", "semantic", "visual"}),
        ({"adapter": "none"}, {"state", "object", "semantic", "visual"}),
        ({"adapter": "none", "momentum": 1.0}, {"state", "object", "semantic"}),
        ({"adapter": "none", "graph": False}, {"state", "object", "semantic"}),
        ({"adapter": "none", "context": "fixed"}, {"state", "object", "semantic", "visual"}),
        ({"adapter": "none", "context": "fixed", "vocabulary": "fixed"}, {"state", "object", "visual"}),
        ({"context": "fixed", "vocabulary": "fixed"}, {"state", "object", "semantic", "visual"}),
        (
            {"paths": "composition", "graph": False, "losses": ("semantic",), "inference": ("semantic",)},
            {"semantic", "visual"},
        ),
    ],
)
def test_exactly_the_trained_losses_have_gradients(row, trained):
    options = Options(width=5, adapter_dropout=0.0, **row)
    assert options.trained_losses() == trained
    method, z = small_method(options), features(5, 2)
    losses = step_of(method, z, SEEN[:5]).losses
    assert {name for name, value in losses.items() if value.requires_grad} == trained & set(options.losses)
