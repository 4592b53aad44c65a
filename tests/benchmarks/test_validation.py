"""The variations of `duplex` in the study can be trained, and differ from each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.validation import main, of_terms
from benchmarks.variations import STUDY
from duplex.errors import UsageError
from duplex.features.examples import Examples
from duplex.methods.duplex import DuplexOptions
from duplex.training.scoring import validation_auc
from tests.methods.world import batch_of, features, small_labels, small_method, small_task, step_of
from tests.subprocesses import ROOT

SEEN = small_labels().pairs["train"].tolist()


@pytest.mark.parametrize("name", STUDY)
def test_a_variation_can_take_a_training_step(name: str) -> None:
    row = STUDY[name]
    method = row.kind(small_task(), dataclasses.replace(DuplexOptions(width=5), **row.options)).double()
    method.start(batch_of(features(len(SEEN), 5), SEEN))
    step = step_of(method, features(len(SEEN), 6), SEEN, method.shared())
    assert set(step.losses) == set(method.options.losses)
    assert all(float(loss.detach()) > 0 for loss in step.losses.values())
    assert (step.refinement is not None) == method.options.graph


def test_all_variations_differ() -> None:
    kinds = {
        (repr(dataclasses.replace(DuplexOptions(), **row.options)), row.kind, row.schedule) for row in STUDY.values()
    }
    assert len(kinds) == len(STUDY)


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
