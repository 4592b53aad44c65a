"""Checkpoints: same predictions, same bytes for the same run, refused if anything does not fit."""

import dataclasses

import pytest
import torch

from duplex.errors import DuplexError
from duplex.evaluation.probabilities import Confidence
from duplex.labels import LabelSpace
from duplex.methods.duplex import DuplexOptions as Options
from duplex.options import FinetuneOptions
from duplex.training.checkpoint import TrainingRecord, load_checkpoint, read_record, save_checkpoint
from duplex.training.scoring import Calibration
from tests.methods.world import features, scores_of, small_context, small_labels, small_method

ENCODER = {"encoder": "tiny", "weights": "abc", "precision": "fp32"}
OPTIONS = Options(width=5)
RECORD = TrainingRecord(
    "duplex", "duplex 0", OPTIONS, small_labels(), ENCODER, 3, 7, 0.25, "open",
    {"closed": Calibration(0.5), "open": Calibration(-0.25, 0.125, 10.0, 12.5)}, ("semantic", "visual")
)  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    network = small_method(OPTIONS, dtype=torch.float32).eval()
    path = tmp_path / "run" / "checkpoint.safetensors"
    save_checkpoint(path, network, RECORD)
    return path, network


def test_a_loaded_method_gives_the_same_scores(saved):
    path, network = saved
    loaded = load_checkpoint(path, small_context(dtype=torch.float32), ENCODER)
    state, columns, z = network.state_dict(), small_labels().candidates("open", "test"), features(6, 0).float()
    assert state.keys() == loaded.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name].to(tensor.dtype)), name
    scores, expected = scores_of(loaded, columns, z), scores_of(network, columns, z)
    assert torch.equal(scores, expected)
    assert not torch.allclose(scores_of(small_method(OPTIONS, 1, dtype=torch.float32), columns, z), expected, rtol=1e-2)


def test_other_labels_are_refused(saved):
    other = LabelSpace.from_pairs({"train": [("red", "circle"), ("blue", "star")]})
    with pytest.raises(DuplexError, match="other states, objects or pairs"):
        load_checkpoint(saved[0], small_context(other, torch.float32), ENCODER)


@pytest.mark.parametrize("key", ["weights", "preprocessing", "precision", "architecture", "encoder"])
def test_another_encoder_is_refused(saved, key):
    what = "encoder" if key == "encoder" else f"encoder's {key}"
    said = f"trained with the {what} {ENCODER.get(key)!r}, but 'other' is in use now; train again, or set"
    with pytest.raises(DuplexError, match=said):
        load_checkpoint(saved[0], small_context(dtype=torch.float32), {**ENCODER, key: "other"})


def test_other_word_vectors_are_refused(saved):
    with pytest.raises(DuplexError, match="with other word vectors; set evaluation"):
        load_checkpoint(saved[0], small_context(dtype=torch.float32), {**ENCODER, "words": "0" * 64})


def test_the_record_is_read_back_with_alternative_calibrations(saved):
    assert read_record(saved[0]) == RECORD
    other = Calibration(0.5, 0.1, 3.0, 4.0, -1.0, 0.5)
    record = dataclasses.replace(
        RECORD, calibration={"open": Calibration(0.5, alternatives=(other,))}, finetune=FinetuneOptions(blocks=1),
        recipes=({"rate": 0.1},), confidence=Confidence(2.0, 1.5)
    )  # fmt: skip
    save_checkpoint(saved[0], saved[1], record)
    assert read_record(saved[0]) == record
