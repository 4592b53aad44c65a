"""`reading: literal`: what the preset sets, its prototypes by the twin, and the rows that no step may change."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duplex.methods.base import Batch
from duplex.methods.duplex import DuplexOptions as Options
from duplex.methods.finetuned import WithFinetuning
from duplex.methods.registry import make_method, parse_options
from duplex.options import FinetuneOptions, TrainingOptions
from duplex.testing import small_batch, small_context
from duplex.training.checkpoint import TrainingRecord, load_checkpoint, save_checkpoint
from duplex.training.loop import make_optimiser, optimiser_step
from tests.methods import twin
from tests.methods.test_duplex import twin_features, twin_refined
from tests.methods.test_with_finetuning import block_batch, finetuning_task
from tests.methods.world import every_row, features, scores_of, small_labels, small_method, step_of

LABELS = small_labels()
SEEN = LABELS.pairs["train"].tolist()
UNSEEN = np.setdiff1d(np.arange(LABELS.size), SEEN)
LITERAL = Options.from_dict({"reading": "literal", "adapter": "none", "width": 5, "refine_over": "closed"})
SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=16, epochs=1)


def test_the_preset_sets_all_at_once_and_stated_options_come_first():
    assert (LITERAL.reading.unseen, LITERAL.reading.codebook, LITERAL.vocabulary) == ("batch", "buffer", "fixed")
    assert Options.from_dict(LITERAL.to_dict()) == LITERAL, "records have the options, not the name of the preset"
    changed = Options.from_dict({"reading": {"preset": "literal", "codebook": "trained"}})
    assert changed.reading == replace(LITERAL.reading, codebook="trained") and changed.vocabulary == "fixed"
    assert Options.from_dict({"reading": "literal", "vocabulary": "learned"}).vocabulary == "learned"
    assert Options.from_dict({"reading": {}}) == Options(), "without the preset, nothing changes"


def test_an_unseen_pair_is_empty_until_a_batch_composes_it():
    """Its logit is 0; then it is the mean counterfactual with its label, blended with the batch's mean message."""
    method = small_method(LITERAL)
    compositions = [SEEN[0], SEEN[1]]  # their states and objects also make two other pairs
    before = every_row(method)
    assert not before[UNSEEN].any()
    z = features(2, 3)
    logits = method.codebook.logits_over(None)(twin.unit(z), 7.0)
    assert not logits[:, UNSEEN].any() and logits[:, SEEN].all()
    with torch.no_grad():
        refined = twin_refined(method, compositions, *twin_features(method, z, method.shared()))
    step_of(method, z, compositions)
    method.after_batch()
    after = every_row(method)
    fresh = [c for c in refined if c not in SEEN]
    assert fresh, "the batch has an unseen candidate"
    for c, row in refined.items():
        torch.testing.assert_close(after[c], row, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(after[fresh].norm(dim=1), torch.ones(len(fresh), dtype=z.dtype))


@pytest.mark.parametrize("row", [{"momentum": 1.0}, {"graph": False}])
def test_without_refinement_a_composed_prototype_stays(row):
    """Lambda = 1 and no graph are the same model: rows keep the values at which a batch starts them."""
    method = small_method(Options.from_dict({"reading": "literal", "adapter": "none", "width": 5, **row}))
    batch = torch.tensor([SEEN[0], SEEN[1]])
    step_of(method, features(2, 3), batch)
    method.after_batch()
    first = every_row(method)
    step_of(method, features(2, 4), batch)
    method.after_batch()
    assert torch.equal(every_row(method), first)
    other = small_method(LITERAL)
    step_of(other, features(2, 3), batch)
    begun = other.pending.begun[0]
    assert len(begun) and first[begun].any(1).all()


def test_scores_of_a_trained_codebook_with_empty_rows_have_finite_gradients():
    row = {"reading": {"preset": "literal", "codebook": "trained"}, "adapter": "none", "width": 5}
    method = small_method(Options.from_dict(row))
    step_of(method, features(2, 3), torch.tensor([SEEN[0], SEEN[1]])).total.backward()
    gradient = method.codebook.H.grad
    assert gradient is not None and torch.isfinite(gradient).all()
    absent = np.setdiff1d(UNSEEN, method.pending.begun[0])
    assert len(absent) and not gradient[absent].any() and gradient[SEEN].any(1).any()


@cache
def encoder_record() -> dict[str, str]:
    return {"encoder": "tiny", "weights": "", "precision": "fp32"}


@pytest.mark.parametrize("adapters", [False, True], ids=["frozen", "adapters in the encoder"])
@pytest.mark.parametrize("unseen", ["batch", "empty", "means"])
def test_rows_outside_of_the_candidates_keep_their_bytes(adapters: bool, unseen: str, tmp_path: Path):
    """Eq. 18: through steps of the optimiser, write-backs and a checkpoint."""
    context = finetuning_task() if adapters else small_context()
    images: Batch = block_batch(48) if adapters else small_batch(48)
    options = parse_options("duplex", {"reading": {"preset": "literal", "unseen": unseen}, "width": 8})
    torch.manual_seed(0)
    trained = make_method("duplex", options, context)
    assert isinstance(trained, WithFinetuning) == adapters
    trained.eval().start(images)
    method: Any = trained.method if isinstance(trained, WithFinetuning) else trained
    labels = method.labels
    chosen = torch.isin(images.compositions, torch.as_tensor(labels.pairs["train"][:2]))
    rows = chosen.nonzero()[:, 0]
    states, objects = (set(part(labels.pairs["train"][:2]).tolist()) for part in (labels.state_of, labels.object_of))
    touched = {c for c in range(labels.size) if labels.state_of(c) in states and labels.object_of(c) in objects}
    outside = np.array(sorted(set(range(labels.size)) - touched))
    before = {c: row.numpy().tobytes() for c, row in enumerate(every_row(method))}
    optimiser = make_optimiser(trained, SETTINGS)
    trained.train()
    for _ in range(3):
        optimiser_step(trained, images, rows, SETTINGS, optimiser)
    after = {c: row.numpy().tobytes() for c, row in enumerate(every_row(method))}
    assert {c for c in after if after[c] != before[c]} >= touched & set(labels.pairs["train"].tolist())
    assert all(after[c] == before[c] for c in outside.tolist())
    finetune = FinetuneOptions(1, "bottleneck") if adapters else None
    record = TrainingRecord(
        "duplex", "duplex 0", options, labels, encoder_record(), 0, 1, 0.5, "closed", {}, (), finetune=finetune
    )
    save_checkpoint(tmp_path / "checkpoint.safetensors", trained, record)
    loaded: Any = load_checkpoint(tmp_path / "checkpoint.safetensors", context, encoder_record())
    again = loaded.method if adapters else loaded
    assert [row.numpy().tobytes() for row in every_row(again)] == list(after.values())


def test_scores_of_stored_rows_equal_the_dense_ones(monkeypatch: pytest.MonkeyPatch):
    """Beyond 16,384 candidates, only stored prototypes are multiplied."""
    method, z = small_method(LITERAL).eval(), features(3, 2)
    columns = np.arange(LABELS.size)
    expected = scores_of(method, columns, z)
    monkeypatch.setattr("duplex.methods.codebook.ROWS", 0)
    torch.testing.assert_close(scores_of(method, columns, z), expected)
