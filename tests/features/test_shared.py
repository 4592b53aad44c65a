"""Features found by content are those of a plain extraction, whatever files are called and when they were added."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duplex.data.contents import file_digests
from duplex.errors import DuplexError
from duplex.features import shared as module
from duplex.features.extract import ExtractionReport, ExtractionSettings, extract
from duplex.features.file import read_features
from duplex.features.shared import SharedFeatures, encode_shared, find_cached_features


@pytest.fixture
def root(tmp_path: Path, images: list[str]) -> Path:
    return tmp_path / "pictures"


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[ExtractionReport]:
    found: list[ExtractionReport] = []
    monkeypatch.setattr(module, "extract", lambda *a, **k: found.append(extract(*a, **k)) or found[-1])
    return found


@pytest.fixture
def encode(tmp_path: Path, root: Path, encoder):
    def call(images: list[str], **options: Any) -> SharedFeatures:
        return encode_shared(
            tmp_path / "cache", encoder, root, images, file_digests(root, images), **{"max_bad": 0.5, **options}
        )[0]

    return call


def cls_of(features: SharedFeatures) -> np.ndarray:
    path, rows = features.require()
    return read_features(path).cls[rows]


def plain(images: list[str], root: Path, encoder) -> np.ndarray:
    out = root.parent / "plain.h5"
    extract(images, out, encoder, ExtractionSettings(root, "0", num_workers=0, max_bad=1.0), fresh=True)
    return read_features(out).cls


def test_images_that_are_added_or_left_out_keep_the_rows_of_the_others(encode, images, root, encoder, reports) -> None:
    expected = plain(images, root, encoder)
    first = encode(images[:10])
    np.testing.assert_allclose(cls_of(first), expected[:10], atol=2e-3)
    every = encode(images[::-1])
    assert [report.rows - report.resumed for report in reports] == [10, 30]
    np.testing.assert_allclose(cls_of(every), expected[::-1], atol=2e-3)
    few = encode(images[3:7])
    assert len(reports) == 2, "a larger cache serves fewer images"
    np.testing.assert_array_equal(cls_of(few), cls_of(every)[::-1][3:7])
    np.testing.assert_array_equal(cls_of(first), cls_of(every)[::-1][:10])
    assert len(list(first.folder.iterdir())) == 1, "the smaller cache is removed, and its images are found again"


def test_features_are_found_by_the_contents_of_images_alone(encode, images, root, tmp_path) -> None:
    features, digests = encode(images[:3]), file_digests(root, images[:4])
    first, last = (find_cached_features(tmp_path / "cache", part) for part in (digests[:1], digests[2:]))
    np.testing.assert_array_equal(first.cls, cls_of(features)[:1])
    assert last.bad.tolist() == [False, True]
    assert find_cached_features(tmp_path / "cache", digests[3:]) is None
    (tmp_path / "cache/features-other").mkdir()
    (tmp_path / "cache/features-other/old.h5").write_bytes(b"of another version")
    np.testing.assert_array_equal(find_cached_features(tmp_path / "cache", digests[:1]).cls, first.cls)


def test_renamed_copied_and_missing_files(encode, images, root, encoder, reports) -> None:
    expected = plain(images, root, encoder)
    encode(images)
    (root / images[0]).rename(root / "renamed.jpg")
    shutil.copy(root / images[1], root / "copy.jpg")
    names = ["renamed.jpg", "copy.jpg", images[1], "absent.jpg"]
    digests = file_digests(root, names)
    features, bad = encode_shared(root.parent / "cache", encoder, root, names, digests, max_bad=0.5)
    assert len(reports) == 1 and [(each.row, each.reason) for each in bad] == [(3, "missing")]
    np.testing.assert_allclose(cls_of(features)[:3], expected[[0, 1, 1]], atol=2e-3)
    with pytest.raises(DuplexError, match=r"1 of 4 images cannot be read, .*absent.jpg \(missing\)"):
        encode_shared(root.parent / "cache", encoder, root, names, digests, max_bad=0.2)


def test_an_image_that_cannot_be_read_is_named_each_time(encode, images, root, encoder, reports) -> None:
    (root / images[2]).write_bytes(b"no image")
    for _ in range(2):
        digests = file_digests(root, images)
        _, bad = encode_shared(root.parent / "cache", encoder, root, images, digests, max_bad=0.5)
        assert [(each.image, each.reason) for each in bad] == [(images[2], "not an image")]
    assert len(reports) == 1


@pytest.mark.parametrize("damage", [b"", None])
def test_a_damaged_or_deleted_cache_is_made_again(encode, images, damage: bytes | None) -> None:
    sound = encode(images[:10])
    expected = cls_of(sound)
    path, _ = sound.require()
    path.write_bytes(path.read_bytes()[:3000] if damage is None else damage)
    with pytest.raises(DuplexError, match="no longer has the features of all images"):
        sound.require()
    np.testing.assert_allclose(cls_of(encode(images[:10])), expected, atol=2e-3)


@pytest.mark.parametrize("before", [0, 5], ids=["a new cache", "an extended cache"])
@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_an_image_that_changes_during_the_encoding_gets_no_features_of_another(
    encode, images, root, encoder, monkeypatch, reports, before: int, change: str
) -> None:
    expected = plain(images[:10], root, encoder)
    if before:
        encode(images[:before])
    changed, content = root / images[7], (root / images[7]).read_bytes()

    def extract_meanwhile(*arguments: Any, **options: Any) -> Any:
        changed.unlink()
        if change == "replaced":
            shutil.copy(root / images[0], changed)
        return extract(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, "extract", extract_meanwhile)
        with pytest.raises(DuplexError, match=f"{images[7]} changed while it was being encoded; run the command again"):
            encode(images[:10])
    changed.write_bytes(content)
    np.testing.assert_allclose(cls_of(encode(images[:10])), expected, atol=2e-3)
    assert reports[-1].rows - reports[-1].resumed == 1, "the others were kept"


def test_an_interrupted_encoding_is_continued_with_further_images(
    encode, images, root, encoder, stop_at_third_batch, reports
) -> None:
    with stop_at_third_batch(), pytest.raises(KeyboardInterrupt):
        for count in (10, 20, 30, 40):
            encode(images[:count])
    np.testing.assert_allclose(cls_of(encode(images)), plain(images, root, encoder), atol=2e-3)
    assert reports[-1].resumed >= 20


def test_other_outputs_are_encoded_beside_and_serve_those_with_less(encode, images, reports) -> None:
    with_blocks, without = encode(images[:4], block_inputs=1), encode(images[:4])
    assert len(reports) == 1 and with_blocks.require()[0] == without.require()[0]
    deeper = encode(images[:4], block_inputs=2)
    assert len(reports) == 2 and deeper.require()[0] != with_blocks.require()[0]
    encode(images[:4], tokens="patch")
    assert len(reports) == 3
