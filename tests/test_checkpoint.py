"""Checkpoints: enough to predict with, the same bytes for the same run, refused where they do not fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from duplex.checkpoint import Record, load_checkpoint, read_record, save_checkpoint
from duplex.errors import DuplexError
from duplex.labels import LabelSpace
from duplex.model.options import Options
from tests.model.world import features, small_labels, small_network, small_tower

ENCODER = {"encoder": "tiny", "weights": "abc", "precision": "fp32"}
OPTIONS = Options(width=5)


@pytest.fixture
def saved(tmp_path):
    network = small_network(OPTIONS).eval()
    path = tmp_path / "run" / "checkpoint.safetensors"
    save_checkpoint(path, network, Record(OPTIONS, small_labels(), ENCODER, 3, 7, 0.25))
    return path, network


def test_a_loaded_network_predicts_the_same(saved):
    """A network of other weights before, the saved one's after."""
    path, network = saved
    loaded = load_checkpoint(path, small_tower(), ENCODER, small_labels())
    state, columns, z = network.state_dict(), small_labels().target("open", "test"), features(6, 0)
    assert state.keys() == loaded.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name].to(tensor.dtype)), name
    scores, expected = loaded.double().scorer(columns)(z), network.scorer(columns)(z)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(small_network(OPTIONS, seed=1).eval().scorer(columns)(z), expected, rtol=1e-2)


def test_the_record_comes_back(saved):
    record = read_record(saved[0])
    assert (record.options, record.seed, record.epoch, record.val_auc) == (OPTIONS, 3, 7, 0.25)
    assert record.labels == small_labels()
    assert record.encoder == ENCODER


def test_the_same_run_gives_the_same_bytes(saved, tmp_path):
    again = tmp_path / "again.safetensors"
    save_checkpoint(again, small_network(OPTIONS), Record(OPTIONS, small_labels(), ENCODER, 3, 7, 0.25))
    assert again.read_bytes() == saved[0].read_bytes()
    assert sorted(p.name for p in saved[0].parent.iterdir()) == ["checkpoint.safetensors"]


def test_another_encoder_is_refused(saved):
    with pytest.raises(DuplexError, match="trained on features of weights 'abc', not 'xyz'"):
        load_checkpoint(saved[0], small_tower(), {**ENCODER, "weights": "xyz"})


def test_other_labels_are_refused(saved):
    other = LabelSpace.from_pairs({"train": [("red", "circle"), ("blue", "star")]})
    with pytest.raises(DuplexError, match="other labels"):
        load_checkpoint(saved[0], small_tower(), ENCODER, other)


def test_tensors_of_another_shape_are_refused(saved):
    path, network = saved
    record = dataclasses.replace(read_record(path), options=Options(width=6))
    save_checkpoint(path, network, record)
    with pytest.raises(DuplexError, match="does not fit its own options"):
        load_checkpoint(path, small_tower(), ENCODER)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x00" * 64])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(content)
    with pytest.raises(DuplexError, match="is not a checkpoint"):
        read_record(path)


def test_tensors_without_a_record_are_refused(saved, tmp_path):
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(saved[0]), bare)
    with pytest.raises(DuplexError, match="is not a checkpoint"):
        read_record(bare)


def test_a_missing_checkpoint_names_the_command(tmp_path):
    with pytest.raises(DuplexError, match="duplex train"):
        read_record(tmp_path / "none.safetensors")
