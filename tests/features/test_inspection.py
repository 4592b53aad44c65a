from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from duplex.errors import DuplexError
from duplex.features.encode import ImageRows
from duplex.features.file import ENCODED, PENDING, status_of_reason
from duplex.features.inspect import inspect, verify
from tests.features.conftest import Wrapped, update_checksums
from tests.features.pictures import write_pictures
from tests.features.test_store import write_cache


@pytest.fixture
def checked(images, encoder, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`verify` of all rows of a cache of the forty images."""
    options = {"encoder": encoder, "images": images, "root": tmp_path / "pictures", "manifest_sha256": "m" * 64}
    return partial(verify, **options, sample=40)


def test_a_sound_cache_verifies_and_other_images_do_not(run, images, checked, tmp_path: Path) -> None:
    (tmp_path / "pictures" / images[4]).write_bytes(b"")
    path = run(max_bad=1.0).path
    found = checked(path)
    assert found["checked"] == 40 and found["worst_cosine"] > 0.9999
    assert checked(path, sample=0) == {"path": str(path), "checked": 0, "worst_cosine": 1}
    write_pictures(tmp_path / "pictures", 40, seed=1)
    with pytest.raises(DuplexError, match=r"row 0 differs from the re-encoded 00000.jpg"):
        checked(path)


def test_an_image_that_became_bad_or_was_repaired_is_reported(run, images, checked, tmp_path: Path) -> None:
    image = tmp_path / "pictures" / images[7]
    content = image.read_bytes()
    path = run().path
    image.write_bytes(b"")
    with pytest.raises(DuplexError, match=r"00007.jpg \(row 7\) is now empty, but was readable when encoded"):
        checked(path)
    path = run(max_bad=1.0, fresh=True).path
    assert checked(path)["checked"] == 40
    image.write_bytes(content)
    with pytest.raises(DuplexError, match=r"00007.jpg \(row 7\) is now readable, but was empty when encoded"):
        checked(path)
    path = run(fresh=True).path
    image.unlink()
    with pytest.raises(DuplexError, match="is now missing, but was readable"):
        checked(path)


def test_an_image_without_usable_features_is_no_image_that_was_repaired(run, encoder, checked) -> None:
    """It can be read, as it could be when it was encoded."""
    scale = torch.tensor([1.0, 0, float("nan"), *[1] * 5])[:, None]
    path = run(encoder=Wrapped(encoder, lambda pixels: encoder.encode_images(pixels) * scale), max_bad=1.0).path
    assert inspect(path)["bad"] == {"features all zero": 5, "features not finite": 5}
    assert checked(path)["checked"] == 40


def test_another_manifest_is_refused(run, checked) -> None:
    with pytest.raises(DuplexError, match="another manifest"):
        checked(run().path, manifest_sha256="n" * 64)


def test_inspect_counts_rows_of_every_kind(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((15, 4)).astype(np.float16)
    marks = np.full(15, ENCODED)
    marks[11:] = [*map(status_of_reason, ("empty", "damaged", "empty")), PENDING]
    found = inspect(write_cache(tmp_path / "f.h5", values, marks))
    assert found["bad"] == {"damaged": 1, "empty": 2} and found["pending"] == 1
    assert (found["rows"], found["of"], found["dim"]) == (15, 15, 4)
    assert (found["patch"], found["block_inputs"]) == (None, None)


def test_the_sample_has_that_many_rows_and_follows_its_seed(run, checked, monkeypatch) -> None:
    path, read = run().path, []
    seen = ImageRows.read
    monkeypatch.setattr(ImageRows, "read", lambda self, row: (read.append(row), seen(self, row))[1])
    drawn = []
    for seed in (1, 1, 2):
        read.clear()
        found = checked(path, sample=5, seed=seed)
        assert found == {"path": str(path), "checked": len(read), "worst_cosine": pytest.approx(1, abs=1e-5)}
        assert read == sorted(set(read))
        drawn.append(list(read))
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 5


def test_rows_of_a_shard_are_compared_with_its_own_images(run, images, checked) -> None:
    path = run(shard=(1, 2)).path
    assert checked(path)["checked"] == 24
    with h5py.File(path, "r+") as file:
        file["cls"][2] = file["cls"][3]
        update_checksums(file)
    with pytest.raises(DuplexError, match=rf"row 2 differs from the re-encoded {images[18]} \(cosine"):
        checked(path)


@pytest.mark.parametrize("change", [lambda row: 0 * row, lambda row: -row, lambda row: row[::-1]])
def test_a_changed_row_does_not_verify(run, checked, change) -> None:
    path = run().path
    with h5py.File(path, "r+") as file:
        file["cls"][39] = change(file["cls"][39]) * np.float16(0.01)
        update_checksums(file)
    with pytest.raises(
        DuplexError, match=r"row 39 differs from the re-encoded 00039\.jpg.*--fresh` to encode all images again"
    ):
        checked(path)


def test_the_worst_cosine_of_all_rows_is_returned(run, checked) -> None:
    path = run().path
    with h5py.File(path, "r+") as file:
        row = file["cls"][5].astype(np.float32)
        across = np.random.default_rng(0).standard_normal(16)
        across -= row * (across @ row) / (row @ row)
        file["cls"][5] = row + 0.03 * across * np.linalg.norm(row) / np.linalg.norm(across)  # tan = 0.03
        update_checksums(file)
    assert checked(path)["worst_cosine"] == pytest.approx((1 + 0.03**2) ** -0.5, abs=3e-5)
