from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError
from duplex.features.layout import ENCODED, FIRST_BAD, PENDING, REASONS, Span
from duplex.features.store import PartialCache, open_features

IDENTITY = {"encoder": "e", "weights": "w", "precision": "fp32", "preprocessing": "p", "manifest": "m", "dim": "3"}
IDENTITY["torch"] = "2"


def finished(path: Path, **changes: str) -> Path:
    cache = PartialCache.create(path, {**IDENTITY, **changes}, Span(0, 4, 4), 3)
    cache.write(0, np.full(4, ENCODED, np.uint8), cls=np.arange(12, dtype=np.float16).reshape(4, 3))
    cache.finish()
    return path


SPOKEN = {"encoder": "encoder", "weights": "weights file", "precision": "precision", "manifest": "manifest"}


@pytest.mark.parametrize(("key", "spoken"), SPOKEN.items())
def test_a_cache_of_another_identity_is_refused_naming_the_repair(tmp_path: Path, key: str, spoken: str) -> None:
    path = finished(tmp_path / "shoes" / "features.h5", **{key: "other"})
    with pytest.raises(DuplexError, match=f"another {spoken} .*`duplex extract --dataset shoes` makes it again"):
        open_features(path, IDENTITY)


def test_library_versions_are_recorded_but_may_differ(tmp_path: Path) -> None:
    path = finished(tmp_path / "features.h5", torch="1")
    assert open_features(path, IDENTITY).identity["torch"] == "1"


def test_rows_without_a_mark_do_not_count(tmp_path: Path) -> None:
    cache = PartialCache.create(tmp_path / "f.h5", IDENTITY, Span(0, 4, 4), 3)
    cache.write(0, np.full(2, ENCODED, np.uint8), cls=np.ones((2, 3), np.float16))
    cache.close()  # as if killed before the commit
    cache = PartialCache(tmp_path / "f.h5")
    assert (cache.marks == PENDING).all() and cache.done == 0
    cache.finish()
    with pytest.raises(DuplexError, match="4 rows that were never encoded"):
        open_features(tmp_path / "f.h5")


@settings(max_examples=20, deadline=None)
@given(st.permutations(list(range(7))), st.lists(st.integers(0, len(REASONS)), min_size=20, max_size=20))
def test_rows_come_back_whatever_the_order_of_writing(tmp_path_factory, order: list[int], kinds: list[int]) -> None:
    path = tmp_path_factory.mktemp("store") / "f.h5"
    values = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float16)
    marks = np.array([ENCODED + kind for kind in kinds], np.uint8)
    cache = PartialCache.create(path, IDENTITY, Span(0, 20, 20), 3)
    for block in order:
        rows = slice(block * 3, min(block * 3 + 3, 20))
        cache.write(rows.start, marks[rows], cls=values[rows])
    cache.finish()
    found = open_features(path)
    assert np.array_equal(found.cls, values.astype(np.float32)) and np.array_equal(found.bad, marks >= FIRST_BAD)
    assert found.reasons == [REASONS[kind - 1] for kind in kinds if kind]


def test_what_is_no_cache_is_said(tmp_path: Path) -> None:
    import h5py

    with pytest.raises(DuplexError, match="does not exist"):
        open_features(tmp_path / "absent.h5")
    PartialCache.create(tmp_path / "begun.h5", IDENTITY, Span(0, 4, 4), 3).close()
    with pytest.raises(DuplexError, match="an unfinished one lies beside it"):
        open_features(tmp_path / "begun.h5")
    (tmp_path / "text.h5").write_text("features")
    with pytest.raises(DuplexError, match="not an HDF5 file"):
        open_features(tmp_path / "text.h5")
    h5py.File(tmp_path / "other.h5", "w").close()
    with pytest.raises(DuplexError, match="not a feature cache"):
        open_features(tmp_path / "other.h5")


def test_a_limited_cache_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    path = finished(tmp_path / "shoes" / "features.h5", limit="4")
    with pytest.raises(DuplexError, match="holds only the first 4 rows; `duplex extract --dataset shoes`"):
        open_features(path, IDENTITY)
    assert open_features(path, {**IDENTITY, "limit": "4"}).identity["limit"] == "4"
    assert open_features(path).span.rows == 4  # who expects nothing is told by the identity


def test_rows_reach_the_disk_before_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut between the two leaves a row without a mark, never a mark without its row."""
    from duplex.features import store

    happened: list[str] = []
    cache = PartialCache.create(tmp_path / "f.h5", IDENTITY, Span(0, 4, 4), 3)
    marks_at = cache._offset["mark"]
    pwrite, fsync = store.os.pwrite, store.os.fsync

    def noted(descriptor: int, data: bytes, offset: int) -> int:
        happened.append("marks" if offset >= marks_at else "rows")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(store.os, "pwrite", noted)
    monkeypatch.setattr(store.os, "fsync", lambda descriptor: (happened.append("disk"), fsync(descriptor))[1])
    assert marks_at > cache._offset["cls"]
    cache.write(0, np.full(2, ENCODED, np.uint8), cls=np.ones((2, 3), np.float16))
    cache.commit()
    assert happened == ["rows", "disk", "marks"]
    cache.write(2, np.full(2, ENCODED, np.uint8), cls=np.ones((2, 3), np.float16))
    cache.finish()
    assert happened == ["rows", "disk", "marks", "rows", "disk", "marks", "disk"]


def test_a_large_cache_begins_as_holes(tmp_path: Path) -> None:
    """Space is laid out before the first row: the unfinished file of a real data set is sparse, and opens again."""
    rows = 2**26 // (3 * 2) + 1_000_000
    PartialCache.create(tmp_path / "f.h5", IDENTITY, Span(0, rows, rows), 3).close()
    again = PartialCache(tmp_path / "f.h5")
    assert (again.done, again.span.rows) == (0, rows)
    again.close()
