"""The cache by content gives the features of a plain extraction, whatever files are called and when they were added."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from duplex.config.params import EncoderParams
from duplex.data.contents import file_digests
from duplex.data.tables import labels_of
from duplex.encoders.base import load_encoder
from duplex.errors import DuplexError
from duplex.features.extract import extract
from duplex.features.file import open_features
from duplex.features.tokens import read_tokens
from duplex.options import FinetuneOptions
from duplex.recognition.cache import CONTENTS, FEATURES, ContentCache, ContentFeatures, ContentInputs
from duplex.training.inputs import InputRequest
from tests.recognition.drawn_folder import draw_pair

pytestmark = pytest.mark.slow
TINY = EncoderParams(name="tiny")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for state, thing in (("red", "star"), ("blue", "moon"), ("red", "moon")):
        draw_pair(root, state, thing, range(6))
    return root


def names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.glob("*/*/*.png"))


def filled(folder: Path, root: Path, images: list[str], blocks: int = 0) -> tuple[ContentFeatures, list[str]]:
    cache = ContentCache(folder, TINY, load_encoder("tiny", towers="image"), blocks)
    digests = file_digests(root, images)
    return cache.fill(root, dict(zip(digests, images, strict=True))), digests


def plain(folder: Path, root: Path, images: list[str], blocks: int) -> tuple[np.ndarray, Any]:
    """The naive twin: an extraction in the order of the names."""
    out = folder / "plain.h5"
    encoder = load_encoder("tiny", towers="image")
    extract(images, root, out, encoder, manifest_sha256="0", block_inputs=blocks, progress=False)
    tokens = read_tokens(out, "block_inputs")
    assert not hasattr(tokens, "files")
    return open_features(out).cls, tokens


def test_rows_are_those_of_a_plain_extraction(root, tmp_path):
    images = names(root)
    features, digests = filled(tmp_path / "cache", root, images, blocks=2)
    cls, tokens = plain(tmp_path, root, images, 2)
    rows = features.at(digests)
    np.testing.assert_allclose(features.stored.cls[rows], cls, atol=2e-3)
    stored: Any = read_tokens(features.path, "block_inputs")
    np.testing.assert_allclose(stored[rows], tokens, atol=2e-2)


def test_images_that_are_added_or_left_out_keep_the_rows_of_the_others(root, tmp_path):
    images = names(root)
    first, digests = filled(tmp_path / "cache", root, images[:10])
    before = first.stored.cls[first.at(digests)]
    every, all_digests = filled(tmp_path / "cache", root, images)
    assert len(every.rows) == len(images)
    np.testing.assert_allclose(every.stored.cls[every.at(digests)], before, atol=2e-3)
    whole, _ = plain(tmp_path, root, images, 0)
    np.testing.assert_allclose(every.stored.cls[every.at(all_digests)], whole, atol=2e-3)
    fewer, some = filled(tmp_path / "cache", root, images[3:7])  # nothing is lost, nothing encoded
    assert fewer.path.read_bytes() == every.path.read_bytes()
    np.testing.assert_array_equal(fewer.stored.cls[fewer.at(some)], every.stored.cls[every.at(some)])


def swap_lines(place: Path) -> None:
    first, second, *rest = (place / CONTENTS).read_text().splitlines()
    (place / CONTENTS).write_text("\n".join((second, first, *rest)) + "\n")


DAMAGE = {
    "two lines swapped": swap_lines,
    "half of the lines": lambda place: (place / CONTENTS).write_text((place / CONTENTS).read_text()[:325]),
    "no text": lambda place: (place / CONTENTS).write_bytes(b"\xff\xfe"),
    "no list": lambda place: (place / CONTENTS).unlink(),
    "an empty feature file": lambda place: (place / FEATURES).write_bytes(b""),
    "a feature file cut short": lambda place: (place / FEATURES).write_bytes((place / FEATURES).read_bytes()[:3000]),
    "a user's file beside it": lambda place: (place.with_name("note.txt").write_text("mine"), swap_lines(place)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_again_and_gives_no_image_the_features_of_another(root, tmp_path, damage):
    images = names(root)[:10]
    sound, digests = filled(tmp_path / "cache", root, images)
    expected = sound.stored.cls[sound.at(digests)]
    DAMAGE[damage](sound.path.parent)
    again, _ = filled(tmp_path / "cache", root, images)
    np.testing.assert_allclose(again.stored.cls[again.at(digests)], expected, atol=2e-3)


@pytest.mark.parametrize("before", [0, 5], ids=["a new cache", "an extended cache"])
@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_features_of_an_image_that_changes_during_the_encoding_are_not_kept(
    root, tmp_path, monkeypatch, before, change
):
    images = names(root)[:10]
    if before:
        filled(tmp_path / "cache", root, images[:before])
    own = shutil.copytree(root, tmp_path / "images")
    changed, reports = own / images[7], []

    def extract_meanwhile(*arguments: Any, **options: Any) -> Any:
        changed.unlink(missing_ok=True)
        if change == "replaced":
            shutil.copy(root / images[0], changed)
        reports.append(extract(*arguments, **{**options, "max_bad": 0.5}))
        return reports[-1]

    monkeypatch.setattr("duplex.recognition.cache.extract", extract_meanwhile)
    with pytest.raises(DuplexError, match=f"{images[7]} changed while it was being encoded; run the command again"):
        filled(tmp_path / "cache", own, images)
    monkeypatch.undo()
    monkeypatch.setattr(
        "duplex.recognition.cache.extract", lambda *a, **k: reports.append(extract(*a, **k)) or reports[-1]
    )
    shutil.copy(root / images[7], changed)
    again, digests = filled(tmp_path / "cache", own, images)
    expected, _ = plain(tmp_path, root, images, 0)
    np.testing.assert_allclose(again.stored.cls[again.at(digests)], expected, atol=2e-3)
    assert reports[-1].rows - reports[-1].resumed == 1  # the others were kept


def test_a_single_image_that_changes_leaves_no_features(root, tmp_path, monkeypatch):
    own = shutil.copytree(root, tmp_path / "images")
    image, other, *_ = names(root)

    def extract_meanwhile(*arguments: Any, **options: Any) -> Any:
        shutil.copy(own / other, own / image)
        return extract(*arguments, **options)

    monkeypatch.setattr("duplex.recognition.cache.extract", extract_meanwhile)
    with pytest.raises(DuplexError, match="changed while it was being encoded"):
        filled(tmp_path / "cache", own, [image])
    assert not list((tmp_path / "cache").rglob(FEATURES))


def test_features_without_their_list_are_not_trusted(root, tmp_path, monkeypatch):
    """As after a fit that was killed before it compared the files with their digests."""
    own = shutil.copytree(root, tmp_path / "images")
    images = names(root)[:4]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    def extract_meanwhile(*arguments: Any, **options: Any) -> Any:
        shutil.copy(own / images[1], own / images[0])
        return extract(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("duplex.recognition.cache.extract", extract_meanwhile)
        patch.setattr("duplex.recognition.cache.changed_images", killed)
        filled(tmp_path / "cache", own, images)
    shutil.copy(root / images[0], own / images[0])
    features, digests = filled(tmp_path / "cache", own, images)
    expected, _ = plain(tmp_path, root, images, 0)
    np.testing.assert_allclose(features.stored.cls[features.at(digests)], expected, atol=2e-3)


def test_further_encoders_outputs_have_a_folder_of_their_own(root, tmp_path):
    images = names(root)[:4]
    without, _ = filled(tmp_path / "cache", root, images)
    with_blocks, _ = filled(tmp_path / "cache", root, images, blocks=1)
    assert without.path != with_blocks.path
    assert without.path.is_file()


def test_a_missing_file_has_no_digest(root):
    assert file_digests(root, ["red/star/0000.png", "absent.png"])[1] == ""


def test_inputs_of_fewer_blocks_are_those_of_a_cache_of_so_many(root, tmp_path):
    images = names(root)
    features, digests = filled(tmp_path / "cache", root, images, blocks=4)
    frame = pd.DataFrame({"image": images, "split": "train"})
    frame[["state", "object"]] = [image.split("/")[:2] for image in images]
    frame = frame[["image", "state", "object", "split"]]
    inputs = ContentInputs(frame, labels_of(frame), features.at(digests), features, TINY, "cpu")
    request = InputRequest(finetune=FinetuneOptions(blocks=2))
    run = inputs.read(request)
    _, tokens = plain(tmp_path, root, images, 2)
    assert run.encoder["block_inputs"] == "2"
    np.testing.assert_allclose(run.examples["train"].inputs["block_inputs"].numpy(), tokens, atol=2e-2)
    backwards = replace(inputs, rows=inputs.rows[::-1]).read(request)  # from what the first reading left in memory
    twins = [each.examples["train"].inputs["block_inputs"].numpy() for each in (run, backwards)]
    np.testing.assert_array_equal(twins[0], twins[1][::-1])
    deeper = inputs.read(replace(request, finetune=FinetuneOptions(blocks=4)))
    assert deeper.encoder["block_inputs"] == "4"
    blocks = run.make_blocks(), deeper.make_blocks()
    shallow, deep = (
        block(each.examples["train"].inputs["block_inputs"]) for block, each in zip(blocks, (run, deeper), strict=True)
    )
    np.testing.assert_allclose(shallow.detach().numpy(), deep.detach().numpy(), atol=5e-2)


def test_inputs_too_large_for_memory_stay_on_the_disk(root, tmp_path):
    images = names(root)
    features, digests = filled(tmp_path / "cache", root, images, blocks=4)
    frame = pd.DataFrame({"image": images, "state": "red", "object": "star", "split": "train"})
    inputs = ContentInputs(frame, labels_of(frame), features.at(digests)[::-1], features, TINY, "cpu")
    run = inputs.read(InputRequest(finetune=FinetuneOptions(blocks=2), memory=1e-9))
    tokens = run.examples["train"].inputs["block_inputs"]
    assert run.encoder["block_inputs"] == "4"
    stored = read_tokens(features.path, "block_inputs")
    np.testing.assert_array_equal(tokens[slice(0, 3)].numpy(), stored[features.at(digests)[::-1][:3]])
