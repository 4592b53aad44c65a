"""Layout checks: each kind of damage is named, and foreign files are never overwritten."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from duplex.errors import DuplexError
from duplex.features import checks, checksums, layout
from duplex.features.checks import check_values, open_cache, read_identity, refuse_foreign
from duplex.features.layout import FIRST_BAD, REASONS, Span, status_of_reason, status_reason
from duplex.features.shards import copy_rows, join_shards, row_types, shard_path
from duplex.features.store import PartialCache, open_features
from duplex.system.hdf5 import InvalidHDF5
from tests.features.damage import ELSEWHERE, LAYOUT, update_checksums
from tests.features.test_store import write_cache, write_joined

ROWS, WIDE = 12, 128
VALUES = np.random.default_rng(0).normal(size=(ROWS, WIDE))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "pics" / "features.h5", VALUES)


@pytest.mark.parametrize("damage", LAYOUT)
def test_each_damage_of_a_finished_or_unfinished_cache_is_named(cache: Path, damage: str) -> None:
    change, message = LAYOUT[damage]
    with h5py.File(cache, "r+") as file:
        change(file)
    with pytest.raises(DuplexError) as refused:
        open_features(cache)
    assert str(refused.value).startswith(f"{cache} is damaged: {message}"), str(refused.value)
    assert str(refused.value).endswith("; `duplex extract --dataset pics` makes it again")
    cache.rename(layout.partial_path(cache))
    with pytest.raises(InvalidHDF5) as unfinished:
        PartialCache(cache)
    assert str(unfinished.value).startswith(ELSEWHERE if "view" in damage else message)  # which is no view


def test_a_cache_of_another_version_is_refused_with_the_command_to_run(cache: Path) -> None:
    with h5py.File(cache, "r+") as file:
        file.attrs["format"] = np.bytes_(b"duplex-features-0")
    with pytest.raises(DuplexError, match=r"has the format duplex-features-0 of another version, .*; `duplex extract"):
        open_features(cache)
    refuse_foreign(cache)  # it may be written over
    cache.rename(layout.partial_path(cache))
    with pytest.raises(InvalidHDF5, match="it is not a feature cache of this version"):
        PartialCache(cache)


def test_an_identity_key_that_is_not_text_is_damage(cache: Path) -> None:
    with h5py.File(cache, "r+") as file:
        group, kind = file["identity"].id, h5py.h5t.C_S1.copy()
        kind.set_size(3)
        made = h5py.h5a.create(group, b"\xff\xfe", kind, h5py.h5s.create(h5py.h5s.SCALAR))
        made.write(np.array(b"abc", dtype="S3"))
    with pytest.raises(DuplexError, match=r"is damaged: the attribute .* is not text"):
        open_features(cache)


@pytest.mark.parametrize("row", [0, 3, 4, ROWS - 1])
def test_a_row_that_is_not_finite_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """For any number of rows read at a time; the values of a bad row do not matter."""
    monkeypatch.setattr(checksums, "BLOCK", 4 * WIDE * 2)
    with h5py.File(cache, "r+") as file:
        file["status"][1], file["cls"][1] = status_of_reason("missing"), np.nan
        update_checksums(file)
        check_values(file, cache)
        file["cls"][row, WIDE - 1] = np.inf
        update_checksums(file)
        with pytest.raises(DuplexError, match=rf"is damaged: row {row} is not finite; `duplex extract"):
            check_values(file, cache)


def test_no_file_stays_open(cache: Path) -> None:
    with open_cache(cache) as sound:
        assert sound
    assert not sound  # h5py's way to say that a file is closed
    with pytest.raises(DuplexError), open_cache(cache) as other:
        raise RuntimeError
    assert not other


@pytest.mark.parametrize(
    ("error", "says"), [(OSError("read\n  failed"), "read failed"), (RuntimeError(), "RuntimeError")]
)
def test_an_error_while_reading_is_reported_as_damage(cache: Path, error: Exception, says: str) -> None:
    with pytest.raises(DuplexError, match=rf"features\.h5 is damaged: {says}; `duplex"), open_cache(cache):
        raise error


FOREIGN = {
    "text": b"features",
    "other HDF5": checks.HDF5_SIGNATURE + bytes(99),
    "ours too late": checks.HDF5_SIGNATURE + bytes(checks.HEAD) + layout.FORMAT.encode(),
    "ours in a text": b"this is about " + layout.FORMAT.encode(),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_not_overwritten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.h5").write_bytes(content)
    with pytest.raises(DuplexError, match=r"f\.h5 exists and is not a feature cache, so it is not overwritten"):
        refuse_foreign(tmp_path / "f.h5")


def test_a_foreign_folder_link_or_unfinished_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "f.h5.partial").write_text("a letter")
    reasons = {
        "folder": "folder is a folder, not a file that can be replaced",
        "link": "link exists and is not a feature cache",
        "f.h5": "f.h5.partial exists and is not a feature cache",
    }
    for name, reason in reasons.items():
        with pytest.raises(DuplexError, match=reason):
            refuse_foreign(tmp_path / name)


def test_a_damaged_or_missing_cache_may_be_overwritten(cache: Path) -> None:
    refuse_foreign(cache)
    for head in (b"\x89HDF\r\n\x1a\n", b"\x89HDF broken"):
        cache.write_bytes(head + bytes(9) + layout.FORMAT.encode())
        layout.partial_path(cache).write_bytes(head)
        refuse_foreign(cache)
        assert layout.partial_path(cache).read_bytes() == head, "it is looked at, not changed"
    cache.unlink()
    layout.partial_path(cache).unlink()
    refuse_foreign(cache)


def test_a_view_of_a_view_is_neither_written_nor_read(tmp_path: Path) -> None:
    inner, outer = write_joined(tmp_path / "f.h5", VALUES, 6), tmp_path / "whole.h5"
    shard = shard_path(outer, 0, 1)
    shutil.copy(inner, shard)
    told = pytest.raises(DuplexError, match=r"whole\.shard-0-of-1\.h5 is damaged: 'cls' lies in other files")
    with told:
        join_shards(outer)
    assert not outer.exists()
    with open_cache(inner) as file:
        copy_rows(shard, [inner], [Span(0, ROWS, ROWS)], read_identity(file), row_types(file))
    join_shards(outer)
    shutil.copy(inner, shard)
    with told:
        open_features(outer)


def test_a_view_of_other_data_sets_is_damage(tmp_path: Path) -> None:
    path = write_joined(tmp_path / "f.h5", VALUES, 6)
    assert open_features(path).cls.shape == (ROWS, WIDE)
    for source, part in (("f.shard-0-of-2.h5", "other"), (".", "cls")):
        view = h5py.VirtualLayout((ROWS, WIDE), np.float16)
        view[...] = h5py.VirtualSource(source, part, (ROWS, WIDE), np.float16)
        with h5py.File(path, "r+") as file:
            del file["cls"]
            file.create_virtual_dataset("cls", view)
        with pytest.raises(
            DuplexError,
            match=rf"is damaged: 'cls' is a view of '{re.escape(source)}', which is not the name of a shard",
        ):
            open_features(path)


def test_a_shard_of_other_rows_is_reported(tmp_path: Path) -> None:
    path = write_joined(tmp_path / "f.h5", VALUES, 6)
    for start in (1, 0):
        write_cache(shard_path(path, 0, 2), VALUES[start:7], span=Span(start, 7, ROWS))
        with pytest.raises(DuplexError, match=r"0-of-2\.h5, which was extracted again with another set of rows"):
            open_features(path)


def test_every_reason_has_a_status_of_its_own() -> None:
    statuses = [status_of_reason(reason) for reason in REASONS]
    assert statuses == list(range(FIRST_BAD, FIRST_BAD + len(REASONS)))
    assert [status_reason(status) for status in statuses] == list(REASONS)


@pytest.mark.parametrize(("span", "whole"), [((0, 8, 8), True), ((0, 4, 8), False), ((4, 8, 8), False)])
def test_a_span_is_whole_if_it_begins_and_ends_with_all_rows(span: tuple[int, int, int], whole: bool) -> None:
    assert Span(*span).whole is whole
