"""Logistic regressions against scikit-learn's, their choice by validation, and what they refuse."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from duplex.errors import UsageError
from duplex.labels import LabelSpace
from duplex.methods import linear
from duplex.methods.base import Batch
from duplex.methods.layers import unit
from duplex.methods.linear import STRENGTHS, Linear, LinearOptions
from duplex.methods.portable import score_terms
from duplex.methods.score_formula import FLOOR
from duplex.recognition.added import with_rows
from duplex.testing import small_batch, small_context, small_labels

CONTEXT, LABELS = small_context(), small_labels()
OPEN = np.arange(LABELS.size)
TEST = small_batch(20, seed=5, split="test").cls


def noisy_batch(count: int = 120) -> Batch:
    """Training images whose classes overlap."""
    batch = small_batch(count)
    noise = torch.randn(batch.cls.shape, generator=torch.Generator().manual_seed(1))
    return Batch({"cls": batch.cls + 0.1 * noise}, batch.compositions)


def started(**options) -> Linear:
    method = Linear(CONTEXT, LinearOptions(**options))
    method.start(noisy_batch())
    return method.eval()


def twin(groups: np.ndarray, l2: float) -> np.ndarray:
    sklearn = pytest.importorskip("sklearn.linear_model")
    train = noisy_batch()
    model = sklearn.LogisticRegression(C=1 / (len(train) * l2), tol=1e-10, max_iter=100_000)
    model.fit(unit(train.cls).double().numpy(), groups)
    return model.predict_proba(unit(TEST).double().numpy())


@pytest.mark.parametrize("l2", [1e-2, 1e-4])
def test_probabilities_are_those_of_scikit_learn(l2):
    compositions = noisy_batch().compositions_np
    states, objects = twin(LABELS.state_of(compositions), l2), twin(LABELS.object_of(compositions), l2)
    p = started(l2=l2).scorer(OPEN)({"cls": TEST}).exp()
    expected = states[:, LABELS.state_of(OPEN)] * objects[:, LABELS.object_of(OPEN)]
    np.testing.assert_allclose(p, expected, atol=1e-5)
    scores = started(l2=l2, over="pairs").scorer(OPEN)({"cls": TEST})
    np.testing.assert_allclose(scores[:, LABELS.seen].exp(), twin(compositions, l2), atol=1e-5)
    assert (scores[:, ~LABELS.seen] == FLOOR).all()


def test_the_path_of_strengths_ends_where_one_fit_does():
    along, alone = started(), started(l2=STRENGTHS[-1])
    assert float(along.l2) == STRENGTHS[-1]
    scores = [method.scorer(OPEN)({"cls": TEST}).exp() for method in (along, alone)]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=0)


def test_equal_regressions_are_fitted_once(monkeypatch):
    expected = started(l2=0.03).get_buffer("states")
    monkeypatch.setattr(linear, "fit_logistic", None)
    assert torch.equal(started(l2=0.03).get_buffer("states"), expected)
    with pytest.raises(TypeError):
        started(l2=0.04)


@pytest.mark.parametrize("over", ["primitives", "pairs"])
def test_validation_chooses_the_strength(over):
    method, seen = started(over=over), []

    def result(scores: torch.Tensor) -> float:
        seen.append(scores)
        return float(len(seen) == 2)

    method.choose_options({"cls": TEST}, OPEN, result)
    assert method.chosen_options() == {"l2": STRENGTHS[1]} and len(seen) == len(STRENGTHS)
    excluded = seen[0][:, torch.as_tensor(~LABELS.seen)].isneginf()
    assert excluded.all() if over == "pairs" else not excluded.any()
    expected = started(over=over, l2=STRENGTHS[1]).scorer(OPEN)({"cls": TEST}).exp()
    torch.testing.assert_close(method.scorer(OPEN)({"cls": TEST}).exp(), expected, atol=1e-4, rtol=0)
    loaded = Linear(CONTEXT, LinearOptions(over=over))
    loaded.load_state_dict(method.state_dict())
    loaded.choose_options({"cls": TEST}, OPEN, result)
    assert loaded.chosen_options() == {"l2": STRENGTHS[1]}, "there is nothing left to choose"


def test_a_state_without_images_has_no_probability():
    train = noisy_batch()
    rows = torch.as_tensor(LABELS.state_of(train.compositions_np) != 1).nonzero()[:, 0]
    method = Linear(CONTEXT, LinearOptions(l2=1e-3))
    method.start(train[rows])
    p = method.scorer(OPEN)({"cls": TEST}).exp()
    assert p[:, LABELS.state_of(OPEN) == 1].max() < 1e-6


@pytest.mark.parametrize(("other", "alone"), [(("red", "moon"), "states"), (("blue", "star"), "objects")])
def test_one_state_or_object_is_refused(other, alone):
    labels = LabelSpace.from_pairs({"train": [("red", "star"), other]})
    train = Batch({"cls": TEST[:6]}, torch.tensor([0, 1, 0, 1, 0, 1]))
    method = Linear(replace(CONTEXT, labels=labels, words=None), LinearOptions())
    with pytest.raises(UsageError, match=f"two or more {alone}"):
        method.start(train)
    Linear(replace(CONTEXT, labels=labels, words=None), LinearOptions(over="pairs")).start(train)


def test_what_has_no_classifier_is_refused():
    pairs, primitives = started(l2=1e-3, over="pairs"), started(l2=1e-3)
    with pytest.raises(UsageError, match="scores only seen pairs, but no candidate is seen"):
        pairs.scorer(OPEN[~LABELS.seen])
    known, added = (list(LABELS.states), list(LABELS.objects)), OPEN[~LABELS.seen]
    rows = np.stack([LABELS.state_of(added), LABELS.object_of(added)], axis=1)
    listed = OPEN[LABELS.seen]
    tower = CONTEXT.tower
    more = with_rows(primitives.portable(listed), LABELS, known, rows, tower)
    ((_, scores),) = score_terms(more, TEST)
    torch.testing.assert_close(scores, primitives.scorer(np.r_[listed, added])({"cls": TEST}))
    further = ([*LABELS.states, "new"], list(LABELS.objects))
    for method, names in ((pairs, known), (primitives, further)):
        with pytest.raises(UsageError, match="was not trained on"):
            with_rows(method.portable(listed), LABELS, names, rows, tower)


def test_images_with_one_label_train_its_classifier_alone():
    train, states = noisy_batch(), len(LABELS.states)
    own = train.compositions.clone()
    m, n = CONTEXT.labels.state_of(own.numpy()), CONTEXT.labels.object_of(own.numpy())
    own[::3], own[1::3] = torch.as_tensor(-1 - m[::3]), torch.as_tensor(-1 - states - n[1::3])
    partial = Linear(CONTEXT, LinearOptions(l2=1e-3))
    partial.start(Batch(train.inputs, own))
    for name, known in (("states", np.arange(len(own)) % 3 != 1), ("objects", np.arange(len(own)) % 3 != 0)):
        expected = Linear(CONTEXT, LinearOptions(l2=1e-3))
        expected.start(Batch({"cls": train.cls[known]}, train.compositions[known]))
        torch.testing.assert_close(partial.get_buffer(name), expected.get_buffer(name), rtol=0, atol=0)
    assert LinearOptions().over == "primitives" and not Linear.accepts_partial_labels(LinearOptions(over="pairs"))
