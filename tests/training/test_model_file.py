"""Model files: read back equal, equal bytes for equal content, refused if anything was changed."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from duplex.errors import DuplexError
from duplex.training.checkpoint import FORMAT, KEY, read_header, read_tensors, tensor_digest, with_checksum, write_model

FIELDS = {"words": ["rôti", "Faux.Fur"], "numbers": [{"epoch": 1, "auc": 0.1}, {"epoch": 2, "auc": float("-inf")}]}


@pytest.fixture
def path(tmp_path):
    tensors = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3).T, "b": torch.tensor(True)}
    write_model(tmp_path / "one", "checkpoint", FIELDS, tensors)
    return tmp_path / "one"


def stored_header(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[KEY])


def test_a_file_is_read_back(path):
    header = read_header(path, "checkpoint")
    assert {name: header.fields[name] for name in FIELDS} == FIELDS
    assert list(header.fields["numbers"][0]) == ["epoch", "auc"], "the order of keys is kept"
    assert read_tensors(header)["a"].tolist() == [[0, 3], [1, 4], [2, 5]]
    with safe_open(path, "pt") as file:
        assert "rôti" in file.metadata()[KEY], "names are readable"


def test_equal_content_gives_equal_bytes_and_other_content_another_fingerprint(path, tmp_path):
    tensors = load_file(path)
    write_model(tmp_path / "two", "checkpoint", FIELDS, tensors)
    assert (tmp_path / "two").read_bytes() == path.read_bytes()
    write_model(tmp_path / "two", "checkpoint", FIELDS, {**tensors, "b": torch.tensor(False)})
    assert read_header(tmp_path / "two", "checkpoint").fingerprint != read_header(path, "checkpoint").fingerprint
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one", "two"]


def test_the_digest_depends_on_names_types_shapes_and_values():
    rows = torch.arange(4, dtype=torch.float32)
    others = {"b": rows}, {"a": rows.view(torch.int32)}, {"a": rows.reshape(2, 2)}, {"a": rows + 1}
    assert len({tensor_digest(tensors) for tensors in ({"a": rows}, *others)}) == 5
    pair = tensor_digest({"a": rows, "b": rows + 1})
    assert pair == tensor_digest({"b": rows + 1, "a": rows}) != tensor_digest({"a": rows + 1, "b": rows})


def test_a_changed_tensor_is_refused(path):
    tensors = load_file(path)
    tensors["a"][0, 0] += 1e-6
    save_file(tensors, path, {KEY: json.dumps(stored_header(path))})
    with pytest.raises(DuplexError, match="is damaged: its tensors were changed; run `duplex train`"):
        read_tensors(read_header(path, "checkpoint"))


def test_a_changed_header_is_refused(path):
    save_file(load_file(path), path, {KEY: json.dumps({**stored_header(path), "words": []})})
    with pytest.raises(DuplexError, match="is damaged: its header was changed; run `duplex train`"):
        read_header(path, "checkpoint")


@pytest.mark.parametrize("old", [None, 7, "duplex-export-4"])
def test_a_file_of_another_version_is_refused(path, old):
    save_file(load_file(path), path, {KEY: json.dumps(with_checksum({"format": old}))})
    with pytest.raises(
        DuplexError, match=f"has the format {old}, but this version of duplex reads only format {FORMAT}; run"
    ):
        read_header(path, "checkpoint")


def test_other_files_are_refused(path, tmp_path):
    save_file(load_file(path), tmp_path / "bare")
    save_file(load_file(path), tmp_path / "list", {KEY: "[1]"})
    for name, content in (("empty", b""), ("text", b"not a model"), ("zeros", b"\x00" * 64)):
        (tmp_path / name).write_bytes(content)
    for name in ("bare", "list", "", "empty", "text", "zeros"):
        with pytest.raises(DuplexError, match="cannot be read as a model file"):
            read_header(tmp_path / name, "checkpoint")
    with pytest.raises(DuplexError, match="none does not exist"):
        read_header(tmp_path / "none", "checkpoint")
    with pytest.raises(DuplexError, match="is of kind 'checkpoint', not 'export'; give its folder"):
        read_header(path, "export")
