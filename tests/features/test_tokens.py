"""Tokens that stay on the disk: the same rows as in memory, a shuffled order, and reading ahead."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.features import tokens
from duplex.features.shards import shard_path
from duplex.features.tokens import DiskTokens, read_tokens
from duplex.methods.base import Batch
from duplex.training.epoch import STEPS, prefetch
from tests.features.test_store import opened_in, write_cache, write_joined

ROWS, SHAPE = 40, (5, 4)
TOKENS = np.random.default_rng(0).normal(size=(ROWS, *SHAPE)).astype(np.float16)


CLS = np.ones((ROWS, 3))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "features.h5", CLS, patch=TOKENS)


def test_only_tokens_above_the_limit_stay_on_the_disk(cache):
    assert read_tokens(cache, "block_inputs") is None
    assert isinstance(read_tokens(cache, limit=ROWS * 5 * 4 * 2), np.ndarray)
    assert isinstance(read_tokens(cache, limit=ROWS * 5 * 4 * 2 - 1), DiskTokens)
    np.testing.assert_array_equal(read_tokens(cache), TOKENS)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, ROWS // 2 - 1), max_size=30), st.slices(ROWS // 2))
def test_any_rows_equal_those_in_memory(tmp_path_factory, places, part):
    path = tmp_path_factory.getbasetemp() / "any.h5"
    if not path.exists():
        write_cache(path, CLS, patch=TOKENS)
    own = np.arange(1, ROWS, 2)
    held, streamed = torch.from_numpy(TOKENS[own]), DiskTokens.open(path).at(own)
    assert streamed.shape == held.shape and len(streamed) == len(held)
    assert torch.equal(streamed[torch.tensor(places, dtype=torch.long)], held[torch.tensor(places, dtype=torch.long)])
    if part.step is None or part.step > 0:
        assert torch.equal(streamed[part], held[part])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, ROWS - 1), max_size=30))
def test_any_rows_of_joined_shards_equal_those_in_memory(tmp_path_factory, places):
    path = tmp_path_factory.getbasetemp() / "joined" / "whole.h5"
    if not path.exists():  # more than ten shards: their names do not sort as their rows do
        write_joined(path, CLS, *range(1, 12), 20, patch=TOKENS)
    rows = torch.tensor(places, dtype=torch.long)
    assert torch.equal(DiskTokens.open(path)[rows], torch.from_numpy(TOKENS)[rows])


def test_the_shuffled_order_has_every_row_once_and_follows_the_seed(cache, monkeypatch):
    monkeypatch.setattr(tokens, "BLOCK", 3 * 2 * SHAPE[0] * SHAPE[1])  # three rows
    monkeypatch.setattr(tokens, "WINDOW", 2)
    streamed = DiskTokens.open(cache)
    orders = [streamed.shuffled_rows(torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(ROWS))
    window = orders[0][:6]  # the rows of two blocks of neighbours
    assert len({row // 3 for row in window}) == 2
    assert window != sorted(window) or orders[2][:6] != sorted(orders[2][:6])


def batch_of(tokens_of) -> Batch:
    return Batch({"cls": torch.arange(ROWS).float()[:, None], "patch": tokens_of}, torch.arange(ROWS))


def test_prefetched_steps_have_the_requested_rows(cache):
    held, streamed = batch_of(torch.from_numpy(TOKENS)), batch_of(DiskTokens.open(cache))
    steps = list(streamed.shuffled_rows(torch.Generator().manual_seed(3)).split(7))
    for chosen, (images, own), (apart, theirs) in zip(
        steps, prefetch(streamed, steps), prefetch(held, steps), strict=True
    ):
        assert apart is held and theirs is chosen
        for name in ("cls", "patch"):
            assert torch.equal(images[own].inputs[name], held[chosen].inputs[name])
        assert torch.equal(images[own].compositions, chosen)
        assert len(images) == len(chosen)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, int, int]]:
    """Calls to the system in order: "soon" (announced) or "now" (read), offset and number of bytes."""
    words: list[tuple[str, int, int]] = []
    preadv = os.preadv

    def soon(descriptor: int, place: int, count: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        words.append(("soon", place, count))

    def now(descriptor: int, views: list[memoryview], place: int) -> int:
        words.append(("now", place, views[0].nbytes))
        return preadv(descriptor, views, place)

    monkeypatch.setattr(tokens.os, "posix_fadvise", soon)
    monkeypatch.setattr(tokens.os, "preadv", now)
    return words


def test_rows_of_a_few_steps_are_announced_before_they_are_read(cache, calls):
    pulled = prefetch(batch_of(DiskTokens.open(cache)), torch.arange(ROWS).split(4))
    next(pulled)
    assert [what for what, *_ in calls] == ["soon"] * (1 + STEPS) + ["now"]
    next(pulled)
    assert [what for what, *_ in calls[2 + STEPS :]] == ["soon", "now"]
    steps = [list(pulled), calls][1]
    announced, read = ([word[1:] for word in steps if word[0] == what] for what in ("soon", "now"))
    assert announced == read and len(read) == ROWS // 4
    assert calls[-STEPS - 1 :] == [("now", *where) for where in read[-STEPS - 1 :]]


def test_the_announced_bytes_are_those_read_of_every_shard(tmp_path, calls, monkeypatch):
    streamed = DiskTokens.open(write_joined(tmp_path / "whole.h5", CLS, 7, 20, patch=TOKENS))
    monkeypatch.setattr(tokens, "ANNOUNCED", 100)  # a row of 40 bytes: three neighbours take two words
    rows = torch.tensor([39, 6, 7, 8, 9, 19, 20])
    streamed.read_ahead(rows)
    streamed[rows]
    announced = [(place, place + count) for what, place, count in calls if what == "soon"]
    read = [(place, place + count) for what, place, count in calls if what == "now"]
    assert max(stop - start for start, stop in announced) == 100
    assert [stop - start for start, stop in read] == [40, 120, 40, 40, 40]  # 6 | 7 8 9 | 19 | 20 | 39
    glued = [announced[0], (announced[1][0], announced[2][1]), *announced[3:]]
    assert announced[1][1] == announced[2][0] and glued == read


def refused(*_: object) -> None:
    raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("word", [None, refused])
def test_rows_are_read_without_announcements_if_the_system_accepts_none(cache, monkeypatch, word):
    if word is None:
        monkeypatch.delattr(tokens.os, "posix_fadvise")
    else:
        monkeypatch.setattr(tokens.os, "posix_fadvise", word)
    streamed = DiskTokens.open(cache)
    streamed.read_ahead(torch.tensor([1, 2]))
    assert torch.equal(streamed[torch.tensor([1, 2])], torch.from_numpy(TOKENS)[1:3])


def test_a_read_error_reaches_the_training_loop(cache):
    streamed = DiskTokens.open(cache)
    with cache.open("r+b") as file:
        file.truncate(cache.stat().st_size // 2)
    with pytest.raises(OSError, match="ends within its tokens"):
        list(prefetch(batch_of(streamed), [torch.arange(ROWS)]))


def test_short_reads_are_continued(cache, monkeypatch):
    preadv = tokens.os.preadv
    monkeypatch.setattr(tokens.os, "preadv", lambda descriptor, views, place: preadv(descriptor, [views[0][:7]], place))
    rows = torch.tensor([3, 4, 5, 30])
    assert torch.equal(DiskTokens.open(cache)[rows], torch.from_numpy(TOKENS)[rows])


def test_files_close_with_the_last_object_that_reads_them(cache, tmp_path):
    before = opened_in(tmp_path)
    streamed = DiskTokens.open(cache)
    parts = [streamed.at(np.arange(3)), streamed.to(torch.device("cpu"))]
    assert len(opened_in(tmp_path)) == len(before) + 1
    del streamed
    assert torch.equal(parts[1][torch.tensor([5])][0], torch.from_numpy(TOKENS)[5]), "what was made of it needs it"
    del parts
    assert opened_in(tmp_path) == before


def test_a_shard_that_is_replaced_meanwhile_is_read_as_it_was(tmp_path):
    """A finished cache gets its name by a rename, which leaves the open file as it was."""
    streamed = DiskTokens.open(write_joined(tmp_path / "whole.h5", CLS, 20, patch=TOKENS))
    shard = shard_path(tmp_path / "whole.h5", 1, 2)
    (tmp_path / "other").write_bytes(bytes(shard.stat().st_size))
    os.replace(tmp_path / "other", shard)
    assert torch.equal(streamed[torch.tensor([30])][0], torch.from_numpy(TOKENS)[30])
