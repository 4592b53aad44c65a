from pathlib import Path

import h5py
import numpy as np
import pytest

from duplex.errors import DuplexError
from duplex.features.inspection import inspect, verify
from duplex.features.layout import ENCODED, Span, mark_of, open_file
from duplex.features.store import PartialCache
from tests.features.pictures import write_pictures


def test_what_a_cache_holds_in_numbers(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float16)
    values[2], values[4], values[5], values[7] = values[1], 0, np.nan, 0
    marks = np.full(9, ENCODED, np.uint8)
    marks[7] = mark_of("missing")
    cache = PartialCache.create(tmp_path / "f.h5", {"dim": "4", "encoder": "e"}, Span(0, 9, 9), 4)
    cache.write(0, marks, cls=values)
    cache.finish()
    found = inspect(tmp_path / "f.h5")
    norms = np.linalg.norm(values[[0, 1, 2, 3, 6, 8]].astype(np.float32), axis=1)
    assert (found["rows"], found["bad"], found["pending"]) == (9, {"missing": 1}, 0)
    assert (found["nan_rows"], found["zero_rows"], found["duplicate_rows"]) == (1, 1, 1)
    assert found["norm"]["mean"] == pytest.approx(norms.mean()) and found["norm"]["max"] == pytest.approx(norms.max())
    assert found["identity"] == {"dim": "4", "encoder": "e"}


def test_a_true_cache_verifies_and_shifted_rows_do_not(run, images, encoder, tmp_path: Path) -> None:
    (tmp_path / "pictures" / images[4]).write_bytes(b"")
    path = run(max_bad=1.0).path
    found = verify(path, encoder, images, tmp_path / "pictures", "m" * 64, sample=40)
    assert found["checked"] == 40 and found["worst_cosine"] > 0.9999
    write_pictures(tmp_path / "pictures", 40, seed=1)
    with pytest.raises(DuplexError, match=r"row 0 is not 00000.jpg"):
        verify(path, encoder, images, tmp_path / "pictures", "m" * 64, sample=40)


def test_a_picture_that_went_bad_since_is_told(run, images, encoder, tmp_path: Path) -> None:
    path = run().path
    (tmp_path / "pictures" / images[0]).write_bytes(b"")
    with pytest.raises(DuplexError, match=r"00000.jpg \(row 0\) is empty, in the cache readable"):
        verify(path, encoder, images, tmp_path / "pictures", "m" * 64, sample=40)
    with pytest.raises(DuplexError, match="another manifest"):
        verify(path, encoder, images, tmp_path / "pictures", "n" * 64)
    with open_file(path) as file:
        assert not file["cls"].is_virtual


def test_a_row_of_nan_does_not_verify(run, images, encoder, tmp_path: Path) -> None:
    path = run().path
    with h5py.File(path, "r+") as file:
        file["cls"][7] = np.nan
    with pytest.raises(DuplexError, match=r"row 7 is not 00007\.jpg"):
        verify(path, encoder, images, tmp_path / "pictures", "m" * 64, sample=40)


def test_the_first_rows_alone_verify_as_well(run, images, encoder, tmp_path: Path) -> None:
    path = run(limit=9).path
    assert verify(path, encoder, images, tmp_path / "pictures", "m" * 64, sample=40)["checked"] == 9
