"""The variations of `duplex` in the study can be trained, and differ from each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.validation import main, of_prototypes, of_terms
from benchmarks.variations import STUDY
from duplex.errors import UsageError
from duplex.features.examples import Examples
from duplex.methods.duplex import DuplexOptions
from duplex.options import TrainingOptions
from duplex.training.scoring import validation_auc
from tests.methods.world import batch_of, every_row, features, small_context, small_labels, small_method, step_of
from tests.subprocesses import ROOT

SEEN = small_labels().pairs["train"].tolist()


@pytest.mark.parametrize("name", STUDY)
def test_a_variation_can_take_a_training_step(name: str) -> None:
    row = STUDY[name]
    method = row.kind(small_context(), dataclasses.replace(DuplexOptions(width=5), **row.options)).double()
    method.start(batch_of(features(len(SEEN), 5), SEEN))
    step = step_of(method, features(len(SEEN), 6), SEEN, method.shared())
    assert set(step.losses) == set(method.options.losses)
    assert all(float(loss.detach()) > 0 for loss in step.losses.values())
    assert (step.refinement is not None) == method.options.graph


def test_all_variations_learn_something_else() -> None:
    learned = {tuple(_learned(name)): name for name in STUDY}
    assert set(learned.values()) == set(STUDY)


def _learned(name: str) -> list[float]:
    """Return the sums of prototypes and gradients after two epochs of one step each."""
    torch.manual_seed(0)
    variation, settings = STUDY[name], TrainingOptions(learning_rate=0.1, batch_size=7, epochs=2, decay_every=1)
    method = variation.kind(small_context(), dataclasses.replace(DuplexOptions(width=5), **variation.options)).double()
    if variation.schedule is not None:
        method.follow(variation.schedule, settings)
    method.start(batch_of(features(len(SEEN), 5), SEEN))
    for epoch in range(2):
        step_of(method, features(len(SEEN), 6), SEEN).total.backward()
        method.after_batch()
        method.after_epoch(epoch + 1)
    gradients = [p.grad.abs().sum() for p in method.parameters() if p.grad is not None]
    return torch.stack([every_row(method).abs().sum(), *gradients]).tolist()


def test_messages_and_prototypes_are_described(small_world: tuple[Examples, Examples]) -> None:
    method, (images, val) = small_method(DuplexOptions(width=5)), small_world
    found = of_prototypes(method, images, val)
    for kind in ("weight", "mean_weight"):
        assert sum(found[f"{kind}_{message}"] for message in method.options.messages) == pytest.approx(100)
    rows, z = every_row(method).detach().numpy(), method.paths.adapt(val.cls).detach().numpy()
    listed = method.candidates.compositions
    assert found["cosine_refined"] == pytest.approx((z @ rows[listed].T).mean())
    assert found["negative_others"] == pytest.approx(100 * (np.delete(rows, listed, axis=0) < 0).mean())
    one = of_prototypes(small_method(DuplexOptions(width=5, messages=("state",))), images, val)
    assert one["weight_state"] == one["mean_weight_state"] == 100


def test_methods_without_a_graph_have_no_messages(small_world: tuple[Examples, Examples]) -> None:
    with pytest.raises(UsageError, match="--prototypes needs methods with a graph"):
        of_prototypes(small_method(DuplexOptions(width=5, graph=False)), *small_world)


@pytest.fixture
def small_world() -> tuple[Examples, Examples]:
    """Random training and validation images."""
    random = np.random.default_rng(1)
    draws = {split: torch.as_tensor(random.choice(small_labels().pairs[split], 40)) for split in ("train", "val")}
    train, val = (Examples(np.arange(40), {"cls": features(40, 4)}, own) for own in draws.values())
    return train, val


def test_an_unknown_variation_is_reported_in_one_line(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["validation", "--study", "--only", "no relu;no such row"])
    with pytest.raises(UsageError, match="unknown row of the study 'no such row'; known: duplex, static"):
        main()


def test_all_subsets_of_terms_are_scored_with_one_model() -> None:
    labels = small_labels()
    own = torch.as_tensor(np.random.default_rng(1).choice(labels.pairs["val"], 40))
    val = Examples(np.arange(40), {"cls": features(40, 4)}, own)
    method, options = small_method(DuplexOptions(width=5)), DuplexOptions(width=5)
    found = of_terms(method, val, labels)
    assert len(found) == 6
    some: dict[str, Any] = {"auc_visual": ("visual",), "auc_semantic_factors": ("semantic", "factors")}
    for name, terms in some.items():
        other = small_method(dataclasses.replace(options, inference=terms))
        other.load_state_dict(method.state_dict())
        assert found[name] == pytest.approx(100 * validation_auc(other, val, labels))
    assert len(set(found.values())) > 2
