import errno
import os
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import DuplexError
from duplex.features import file
from duplex.features.file import ENCODED, FIRST_BAD, PENDING, REASONS, PartialCache, Span, read_features

IDENTITY = {"encoder": "e", "weights": "w", "precision": "fp32", "preprocessing": "p", "manifest": "m", "dim": "3"}


def write_cache(
    path: Path,
    cls: np.ndarray,
    statuses: np.ndarray | None = None,
    span: Span | None = None,
    identity: dict[str, str] | None = None,
    **tokens: np.ndarray,
) -> Path:
    """Write some rows as a finished cache; without `statuses` all are encoded."""
    (rows, dim), shapes = cls.shape, {name: values.shape[1:] for name, values in tokens.items()}
    record = {**IDENTITY, "dim": str(dim), **(identity or {})}
    cache = PartialCache.create(path, record, span or Span(0, rows, rows), dim, shapes)
    marks = np.full(rows, ENCODED) if statuses is None else statuses
    cache.write(0, marks.astype(np.uint8), cls=cls, **tokens)
    cache.finish()
    return path


def finished(path: Path, **changes: str) -> Path:
    return write_cache(path, np.arange(12).reshape(4, 3), identity=changes)


def test_rows_without_a_status_do_not_count(tmp_path: Path) -> None:
    cache = PartialCache.create(tmp_path / "f.h5", IDENTITY, Span(0, 4, 4), 3)
    cache.write(0, np.full(2, ENCODED, np.uint8), cls=np.ones((2, 3), np.float16))
    with pytest.raises(DuplexError, match=r"returned 'cls' of shape \(1, 4\), not \(1, 3\)"):
        cache.write(2, np.full(1, ENCODED, np.uint8), cls=np.ones((1, 4), np.float16))
    cache.close()  # as if killed before the commit
    cache = PartialCache(tmp_path / "f.h5")
    assert (cache.statuses == PENDING).all() and cache.done == 0
    cache.finish()
    with pytest.raises(DuplexError, match=r"rows that were never encoded \(4\)"):
        read_features(tmp_path / "f.h5")


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
    found = read_features(path)
    assert np.array_equal(found.cls, values.astype(np.float32)) and np.array_equal(found.bad, marks >= FIRST_BAD)
    assert np.array_equal(found.statuses, marks)


def test_each_reason_why_a_file_is_no_cache_is_named(tmp_path: Path) -> None:
    PartialCache.create(tmp_path / "begun.h5", IDENTITY, Span(0, 4, 4), 3).close()
    with pytest.raises(DuplexError, match=r"begun\.h5 is not finished; .* finishes it"):
        read_features(tmp_path / "begun.h5")
    h5py.File(tmp_path / "other.h5", "w").close()
    with pytest.raises(DuplexError, match="not a feature cache"):
        read_features(tmp_path / "other.h5")


def test_rows_reach_the_disk_before_their_statuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut between the two leaves a row without a status, never a status without its row."""
    happened: list[str] = []
    cache = PartialCache.create(tmp_path / "f.h5", IDENTITY, Span(0, 4, 4), 3)
    statuses = range(cache._offset["status"], cache._offset["status"] + 4)
    pwrite, fsync = file.os.pwrite, file.os.fsync

    def noted(descriptor: int, data: bytes, offset: int) -> int:
        happened.append("marks" if offset in statuses else "rows")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(file.os, "pwrite", noted)
    monkeypatch.setattr(file.os, "fsync", lambda descriptor: (happened.append("disk"), fsync(descriptor))[1])
    cache.write(0, np.full(2, ENCODED, np.uint8), cls=np.ones((2, 3), np.float16))
    cache.commit()
    assert happened == [*["rows"] * 3, "disk", "marks"] and cache.done == 2  # values, their checksums, contents
    cache.commit()  # nothing waits
    assert happened == [*["rows"] * 3, "disk", "marks"]
    cache.write(2, np.full(2, ENCODED, np.uint8), cls=np.ones((2, 3), np.float16))
    cache.finish()
    assert happened == [*[*["rows"] * 3, "disk", "marks"] * 2, "disk"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(file.os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:5], offset))
    assert np.array_equal(read_features(finished(tmp_path / "f.h5")).cls, np.arange(12).reshape(4, 3))


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS])
def test_a_write_error_is_reported_with_its_cause(tmp_path: Path, monkeypatch, call: str, code: int) -> None:
    cache = PartialCache.create(tmp_path / "f.h5", IDENTITY, Span(0, 4, 4), 3)
    cache.write(0, np.full(3, ENCODED, np.uint8), cls=np.ones((3, 3), np.float16))
    cache.commit()

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(file.os, call, refuse)
    full = code not in (errno.EIO, errno.EROFS)
    goes_on = f"{'make room and ' if full else ''}run the same command again to continue"
    with pytest.raises(DuplexError) as refused:
        cache.write(3, np.full(1, ENCODED, np.uint8), cls=np.ones((1, 3), np.float16))
        cache.finish()
    place = tmp_path / "f.h5.partial"
    assert (
        str(refused.value)
        == f"{place} could not be written: {os.strerror(code)}; its 3 finished rows are kept: {goes_on}"
    )


def test_the_bytes_do_not_depend_on_the_time(tmp_path: Path) -> None:
    first = finished(tmp_path / "f.h5").read_bytes()
    time.sleep(1.1)  # HDF5 counts whole seconds
    assert finished(tmp_path / "g.h5").read_bytes() == first


def opened_in(folder: Path) -> list[str]:
    found = (os.path.realpath(one.path) for one in os.scandir("/proc/self/fd"))
    return sorted(Path(path).name for path in found if path.startswith(str(folder)))


@pytest.mark.parametrize("span", [Span(0, 2, 4), Span(2, 4, 4), Span(1, 3, 4)])
def test_a_shard_is_refused_as_a_whole_cache(tmp_path: Path, span: Span) -> None:
    write_cache(tmp_path / "f.h5", np.ones((2, 3)), span=span)
    with pytest.raises(DuplexError, match="is a shard with 2 of 4 rows; join all shards with `duplex cache join`"):
        read_features(tmp_path / "f.h5")
