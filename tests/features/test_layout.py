"""What a cache's file must be, and what each way of being something else is called."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from duplex.errors import DuplexError
from duplex.features import layout
from duplex.features.layout import (
    ENCODED,
    REASONS,
    Span,
    check_values,
    mark_of,
    open_file,
    read_identity,
    reason,
    refuse_foreign,
)
from duplex.features.shards import copy_rows, join_shards, shapes_of, shard_path
from duplex.features.store import PartialCache, open_features
from duplex.system.hdf5 import Unfit
from tests.features import damage

ROWS, WIDE = 12, 128
IDENTITY = {"encoder": "e", "manifest": "m", "dim": str(WIDE)}
Change = Callable[[h5py.File], None]


def write(path: Path, span: Span = Span(0, ROWS, ROWS)) -> Path:
    cache = PartialCache.create(path, IDENTITY, span, WIDE)
    values = np.random.default_rng(0).normal(size=(span.rows, WIDE)).astype(np.float16)
    cache.write(0, np.full(span.rows, ENCODED, np.uint8), cls=values)
    cache.finish()
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write(tmp_path / "pics" / "features.h5")


SAID = {
    damage.unknown_mark: "the mark 200 has no meaning",
    damage.first_unknown_mark: f"the mark {2 + len(REASONS)} has no meaning",
    damage.narrow: "its rows are 7 wide, its identity says 128",
    damage.wide_type: "'cls' is (12, 128) of float32, which does not fit its 12 rows",
    damage.short: "'mark' is (5,) of uint8, which does not fit its 12 rows",
    damage.deep_rows: "'cls' is (12, 128, 1) of float16, which does not fit its 12 rows",
    damage.no_marks: "there is no 'mark'",
    damage.group_for_features: "'cls' is a folder or empty",
    damage.no_identity: "there is no group 'identity'",
    damage.numeric_identity: "the identity's 'dim' is not a text",
    damage.no_rows: "its start, stop or total is no whole number",
    damage.backward: "its rows are 99 to 12 of 12",
    damage.no_row_at_all: "its rows are 12 to 12 of 12",
    damage.below_nothing: "its rows are -1 to 12 of 12",
    damage.text_rows: "its start, stop or total is no whole number",
    damage.soft_link: "it holds 'elsewhere', which no cache has",
    damage.external_link: "'cls' is a link to something else",
    damage.raw_storage: "'cls' lies in other files",
    damage.view_of_nothing: "it is partly a view of other files",
    damage.view_of_itself: "'cls' lies in other files",
    damage.view_from_outside: "'cls' is a view of '../../whole.h5', which no shard is called",
    damage.unwritten: "'cls' declares 3,072 bytes, of which 0 were ever written",
    damage.in_pieces: "'cls' is stored in pieces",
    damage.enormous: "'cls' declares",
    damage.extra: "it holds 'more', which no cache has",
}


@pytest.mark.parametrize(("change", "says"), SAID.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_a_finished_file_that_is_something_else_is_damaged(cache: Path, change: Change, says: str) -> None:
    with h5py.File(cache, "r+") as file:
        change(file)
    with pytest.raises(DuplexError) as refused:
        open_features(cache)
    assert str(refused.value).startswith(f"{cache} is damaged: {says}"), str(refused.value)
    assert str(refused.value).endswith("; `duplex extract --dataset pics` makes it again")


VIEWS = (damage.view_of_nothing, damage.view_of_itself, damage.view_from_outside)


@pytest.mark.parametrize("change", SAID, ids=lambda one: one.__name__)
def test_an_unfinished_file_that_is_something_else_is_unfit(cache: Path, change: Change) -> None:
    cache.rename(layout.partial_path(cache))
    with h5py.File(layout.partial_path(cache), "r+") as file:
        change(file)
    says = "'cls' lies in other files" if change in VIEWS else SAID[change]  # not even of shards
    with pytest.raises(Unfit) as refused:
        PartialCache(cache)
    assert str(refused.value).startswith(says)


def test_another_format_is_no_cache_of_ours(cache: Path) -> None:
    with h5py.File(cache, "r+") as file:
        file.attrs["format"] = np.bytes_(b"duplex-features-0")
    with pytest.raises(DuplexError, match="is not a feature cache of duplex; "):
        open_features(cache)
    cache.rename(layout.partial_path(cache))
    with pytest.raises(Unfit, match="it is not a feature cache of duplex"):
        PartialCache(cache)


def test_a_name_that_is_no_text_is_no_part_of_an_identity(cache: Path) -> None:
    with h5py.File(cache, "r+") as file:
        group, kind = file["identity"].id, h5py.h5t.C_S1.copy()
        kind.set_size(3)
        made = h5py.h5a.create(group, b"\xff\xfe", kind, h5py.h5s.create(h5py.h5s.SCALAR))
        made.write(np.array(b"abc", dtype="S3"))
    with pytest.raises(DuplexError, match=r"is damaged: the identity's .* is not a text"):
        open_features(cache)


def test_holes_behind_a_sound_beginning_are_not_read(cache: Path) -> None:
    os.truncate(cache, 100 << 30)
    with pytest.raises(DuplexError, match="of which the disk holds"):
        open_features(cache)


@pytest.mark.parametrize("row", [0, 3, 4, ROWS - 1])
def test_the_row_that_holds_no_number_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """However many rows are read at a time; what a bad row holds does not matter."""
    monkeypatch.setattr(layout, "ROWS", 4)
    with h5py.File(cache, "r+") as file:
        file["mark"][1], file["cls"][1] = mark_of("missing"), np.nan
        check_values(file, cache)
        file["cls"][row, WIDE - 1] = np.inf
        with pytest.raises(DuplexError, match=rf"is damaged: row {row} holds what is not a number; `duplex extract"):
            check_values(file, cache)


def test_marks_are_those_that_the_format_names() -> None:
    assert (layout.PENDING, layout.ENCODED, layout.FIRST_BAD) == (0, 1, 2)
    assert [mark_of(why) for why in REASONS] == list(range(2, 2 + len(REASONS)))
    assert [reason(mark_of(why)) for why in REASONS] == list(REASONS)


def test_a_span_is_whole_from_its_first_row_to_its_last() -> None:
    wholes = {(start, stop): Span(start, stop, 3).whole for start in range(3) for stop in range(start + 1, 4)}
    assert [ends for ends, whole in wholes.items() if whole] == [(0, 3)]
    assert Span(1, 3, 9).rows == 2


def test_what_is_missing_is_said_with_what_lies_beside_it(tmp_path: Path) -> None:
    with pytest.raises(DuplexError, match=r"features\.h5 does not exist; "):
        open_features(tmp_path / "features.h5")
    layout.partial_path(tmp_path / "features.h5").touch()
    with pytest.raises(DuplexError, match=r"features\.h5 does not exist \(an unfinished one lies beside it\); "):
        open_features(tmp_path / "features.h5")


def test_nothing_stays_open(cache: Path) -> None:
    with open_file(cache) as sound:
        assert sound
    assert not sound  # as h5py says that a file is closed
    with pytest.raises(DuplexError), open_file(cache) as other:
        raise RuntimeError
    assert not other


FAILURES = [(OSError("read\n  failed"), "read failed"), (RuntimeError(), "RuntimeError")]


@pytest.mark.parametrize(("error", "says"), FAILURES)
def test_what_fails_while_it_is_read_is_damage_in_one_line(cache: Path, error: Exception, says: str) -> None:
    with pytest.raises(DuplexError, match=rf"features\.h5 is damaged: {says}; `duplex"), open_file(cache):
        raise error


FOREIGN = {
    "text": b"features",
    "other HDF5": layout.SIGNATURE + bytes(99),
    "ours too late": layout.SIGNATURE + bytes(layout.HEAD) + layout.FORMAT.encode(),
    "ours in a text": b"this is about " + layout.FORMAT.encode(),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_somebodys_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.h5").write_bytes(content)
    with pytest.raises(DuplexError, match=r"f\.h5 exists and is not a feature cache, so it is left alone"):
        refuse_foreign(tmp_path / "f.h5")
    assert layout.HEAD == 65_536  # bytes, as the message of a cache's first page goes


def test_somebodys_folder_link_or_unfinished_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "link"):
        with pytest.raises(DuplexError, match=rf"{name} exists and is not a feature cache"):
            refuse_foreign(tmp_path / name)
    (tmp_path / "f.h5.partial").write_text("a letter")
    with pytest.raises(DuplexError, match=r"f\.h5\.partial exists and is not a feature cache"):
        refuse_foreign(tmp_path / "f.h5")


def test_what_is_ours_is_not_somebodys_however_damaged(cache: Path) -> None:
    def refused() -> bool:
        try:
            refuse_foreign(cache)
        except DuplexError:
            return True
        return False

    assert not refused()
    for head in (b"\x89HDF\r\n\x1a\n", b"\x89HDF broken"):
        cache.write_bytes(head + bytes(9) + layout.FORMAT.encode())
        layout.partial_path(cache).write_bytes(head)
        assert not refused()
        assert layout.partial_path(cache).read_bytes() == head, "it is looked at, not changed"
    cache.unlink()
    layout.partial_path(cache).unlink()
    assert not refused()


def joined(folder: Path) -> Path:
    for k in range(2):
        write(shard_path(folder / "f.h5", k, 2), Span(6 * k, 6 * k + 6, ROWS))
    join_shards(folder / "f.h5")
    return folder / "f.h5"


def test_a_view_of_a_view_is_neither_made_nor_read(tmp_path: Path) -> None:
    inner, outer = joined(tmp_path), tmp_path / "whole.h5"
    shard = shard_path(outer, 0, 1)
    shutil.copy(inner, shard)
    told = pytest.raises(DuplexError, match=r"whole\.shard-0-of-1\.h5 is damaged: 'cls' lies in other files")
    with told:
        join_shards(outer)
    assert not outer.exists()
    with open_file(inner) as file:
        copy_rows(shard, [inner], [Span(0, ROWS, ROWS)], read_identity(file), shapes_of(file))
    join_shards(outer)
    shutil.copy(inner, shard)
    with told:
        open_features(outer)


def test_a_view_names_the_same_part_of_its_shards(tmp_path: Path) -> None:
    path = joined(tmp_path)
    assert open_features(path).cls.shape == (ROWS, WIDE)
    for source, part in (("f.shard-0-of-2.h5", "other"), (".", "cls")):
        view = h5py.VirtualLayout((ROWS, WIDE), np.float16)
        view[...] = h5py.VirtualSource(source, part, (ROWS, WIDE), np.float16)
        with h5py.File(path, "r+") as file:
            del file["cls"]
            file.create_virtual_dataset("cls", view)
        with pytest.raises(DuplexError, match=rf"is damaged: 'cls' is a view of '{re.escape(source)}', which no shard"):
            open_features(path)


def test_a_shard_of_other_rows_or_of_another_identity_is_told(tmp_path: Path) -> None:
    path = joined(tmp_path)
    write(shard_path(path, 0, 2), Span(1, 7, ROWS))
    with pytest.raises(DuplexError, match=r"0-of-2\.h5, which was made again with another set of rows since"):
        open_features(path)
    write(shard_path(path, 0, 2), Span(0, 7, ROWS))
    with pytest.raises(DuplexError, match=r"0-of-2\.h5, which was made again with another set of rows since"):
        open_features(path)
