"""Checkpoints: same predictions, same bytes for the same run, refused if anything does not fit."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from duplex.errors import DuplexError
from duplex.labels import LabelSpace
from duplex.methods.duplex import DuplexOptions as Options
from duplex.training.checkpoint import (
    Record,
    _check_fit,
    digest,
    is_checkpoint,
    load_checkpoint,
    read_record,
    save_checkpoint,
    with_checksum,
)
from duplex.training.scoring import Calibration
from tests.methods.world import features, scores_of, small_context, small_labels, small_method

ENCODER = {"encoder": "tiny", "weights": "abc", "precision": "fp32"}
OPTIONS = Options(width=5)
RECORD = Record(
    "duplex", "duplex 0", OPTIONS, small_labels(), ENCODER, 3, 7, 0.25, "open",
    {"closed": Calibration(0.5), "open": Calibration(-0.25, 0.125, 10.0, 12.5)}, ("semantic", "visual"),
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


def test_names_are_written_unescaped(saved):
    assert "Faux.Fur" in safe_open(saved[0], "pt").metadata()["duplex"]
    labels = LabelSpace.from_pairs({"train": [("rôti", "pâté")]})
    save_checkpoint(saved[0], saved[1], dataclasses.replace(RECORD, labels=labels))
    assert "rôti" in safe_open(saved[0], "pt").metadata()["duplex"] and read_record(saved[0]).labels == labels


def test_the_digest_depends_on_names_types_shapes_and_values():
    rows = torch.arange(4, dtype=torch.float32)
    others = {"b": rows}, {"a": rows.view(torch.int32)}, {"a": rows.reshape(2, 2)}, {"a": rows + 1}
    found = {digest(tensors) for tensors in ({"a": rows}, *others)}
    assert len(found) == 5
    pair = digest({"a": rows, "b": rows + 1})
    assert pair == digest({"b": rows + 1, "a": rows}) != digest({"a": rows + 1, "b": rows})


def test_the_same_run_gives_the_same_bytes(saved, tmp_path):
    again = tmp_path / "again.safetensors"
    save_checkpoint(again, small_method(OPTIONS, dtype=torch.float32), RECORD)
    assert again.read_bytes() == saved[0].read_bytes()
    assert sorted(p.name for p in saved[0].parent.iterdir()) == ["checkpoint.safetensors"]


def test_other_labels_are_refused(saved):
    other = LabelSpace.from_pairs({"train": [("red", "circle"), ("blue", "star")]})
    with pytest.raises(DuplexError, match="other labels"):
        load_checkpoint(saved[0], small_context(other, torch.float32), ENCODER)


def test_other_files_and_folders_are_refused(saved, tmp_path):
    save_file(load_file(saved[0]), tmp_path / "bare")
    for name, content in (("empty", b""), ("text", b"not a checkpoint"), ("zeros", b"\x00" * 64)):
        (tmp_path / name).write_bytes(content)
    for path in ("bare", "", "empty", "text", "zeros"):
        with pytest.raises(DuplexError, match="not a checkpoint"):
            read_record(tmp_path / path)
    with pytest.raises(DuplexError, match="does not exist; `duplex train`"):
        read_record(tmp_path / "none")


def test_a_changed_value_is_refused(saved):
    path, _ = saved
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["codebook.rows"][0, 0] += 1e-6
    save_file(tensors, path, metadata)
    with pytest.raises(DuplexError, match="is damaged"):
        load_checkpoint(path, small_context(dtype=torch.float32), ENCODER)


def test_tensors_of_another_shape_type_or_name_are_refused(saved):
    path, network = saved
    save_checkpoint(path, network, dataclasses.replace(RECORD, options=Options(width=6)))
    with pytest.raises(DuplexError, match="another version of the method wrote it; train again"):
        load_checkpoint(path, small_context(dtype=torch.float32), ENCODER)
    save_checkpoint(path, network.double(), RECORD)
    with pytest.raises(DuplexError, match=r"codebook.mean_all is \(8,\) of torch.float64"):
        load_checkpoint(path, small_context(dtype=torch.float32), ENCODER)
    save_checkpoint(path, network.float(), dataclasses.replace(RECORD, options=Options(width=5, adapter="none")))
    with pytest.raises(DuplexError, match=r"has an unknown tensor 'paths\.adapter"):
        load_checkpoint(path, small_context(dtype=torch.float32), ENCODER)


def test_the_first_tensor_that_does_not_fit_is_reported(saved):
    """Tensors that grow may have any number of rows."""
    path, method = saved
    whole = method.state_dict()

    def fit(without: str = "", **more: torch.Tensor) -> None:
        tensors = {name: value for name, value in whole.items() if name != without}
        _check_fit(path, {**tensors, **{name.replace("__", "."): value for name, value in more.items()}}, method)

    fit()
    rows, mean = whole["codebook.rows"], whole["codebook.mean_s"]
    fit(codebook__rows=torch.cat([rows, rows]))
    for without, more, said in (
        ("codebook.known", {"zzz": rows}, "lacks tensor 'codebook.known'"),
        ("codebook.known", {"aaa": rows}, "has an unknown tensor 'aaa'"),
        ("", {"codebook__mean_s": torch.cat([mean, mean])}, r"codebook.mean_s is \(8, 8\)"),
        ("", {"codebook__rows": rows[:, 1:]}, r"codebook.rows is \(7, 7\)"),
        ("", {"codebook__rows": rows[None]}, r"codebook.rows is \(1, 7, 8\)"),
        ("", {"codebook__rows": rows[0]}, r"codebook.rows is \(8,\)"),
    ):
        with pytest.raises(DuplexError, match=said):
            fit(without, **more)


@pytest.mark.parametrize("key", ["weights", "preprocessing", "precision", "architecture", "encoder"])
def test_another_encoder_is_refused(saved, key):
    said = f"trained on features of {key} {ENCODER.get(key)!r}, not 'other'; train again, or name that encoder"
    with pytest.raises(DuplexError, match=said):
        load_checkpoint(saved[0], small_context(dtype=torch.float32), {**ENCODER, key: "other"})


@pytest.mark.parametrize("old", [1, 5])
def test_a_checkpoint_of_an_old_format_is_refused(saved, tmp_path, old):
    path = tmp_path / "old.safetensors"
    save_file(load_file(saved[0]), path, {"duplex": json.dumps({"format": old, "options": {}, "labels": {}})})
    with pytest.raises(DuplexError, match=f"has format {old}, this version reads format 7; train again"):
        load_checkpoint(path, small_context(dtype=torch.float32), ENCODER)


def with_meta(path, change, with_checksum=with_checksum):
    """Change the metadata of a checkpoint, by default with the checksum that belongs to it."""
    with safe_open(path, "pt") as file:
        meta = json.loads(file.metadata()["duplex"])
    change(meta)
    save_file(load_file(path), path, {"duplex": json.dumps(with_checksum(meta))})
    return path


CHANGES = {
    "labels": lambda meta: meta["labels"]["states"].reverse(),
    "calibration": lambda meta: meta["calibration"]["open"].update(bias=0.5),
    "options": lambda meta: meta["options"].update(momentum=0.5),
    "encoder": lambda meta: meta["encoder"].update(weights="abd"),
    "kind": lambda meta: meta.update(kind="prompts"),
    "world": lambda meta: meta.update(world="closed"),
    "confidence": lambda meta: meta["confidence"].update(temperature=2.0),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_of_the_record_is_refused(saved, field):
    path = with_meta(saved[0], CHANGES[field], with_checksum=dict)
    with pytest.raises(DuplexError, match=r"checkpoint\.safetensors is damaged: .*train again"):
        read_record(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("seed", value) for value in ("3", None, 2.5, float("inf"), True)),
        *(("val_auc", value) for value in ("high", None, [1.0], 10**400)),
        *(("world", value) for value in ("x", 5, None, ["open"])),
        *(("inspectable", value) for value in ("visual", [5], {"visual": 1}, None)),
        *(("encoder", value) for value in ({"encoder": 5}, "tiny", [["a"]], None)),
        *(("calibration", {"closed": value}) for value in (
            {}, 5, {"bias": "x"}, {"bias": None}, {"bias": float("nan")}, {"bias": 1e30},
            {"bias": 1.0, "threshold": float("inf")}, {"bias": 1.0, "threshold": "y"},
            {"bias": 1.0, "feasibility_source": "chance"}, {"bias": 1.0, "feasibility_source": ["words"]},
            {"bias": 1.0, "alternatives": 5}, {"bias": 1.0, "alternatives": [{}]}, {"bias": 1.0, "alternatives": [5]},
            {"bias": 1.0, "alternatives": [{"bias": 1.0, "alternatives": [{"bias": 1.0}]}]},
            {"bias": 1.0, "val_auc_gain": "x"}, {"bias": 1.0, "val_auc_gain_se": float("inf")},
        )),
        *(("calibration", value) for value in ({"ajar": {"bias": 1.0}}, ["closed"], 5)),
        *(("provider", value) for value in (5, None, {"duplex": 0})),
        *(("labels", value) for value in (5, None, {}, {"states": 5})),
        *(("kind", value) for value in (5, None, ["duplex"])),
        *(("selected_by", value) for value in (5, None)),
        *(("val_auc_all", value) for value in ("high", [1.0])),
        *(("options", value) for value in (5, None, {"width": "wide"})),
    ],
)  # fmt: skip
def test_metadata_of_a_wrong_type_is_refused(saved, key, value):
    with pytest.raises(DuplexError, match=r"checkpoint\.safetensors|^duplex: |width|row|known"):
        read_record(with_meta(saved[0], lambda meta: meta.update({key: value})))


def test_the_record_is_read_back_with_alternative_calibrations(saved):
    assert read_record(saved[0]) == RECORD
    others = Calibration(0.25, 1.5, feasibility_source="likelihood"), Calibration(0.5, 0.1, 3.0, 4.0, -1.0, 0.5)
    record = dataclasses.replace(RECORD, calibration={"open": Calibration(0.5, alternatives=others)})
    save_checkpoint(saved[0], saved[1], record)
    assert read_record(saved[0]) == record


def test_whole_numbers_are_read_as_floats(saved):
    path = with_meta(saved[0], lambda meta: meta.update(val_auc=1, calibration={"closed": {"bias": 0}}))
    assert read_record(path).val_auc == 1.0 and read_record(path).calibration == {"closed": Calibration(0.0)}


def test_a_width_that_no_tensor_has_is_refused_before_it_fills_the_memory(saved):
    path = with_meta(saved[0], lambda meta: meta["options"].update(adapter_width=10**6))
    with pytest.raises(DuplexError, match="adapter_width is 1,000,000, and no tensor is that large"):
        load_checkpoint(path, small_context(dtype=torch.float32), ENCODER)


def test_only_files_with_the_metadata_of_duplex_are_checkpoints(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors", {"format": "pt"})
    save_file({"x": torch.zeros(1)}, tmp_path / "ours.safetensors", {"duplex": "1.0"})
    assert is_checkpoint(tmp_path / "ours.safetensors")
    assert not is_checkpoint(tmp_path / "other.safetensors")
    assert not is_checkpoint(tmp_path / "absent.safetensors")
