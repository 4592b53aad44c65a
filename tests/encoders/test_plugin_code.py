"""The code of a plug-in encoder is part of its identity: features of other code are not used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import duplex
from duplex.encoders.base import EncoderIdentity, encoder_identity, load_encoder
from duplex.errors import DuplexError, UsageError
from duplex.features import extract
from duplex.features.file import PartialCache, read_features
from duplex.recognition import fit
from duplex.recognition.update import update_model
from tests.recognition.drawn_folder import draw_folder, draw_pair
from tests.recognition.searches import only_the_first

MODULE = """
from dataclasses import replace

from duplex.encoders.tiny import TinyFamily

class Mine(TinyFamily):
    def find(self, name, weights=None):
        return replace(super().find("tiny", weights), name="mine")
"""
LINE = "duplex: the code of 'mine' has changed since the model was trained\n"
Change = Callable[[], object]


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Install the packaged encoder as the plug-in `mine`; return a function that changes the plug-in's code."""
    site = tmp_path / "site"
    info = site / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[duplex.encoders]\nmine = mine_encoders:Mine\n")
    (site / "mine_encoders.py").write_text(MODULE)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "mine_encoders", raising=False)
    return lambda: (site / "mine_encoders.py").write_text(f"{MODULE}\nCHANGED = 1\n")


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
    with pytest.raises(UsageError, match="was trained on features of code"):
        duplex.evaluate(run, data)
    with pytest.raises(UsageError, match=r"made with another code of its encoder family.*or choose a model"):
        recognizer(read_features(other))


@pytest.mark.slow
def test_a_fit_encodes_again_and_an_update_is_refused(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit.FolderRecipes, "levels", only_the_first)
    root, out = draw_folder(tmp_path / "shop", images=6), tmp_path / "model"
    draw_pair(tmp_path / "more", "red", "star", range(20, 24))
    fit.fit_folder(root, out, encoder="mine", say=lambda _: None)
    update_model(out, tmp_path / "more", tmp_path / "updated", say=lambda _: None)
    change()
    with pytest.raises(UsageError, match=r"the code of 'mine' has changed since .*was fitted.*`duplex fit` again"):
        update_model(out, tmp_path / "more", tmp_path / "other", say=lambda _: None)
    encoded: list[torch.device] = []
    encode = extract._encode_pending

    def counted(cache: PartialCache, job: extract.ExtractionJob) -> None:
        encoded.append(job.encoder.device)
        encode(cache, job)

    monkeypatch.setattr(extract, "_encode_pending", counted)
    fit.fit_folder(root, out, encoder="mine", say=lambda _: None, force=True)
    assert len(encoded) == 1
    update_model(out, tmp_path / "more", tmp_path / "again", say=lambda _: None)
