"""Rows of images that were encoded before are copied, whatever the images are called and wherever they lie."""

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.features.extract import copy_equal_rows, has_outputs_of
from duplex.features.file import BAD_FEATURES, PartialCache, Span, read_features
from tests.features.conftest import Wrapped


@pytest.fixture
def counted(encoder) -> tuple[Wrapped, list[int]]:
    sizes: list[int] = []
    return Wrapped(encoder, lambda pixels: (sizes.append(len(pixels)), encoder.encode_images(pixels))[1]), sizes


@pytest.mark.parametrize(
    "options",
    [{"manifest_sha256": "n" * 64}, {"recorded_root": "elsewhere"}, {"images": [f"{n:05d}.jpg" for n in range(9)]}],
)
def test_another_manifest_folder_or_choice_of_images_encodes_nothing(run, images, counted, options) -> None:
    encoder, sizes = counted
    run(recorded_root="here")
    report = run(encoder=encoder, **{"manifest_sha256": "n" * 64, **options})
    assert report.resumed == report.rows and sizes == []


def test_images_in_another_order_under_other_names_have_the_rows_of_a_plain_extraction(run, images, counted, tmp_path):
    encoder, sizes = counted
    first = read_features(run().path).cls
    for image in images:
        shutil.copy(tmp_path / "pictures" / image, tmp_path / "pictures" / f"new-{image}")
    renamed = [f"new-{image}" for image in reversed(images)]
    report = run(tmp_path / "other.h5", encoder=encoder, images=renamed, reuse=[tmp_path / "features.h5"])
    assert report.resumed == 40 and sizes == []
    np.testing.assert_array_equal(read_features(report.path).cls, first[::-1])
    with h5py.File(report.path) as file, h5py.File(tmp_path / "features.h5") as before:
        np.testing.assert_array_equal(file["contents"][...], before["contents"][...][::-1])


@pytest.mark.parametrize("options", [{"tokens": "patch"}, {"block_inputs": 1}, {"pixels": True}])
def test_a_copy_equals_an_extraction_byte_for_byte(run, tmp_path: Path, images, options) -> None:
    (tmp_path / "pictures" / images[3]).write_bytes(b"no image")
    whole = run(tmp_path / "whole.h5", max_bad=0.1, manifest_sha256="n" * 64, **options).path
    base = run(tmp_path / "base.h5", max_bad=0.1, **options).path
    report = run(tmp_path / "copy.h5", max_bad=0.1, manifest_sha256="n" * 64, reuse=[base], **options)
    assert report.resumed == 39 and report.path.read_bytes() == whole.read_bytes()
    fewer = run(tmp_path / "cls.h5", max_bad=0.1, reuse=[base])
    assert fewer.resumed == 39, "a cache with more data sets serves one with fewer"


def test_only_images_that_are_new_or_changed_are_encoded(run, images, counted, tmp_path: Path) -> None:
    encoder, sizes = counted
    run(images=images[::2], manifest_sha256="n" * 64)
    report = run(encoder=encoder)
    assert report.resumed == 20 and sizes == [8, 8, 4]
    sizes.clear()
    pictures = tmp_path / "pictures"
    before = read_features(report.path).cls
    for first, second in (images[:2], images[2:4]):
        (pictures / first).rename(pictures / "held")
        (pictures / second).rename(pictures / first)
        (pictures / "held").rename(pictures / second)
    report = run(encoder=encoder)
    assert sizes == [], "files that were swapped are found by their content"
    order = [1, 0, 3, 2, *range(4, 40)]
    np.testing.assert_array_equal(read_features(report.path).cls, before[order])
    (pictures / images[39]).write_bytes((pictures / images[0]).read_bytes() + b"a comment")
    report = run(encoder=encoder)
    assert report.resumed == 39 and sum(sizes) <= 8
    np.testing.assert_allclose(read_features(report.path).cls[39], before[1], atol=2e-3)


def test_images_that_change_between_two_attempts_are_encoded_again(run, images, tmp_path, stop_at_third_batch) -> None:
    with stop_at_third_batch(), pytest.raises(KeyboardInterrupt):
        run()
    shutil.copy(tmp_path / "pictures" / images[30], tmp_path / "pictures" / images[3])
    report = run()
    cls = read_features(report.path).cls
    assert report.resumed == 23
    np.testing.assert_allclose(cls[3], cls[30], atol=2e-3)


def test_a_copy_that_is_interrupted_goes_on_to_the_same_bytes(run, images, tmp_path, stop_at_third_batch) -> None:
    base = run(tmp_path / "base.h5", images=images[:10], manifest_sha256="n" * 64).path
    whole = run(tmp_path / "whole.h5", reuse=[base]).path
    with stop_at_third_batch(), pytest.raises(KeyboardInterrupt):
        run(reuse=[base])
    for attempt in range(2):
        report = run(reuse=[base] if attempt else [])
        assert report.path.read_bytes() == whole.read_bytes()
        with h5py.File(report.path) as file:
            assert not (file["status"][...] > 1).any()


def test_damaged_rows_are_not_copied(run, tmp_path: Path) -> None:
    base = run(tmp_path / "base.h5").path
    good = read_features(base).cls
    with h5py.File(base, "r+") as file:
        file["cls"].write_direct(np.ones((1, 16), np.float16), dest_sel=np.s_[7:8])
    report = run(reuse=[base, tmp_path / "absent.h5"])
    assert report.resumed < 40
    np.testing.assert_allclose(read_features(report.path).cls, good, atol=2e-3)


def test_rows_of_another_encoder_are_not_copied(run, tmp_path: Path) -> None:
    identity = read_features(run().path).identity
    for key in ("weights", "preprocessing", "torch", "precision"):
        assert not has_outputs_of({**identity, key: "other"}, identity)
    assert not has_outputs_of({**identity, "block_inputs": "2"}, {**identity, "block_inputs": "1"})
    assert has_outputs_of({**identity, "block_inputs": "1", "tokens": "patch"}, {**identity, "manifest": "other"})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_copies_are_those_of_a_dictionary(tmp_path_factory, wanted: list[int], there: list[int]) -> None:
    """Image i has the content i and the features i; content 0 is that of a missing file."""
    folder = tmp_path_factory.mktemp("reuse")

    def contents(images: list[int]) -> np.ndarray:
        return np.repeat(np.array(images, np.uint8)[:, None], 32, axis=1)

    identity = {"encoder": "a", "dim": "2", "manifest": "m"}
    source = PartialCache.create(folder / "a.h5", identity, Span(0, len(there), len(there)), 2)
    marks = np.array([1 if image % 3 else BAD_FEATURES[0] for image in there], np.uint8)
    source.write(0, marks, contents=contents(there), cls=np.array(there, np.float16)[:, None].repeat(2, axis=1))
    source.finish()
    cache = PartialCache.create(folder / "b.h5", {**identity, "manifest": "n"}, Span(0, len(wanted), len(wanted)), 2)
    copy_equal_rows(cache, contents(wanted), [folder / "a.h5"])
    expected = [image % 3 > 0 and image in there for image in wanted]
    assert ((cache.statuses != 0) == expected).all()
    cache.write(
        np.flatnonzero(~np.array(expected)),
        np.ones(expected.count(False), np.uint8),
        cls=np.zeros((expected.count(False), 2)),
    )
    cache.finish()
    found = read_features(folder / "b.h5").cls[:, 0]
    assert found.tolist() == [image if copied else 0 for image, copied in zip(wanted, expected, strict=True)]
