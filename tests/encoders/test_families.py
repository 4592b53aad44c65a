"""Encoder families from entry points: built-in ones, and those of other distributions."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from duplex.encoders.base import (
    GROUP,
    EncoderIdentity,
    all_families,
    encoder_identity,
    family_module,
    load_encoder,
    missing_weights,
    unknown_words,
)
from duplex.system.plugins import installed_plugins
from tests.encoders.small import write_folder

MODULE = """
from duplex.encoders.open_clip import ClipFamily

class Renamed(ClipFamily):
    usage = "other:FOLDER"

    def find(self, name, weights):
        return super().find("local-dir:" + name.removeprefix("other:"), weights)

    def unknown_words(self, texts):
        return ["zebra"]
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution on sys.path with a family `other` and one with a built-in name."""
    info = tmp_path / "other_encoders-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-encoders\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(
        "[duplex.encoders]\nother = other_encoders:Renamed\ntiny = other_encoders:Renamed\n"
    )
    (tmp_path / "other_encoders.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_encoders", raising=False)
    return tmp_path


def test_a_family_of_another_distribution_loads(distribution: Path) -> None:
    write_folder(distribution / "model")
    name = f"other:{distribution / 'model'}"
    encoder = load_encoder(name, towers="image")
    assert encoder.encode_images(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape == (1, encoder.dim)
    assert encoder.identity == encoder_identity(name)
    assert unknown_words(name, ["zebra"]) == ["zebra"]
    assert family_module(name) == "other_encoders"


def test_built_in_families_win_and_take_all_other_names(distribution: Path) -> None:
    assert {"blip", "clip", "timm", "tiny", "other"} <= set(installed_plugins(GROUP))
    assert family_module("tiny") == "duplex.encoders.tiny"
    assert family_module("timm:resnet18") == "duplex.encoders.others"
    for name in ("ViT-B-32", "local-dir:folder", "hf-hub:owner/model"):
        assert family_module(name) == "duplex.encoders.open_clip"


def test_the_catalog_and_the_usage_lines_name_all_encoders() -> None:
    families = all_families()
    names = [entry.name for family in families for entry in family.catalog()]
    assert {"tiny", "ViT-L-14-quickgelu"} <= set(names) and len(names) == len(set(names))
    assert [family.usage.partition(":")[0] for family in families if family.usage] == ["blip", "local-dir", "timm"]
    assert missing_weights("tiny") is None and missing_weights("timm:resnet18", "a1_in1k") is None


def test_an_identity_survives_as_a_record() -> None:
    identity = encoder_identity("tiny", precision="bf16")
    record = identity.to_dict()
    assert list(record) == [field.name for field in fields(EncoderIdentity) if field.name != "code"]
    assert all(isinstance(value, str) for value in record.values())
    assert EncoderIdentity.from_dict({**record, "manifest": "m"}) == identity
