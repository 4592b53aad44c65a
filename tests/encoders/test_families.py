"""Encoder families from entry points: built-in ones, those of other distributions, and what edits of their code do."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import duplex
from duplex.encoders import others
from duplex.encoders.base import (
    GROUP,
    EncoderIdentity,
    all_families,
    encoder_identity,
    family_modules,
    load_encoder,
    missing_weights,
    unknown_words,
)
from duplex.errors import DuplexError, UsageError
from duplex.features.file import read_features
from duplex.recognition import fit
from duplex.recognition.update import update_model
from duplex.system.plugins import installed_plugins
from tests.encoders.small import write_folder
from tests.recognition.drawn_folder import draw_folder, draw_pair
from tests.recognition.searches import only_the_first

RENAMED = """
from duplex.encoders.open_clip import ClipFamily

class Renamed(ClipFamily):
    usage = "other:FOLDER"

    def find(self, name, weights):
        return super().find("local-dir:" + name.removeprefix("other:"), weights)

    def unknown_words(self, texts):
        return ["zebra"]
"""


def install(folder: Path, module: str, source: str, points: str, patch: pytest.MonkeyPatch) -> Path:
    """Write a distribution of one module to a folder on sys.path; return the module's file."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[duplex.encoders]\n{points}\n")
    (folder / f"{module}.py").write_text(source)
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, module, raising=False)
    return folder / f"{module}.py"


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution on sys.path with a family `other` and one with a built-in name."""
    points = "other = other_encoders:Renamed\ntiny = other_encoders:Renamed"
    return install(tmp_path, "other_encoders", RENAMED, points, monkeypatch).parent


def test_a_family_of_another_distribution_loads(distribution: Path) -> None:
    write_folder(distribution / "model")
    name = f"other:{distribution / 'model'}"
    encoder = load_encoder(name, towers="image")
    assert encoder.encode_images(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape == (1, encoder.dim)
    assert encoder.identity == encoder_identity(name)
    assert unknown_words(name, ["zebra"]) == ["zebra"]
    assert family_modules(name) == ["other_encoders"]


def test_built_in_families_win_and_take_all_other_names(distribution: Path) -> None:
    assert {"blip", "clip", "timm", "tiny", "other"} <= set(installed_plugins(GROUP))
    assert family_modules("tiny") == ["duplex.encoders.tiny"]
    assert family_modules("timm:resnet18") == ["duplex.encoders.others"]
    for name in ("ViT-B-32", "local-dir:folder", "hf-hub:owner/model"):
        assert family_modules(name) == ["duplex.encoders.open_clip"]


def test_the_catalog_and_the_usage_lines_name_all_encoders() -> None:
    families = all_families()
    names = [entry.name for family in families for entry in family.catalog()]
    assert {"tiny", "ViT-L-14-quickgelu"} <= set(names) and len(names) == len(set(names))
    assert [family.usage.partition(":")[0] for family in families if family.usage] == ["blip", "local-dir", "timm"]
    assert missing_weights("tiny") is None and missing_weights("timm:resnet18", "random:0") is None


@pytest.mark.parametrize(
    ("name", "weights", "owner"),
    [
        ("timm:resnet18", "tv_in1k", "timm/resnet18.tv_in1k"),
        ("blip:Salesforce/blip-itm-base-coco", None, "Salesforce/blip-itm-base-coco"),
    ],
)
def test_weights_of_the_hub_are_looked_for_on_disk(
    name: str, weights: str | None, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "hub_file_on_disk", lambda owner, names: None)
    missing = missing_weights(name, weights)
    assert missing is not None and missing.address == f"https://huggingface.co/{owner}"
    monkeypatch.setattr(others, "hub_file_on_disk", lambda owner, names: Path(names[0]))
    assert missing_weights(name, weights) is None


MINE = """
from dataclasses import replace

from duplex.encoders.tiny import TinyFamily

class Mine(TinyFamily):
    def find(self, name, weights=None):
        return replace(super().find("tiny", weights), name="mine")
"""
LINE = (
    "duplex: the code of the encoder 'mine' has changed since the model was trained; "
    "predictions may be wrong until you train the model again\n"
)
Change = Callable[[], object]


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Install the packaged encoder as the plug-in `mine`; return a function that changes the plug-in's code."""
    file = install(tmp_path / "site", "mine_encoders", MINE, "mine = mine_encoders:Mine", monkeypatch)
    return lambda: file.write_text(f"{MINE}\nCHANGED = 1\n")


def test_the_code_is_in_the_identity_of_plugins_alone(change: Change) -> None:
    before = encoder_identity("mine")
    assert before.code and load_encoder("mine").identity == before
    assert EncoderIdentity.from_dict(before.to_dict()) == before
    tiny = encoder_identity("tiny").to_dict()
    assert "code" not in tiny and before.to_dict() == {**tiny, "encoder": "mine", "code": before.code}
    change()
    after = encoder_identity("mine")
    assert after != before and load_encoder("mine").identity == after


def test_caches_and_runs_of_other_code_are_refused_or_made_again(
    change: Change, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = draw_folder(tmp_path / "shop", images=4)
    data = duplex.load_dataset(root, encoder="mine", cache=tmp_path / "cache")
    run = duplex.fit(data, "closed_form")
    folder = run.save(tmp_path / "run")
    (cache,) = (tmp_path / "cache").glob("*/*.h5")
    features, image = read_features(cache), next(root.rglob("*.png"))
    capsys.readouterr()
    duplex.Recognizer.load(folder)(image)
    assert "has changed" not in capsys.readouterr().err
    change()
    with pytest.raises(DuplexError, match="made with another code of its encoder family"):
        read_features(cache, expect=encoder_identity("mine").to_dict())
    recognizer = duplex.Recognizer.load(folder)
    recognizer(image)
    recognizer(image)
    assert capsys.readouterr().err.count(LINE) == 1
    assert len(recognizer(features)) == len(features.cls), "features of training are still those of the model"
    data = duplex.load_dataset(root, encoder="mine", cache=tmp_path / "cache")
    (other,) = set((tmp_path / "cache").glob("*/*.h5")) - {cache}
    with pytest.raises(UsageError, match="was trained with the encoder's code"):
        duplex.evaluate(run, data)
    with pytest.raises(UsageError, match=r"made with another code of its encoder family.*or choose another model"):
        recognizer(read_features(other))


@pytest.mark.slow
def test_an_update_with_other_code_is_refused(change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit.FolderFit, "search", only_the_first)
    root, out = draw_folder(tmp_path / "shop", images=6), tmp_path / "model"
    draw_pair(tmp_path / "more", "red", "star", range(20, 24))
    fit.fit_folder(root, out, encoder="mine", say=lambda _: None)
    update_model(out, tmp_path / "more", tmp_path / "updated", say=lambda _: None)
    change()
    with pytest.raises(
        UsageError, match=r"the code of the encoder 'mine' has changed since .*was fitted.*`duplex fit` again"
    ):
        update_model(out, tmp_path / "more", tmp_path / "other", say=lambda _: None)
