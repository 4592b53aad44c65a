"""A cache that keeps what enters the last blocks of some rows alone, and where the others' comes from."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duplex.errors import DuplexError, UsageError
from duplex.features import extraction as extraction_module
from duplex.features.encoding import Kept
from duplex.features.inspection import inspect, verify
from duplex.features.layout import DEEP, kept_rows, open_file
from duplex.features.remade import Remade, Source
from duplex.features.shards import join_shards
from duplex.features.store import open_features
from duplex.features.tokens import Some, Streamed, read_tokens
from tests.features.test_deep import _third

HELD = np.arange(40) % 3 != 1
HELD[8:16] = False  # a whole block of which nothing is kept
ROWS, OTHERS = np.flatnonzero(HELD), np.flatnonzero(~HELD)


@pytest.fixture
def some(run):
    """As `run`, at depth 1, with tokens of some rows."""
    return partial(run, depth=1, deep_rows=HELD)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_kept_rows_are_counted_one_by_one(held: list[bool], start: int, stop: int) -> None:
    start, stop = min(start, stop), max(start, stop)
    kept = np.array(held)
    before = sum(held[:start])
    expected = slice(before, before + sum(held[start:stop]))
    assert all(kept_rows(name, slice(start, stop), kept) == expected for name in DEEP)
    assert (
        kept_rows("cls", slice(start, stop), kept) == slice(start, stop) == kept_rows("deep", slice(start, stop), None)
    )


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("limit", [2**31, 0])
def test_what_is_kept_is_what_a_whole_cache_keeps(run, some, tmp_path: Path, bits: int, limit: int) -> None:
    whole, part = run(tmp_path / "whole.h5", depth=1, bits=bits).path, some(bits=bits).path
    assert np.array_equal(open_features(whole).cls, open_features(part).cls)
    every, found = read_tokens(whole, "deep"), read_tokens(part, "deep", limit)
    assert isinstance(found, Some) and isinstance(every, np.ndarray) and found.row == every.shape[1:]
    wanted = np.array([ROWS[-1], ROWS[0], ROWS[5], ROWS[5]])
    got = found.at(wanted)
    assert isinstance(got, Streamed if limit == 0 else torch.Tensor)
    assert torch.equal(got[:], torch.from_numpy(every[wanted]))
    row = 5 * 32 * 2 if bits == 16 else 5 * 32 + 5 * 2
    assert whole.stat().st_size - part.stat().st_size == pytest.approx(len(OTHERS) * row - 40, abs=4096)
    assert inspect(part)["deep_rows"] == len(ROWS) and "deep_rows" not in inspect(whole)


def test_rows_that_are_not_kept_say_what_to_do(some) -> None:
    found = read_tokens(some().path, "deep")
    with pytest.raises(
        UsageError, match=r"features\.h5 keeps nothing of what enters the last blocks of some .*deep_test"
    ):
        found.at(OTHERS[:1])
    with pytest.raises(UsageError, match="keeps nothing"):
        found.at(np.array([ROWS[0], OTHERS[0]]))


def test_an_interrupted_one_is_resumed_to_the_same_bytes(some, tmp_path: Path, monkeypatch) -> None:
    whole = some(tmp_path / "whole.h5").path
    monkeypatch.setattr(extraction_module, "stop_requests", _third)
    with pytest.raises(DuplexError, match=r"stopped with 24 of 40 rows"):
        some()
    monkeypatch.undo()
    assert some().resumed == 24
    assert (tmp_path / "features.h5").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("bits", [16, 8])
def test_shards_join_and_one_may_keep_none(some, tmp_path: Path, copy: bool, bits: int) -> None:
    whole = some(tmp_path / "whole.h5", bits=bits).path
    for k in range(5):  # of which the second has the block of which nothing is kept
        some(tmp_path / "parts.h5", shard=(k, 5), bits=bits)
    join_shards(tmp_path / "parts.h5", copy=copy)
    assert not copy or (tmp_path / "parts.h5").read_bytes() == whole.read_bytes()
    expected: Any = read_tokens(whole, "deep").at(ROWS)
    for limit in (2**31, 0):
        found = read_tokens(tmp_path / "parts.h5", "deep", limit)
        assert isinstance(found, Some) and torch.equal(found.at(ROWS)[:], expected)


def test_a_shard_that_is_away_is_named_before_its_rows_are_counted(some, tmp_path: Path) -> None:
    for k in range(2):
        some(tmp_path / "parts.h5", shard=(k, 2))
    join_shards(tmp_path / "parts.h5")
    (tmp_path / "parts.shard-1-of-2.h5").unlink()
    with pytest.raises(DuplexError, match=r"joins parts\.shard-1-of-2\.h5, which is not beside it"):
        read_tokens(tmp_path / "parts.h5", "deep")


def test_another_choice_is_made_afresh_and_without_a_depth_there_is_none(run, some, tmp_path: Path, capsys) -> None:
    some()
    assert some().resumed == 40
    assert run(depth=1).resumed == 0
    assert "another choice of deep rows; extracting afresh" in capsys.readouterr().err
    assert run(tmp_path / "flat.h5", deep_rows=HELD).path.read_bytes() == run(tmp_path / "plain.h5").path.read_bytes()
    with pytest.raises(UsageError, match="kept of none of 2 pictures; ask for more, or no depth"):
        run(tmp_path / "none.h5", depth=1, deep_rows=np.arange(40) > 1, limit=2)


def test_another_depth_is_told_before_the_rows_that_it_is_kept_of(run, some, capsys) -> None:
    run()
    some()
    assert "another depth; extracting afresh" in capsys.readouterr().err


@pytest.mark.parametrize("copy", [False, True])
def test_patch_tokens_beside_it_are_of_all_rows(run, some, tmp_path: Path, monkeypatch, copy: bool) -> None:
    """In a copy of shards that is made row by row, too."""
    whole = run(tmp_path / "whole.h5", tokens="patch").path
    for k in range(3):
        some(shard=(k, 3), tokens="patch")
    monkeypatch.setattr("duplex.features.shards.CHUNK", 1)
    join_shards(tmp_path / "features.h5", copy=copy)
    patches, expected = read_tokens(tmp_path / "features.h5"), read_tokens(whole)
    assert isinstance(patches, np.ndarray) and isinstance(expected, np.ndarray) and np.array_equal(patches, expected)
    plain: Any = read_tokens(run(tmp_path / "deep.h5", depth=1).path, "deep")
    found: Any = read_tokens(tmp_path / "features.h5", "deep")
    assert torch.equal(found.at(ROWS), torch.from_numpy(plain[ROWS]))


def test_room_is_asked_for_what_is_kept_alone(run, some, tmp_path: Path, monkeypatch) -> None:
    room = some(tmp_path / "first.h5").path.stat().st_size + (1 << 16)
    monkeypatch.setattr("duplex.features.store.shutil.disk_usage", lambda _: SimpleNamespace(free=room))
    assert some().rows == 40
    monkeypatch.setattr("duplex.features.store.shutil.disk_usage", lambda _: SimpleNamespace(free=3 * room // 4))
    with pytest.raises(DuplexError, match="make room"):
        some(tmp_path / "second.h5")


def test_a_sample_is_encoded_again_where_it_is_kept(some, encoder, images, tmp_path: Path) -> None:
    path = some().path
    asked = path, encoder, images, tmp_path / "pictures", "m" * 64
    found = verify(*asked, sample=40)
    assert found["worst_cosine"] > 0.9999 and 0 < found["deep_error"] < 0.001
    with h5py.File(path, "r+") as file:
        file["deep"][4] = file["deep"][5]
    with pytest.raises(DuplexError, match=rf"row {ROWS[4]} is not {images[ROWS[4]]}"):
        verify(*asked, sample=40)


def said_two(file: h5py.File) -> None:
    file["held"][0] = 2


def said_more(file: h5py.File) -> None:
    file["held"][1] = 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (said_two, "'held' does not say of which rows anything is kept"),
        (lambda file: file.pop("deep"), "'held' does not say of which rows anything is kept"),
        (said_more, rf"'deep' is of {len(ROWS)} rows, 'held' says {len(ROWS) + 1}"),
        (
            lambda file: file.pop("held"),
            rf"'deep' is \({len(ROWS)}, 5, 32\) of float16, which does not fit its 40 rows",
        ),
    ],
)
def test_rows_that_do_not_belong_together_are_told_of(some, damage, says: str) -> None:
    path = some().path
    with h5py.File(path, "r+") as file:
        damage(file)
    with pytest.raises(DuplexError, match=says), open_file(path):
        pass


@pytest.fixture
def remade(run, images, encoder, tmp_path: Path):
    """All rows, and how often the encoder was loaded."""
    loaded, cls = [], open_features(run(tmp_path / "plain.h5").path).cls

    def load():
        loaded.append(1)
        return encoder

    def call(bits: int = 16) -> Remade:
        kept = Kept(depth=1, bits=bits)
        source = Source(images, tmp_path / "pictures", cls, kept, 8, load)
        return Remade(source, np.arange(40), (5, 32))

    return call, loaded


@pytest.mark.parametrize("bits", [16, 8])
def test_what_is_made_again_is_what_a_cache_would_keep(run, remade, bits: int) -> None:
    every = torch.from_numpy(read_tokens(run(depth=1, bits=bits).path, "deep"))
    make, loaded = remade
    found = make(bits)
    assert found.shape == every.shape and len(found) == 40 and loaded == []
    rows = torch.tensor([39, 0, 7, 7, *range(10, 22)])
    assert torch.equal(found[rows], every[rows])
    own = found.at(np.arange(1, 40, 2)).to(torch.device("cpu"))
    assert own.shape == (20, 5, 32) and torch.equal(own[3:9], every[1::2][3:9])
    assert found[:0].shape == (0, 5, 32)
    assert loaded == [1], "once, however often it is asked"


def test_a_picture_that_has_gone_since_is_named(remade, tmp_path: Path, images) -> None:
    make, _ = remade
    (tmp_path / "pictures" / images[9]).unlink()
    assert make()[:9].shape == (9, 5, 32)
    with pytest.raises(DuplexError, match=rf"{images[9]} was encoded once and cannot be read now \(missing\)"):
        make()[:]


def test_another_picture_in_its_place_is_refused(remade, tmp_path: Path, images) -> None:
    """Its answer would count for the one that was encoded, and `--fresh` alone makes a finished cache again."""
    make, _ = remade
    shutil.copy(tmp_path / "pictures" / images[30], tmp_path / "pictures" / images[9])
    assert make()[10:].shape == (30, 5, 32)
    says = rf"{images[9]} was .* another picture now \(cosine .*extract --dataset NAME --fresh"
    with pytest.raises(DuplexError, match=says):
        make()[:]


def test_a_device_that_is_too_small_for_a_block_names_the_setting(remade, encoder, monkeypatch) -> None:
    """There is no --batch-size where a run is evaluated, and no row was kept."""
    make, _ = remade

    def full(pixels):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(encoder, "encode_images", full)
    with pytest.raises(DuplexError, match=r"encode 8 pictures at once; set extraction\.batch_size in params\.yaml"):
        make()[:3]
