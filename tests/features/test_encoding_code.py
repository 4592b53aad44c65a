"""Rows are used again only if the code that would make them is the code that made them."""

import shutil
from pathlib import Path

import h5py
import pytest

import duplex
from duplex.data.contents import file_digests
from duplex.features import extract as extraction
from duplex.features import shared
from duplex.features.encode import encoding_code
from duplex.features.file import read_features
from duplex.features.shared import encode_shared, find_cached_features
from duplex.system import code as hashing
from tests.recognition.drawn_folder import draw_folder
from tests.subprocesses import ROOT

SAID = "made with another version of the code that encodes images; extracting again"


@pytest.fixture
def change_code(monkeypatch: pytest.MonkeyPatch):
    """A function after whose call the code that encodes images counts as changed."""

    def call() -> None:
        for module in (extraction, shared):
            monkeypatch.setattr(module, "encoding_code", lambda encoder: f"changed {encoding_code(encoder)}")

    return call


def test_a_finished_cache_of_other_code_is_encoded_again(run, change_code, capsys) -> None:
    run()
    assert run().resumed == 40 and "extracting again" not in capsys.readouterr().err
    change_code()
    assert run().resumed == 0 and SAID in capsys.readouterr().err
    assert run().resumed == 40


def test_a_cache_without_a_record_of_its_code_is_encoded_again(run, capsys) -> None:
    with h5py.File(run().path, "r+") as file:
        del file["identity"].attrs["encoding"]
    assert run().resumed == 0 and SAID in capsys.readouterr().err


def test_an_extraction_that_other_code_began_is_not_continued(run, change_code, stop_at_third_batch, capsys) -> None:
    with stop_at_third_batch(), pytest.raises(KeyboardInterrupt):
        run()
    change_code()
    assert run().resumed == 0
    assert "begun with another version of the code that encodes images" in capsys.readouterr().err


def test_rows_of_other_code_are_not_copied(run, change_code, tmp_path: Path) -> None:
    base = run(tmp_path / "base.h5", manifest_sha256="n" * 64).path
    assert run(tmp_path / "same.h5", reuse=[base]).resumed == 40
    change_code()
    assert run(tmp_path / "other.h5", reuse=[base]).resumed == 0


def test_the_shared_cache_of_other_code_is_replaced(tmp_path, images, encoder, change_code) -> None:
    folder, root = tmp_path / "cache", tmp_path / "pictures"
    digests = file_digests(root, images)
    before, _ = encode_shared(folder, encoder, root, images[:10], digests[:10])
    old, _ = before.require()
    kept, _ = encode_shared(folder, encoder, root, images[30:], digests[30:])
    change_code()
    assert find_cached_features(folder, digests[:10]) is None
    after, _ = encode_shared(folder, encoder, root, images[:20], digests[:20])
    path, _ = after.require()
    assert path.parent != old.parent and not old.exists()
    assert kept.find() is not None, "its images are in no other cache"
    assert find_cached_features(folder, digests[:10]).path == path
    encode_shared(folder, encoder, root, images, digests)
    assert not old.parent.exists()


def test_models_are_used_after_the_code_of_extraction_has_changed(tmp_path, change_code) -> None:
    root = draw_folder(tmp_path / "shop", images=4)
    run = duplex.fit(duplex.load_dataset(root, encoder="tiny", cache=tmp_path / "cache"), "closed_form")
    folder = run.save(tmp_path / "run")
    change_code()
    data = duplex.load_dataset(root, encoder="tiny", cache=tmp_path / "cache")
    (cache,) = (tmp_path / "cache").glob("*/*.h5")
    assert duplex.evaluate(run, data)
    features = read_features(cache)
    assert len(duplex.Recognizer.load(folder)(features)) == len(features.cls)


@pytest.mark.parametrize(
    ("file", "old", "changes"),
    [("data/images", 'image.convert("RGB")', {"tiny", "ViT-B-32"}),
     ("features/encode", "value.half()", {"tiny", "ViT-B-32"}),
     ("encoders/open_clip", "class ResizeAndCrop", {"tiny", "ViT-B-32"}),
     ("encoders/tiny/__init__", "model.eval()", {"tiny"}),
     ("methods/base", "class Method", set()),
     ("cli/features", "def verify", set())],
)  # fmt: skip
def test_the_hash_covers_all_code_that_makes_a_row(tmp_path, monkeypatch, file: str, old: str, changes) -> None:
    package = copied_package(tmp_path)
    monkeypatch.setattr(hashing, "PACKAGE", package)
    names = ("tiny", "ViT-B-32")
    before = {name: encoding_code(name) for name in names}
    path = package / f"{file}.py"
    text = path.read_text()
    assert old in text
    path.write_text(f"# A comment.\n{text}")
    assert {name: encoding_code(name) for name in names} == before
    path.write_text(f"{text}\nCHANGED = 1\n")
    assert {name for name in names if encoding_code(name) != before[name]} == changes


def copied_package(folder: Path) -> Path:
    return Path(shutil.copytree(ROOT / "duplex", folder / "duplex", ignore=shutil.ignore_patterns("__pycache__")))
