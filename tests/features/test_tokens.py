"""Patch tokens that stay on the disk: the same rows as in memory, an order of their own, read ahead of each step."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.features import cache_files, tokens
from duplex.features.layout import ENCODED, Span
from duplex.features.shards import join_shards, shard_path
from duplex.features.store import PartialCache
from duplex.features.tokens import Streamed, read_tokens
from duplex.labels import Target
from duplex.methods.base import Batch
from duplex.training.prefetch import STEPS, ahead
from duplex.training.scoring import Field
from tests.features.test_store import opened_in

IDENTITY = {"encoder": "e", "weights": "w", "precision": "fp32", "preprocessing": "p", "manifest": "m", "dim": "3"}
ROWS, SHAPE = 40, (5, 4)
TOKENS = np.random.default_rng(0).normal(size=(ROWS, *SHAPE)).astype(np.float16)


def write(path: Path, span: Span) -> Path:
    cache = PartialCache.create(path, IDENTITY, span, 3, {"patch": SHAPE})
    cls = np.ones((span.rows, 3), np.float16)
    cache.write(0, np.full(span.rows, ENCODED, np.uint8), cls=cls, patch=TOKENS[span.start : span.stop])
    cache.finish()
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write(tmp_path / "features.h5", Span(0, ROWS, ROWS))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of three rows, windows of two blocks."""
    monkeypatch.setattr(tokens, "BLOCK", 3 * 2 * SHAPE[0] * SHAPE[1])
    monkeypatch.setattr(tokens, "WINDOW", 2)


def test_many_tokens_stay_on_the_disk_and_few_do_not(cache):
    assert isinstance(read_tokens(cache), np.ndarray)
    assert isinstance(read_tokens(cache, limit=ROWS * 5 * 4 * 2 - 1), Streamed)
    np.testing.assert_array_equal(read_tokens(cache), TOKENS)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, ROWS // 2 - 1), max_size=30), st.slices(ROWS // 2))
def test_any_rows_are_those_in_memory(tmp_path_factory, places, part):
    path = tmp_path_factory.getbasetemp() / "any.h5"
    if not path.exists():
        write(path, Span(0, ROWS, ROWS))
    own = np.arange(1, ROWS, 2)
    held, streamed = torch.from_numpy(TOKENS[own]), Streamed.open(path).at(own)
    assert streamed.shape == held.shape and len(streamed) == len(held)
    assert torch.equal(streamed[torch.tensor(places, dtype=torch.long)], held[torch.tensor(places, dtype=torch.long)])
    if part.step is None or part.step > 0:
        assert torch.equal(streamed[part], held[part])


def joined(folder: Path, *cuts: int) -> Path:
    """The cache in shards that begin at 0 and at these rows."""
    begins = (0, *cuts)
    for k, (start, stop) in enumerate(zip(begins, (*cuts, ROWS), strict=True)):
        write(shard_path(folder / "whole.h5", k, len(begins)), Span(start, stop, ROWS))
    join_shards(folder / "whole.h5")
    return folder / "whole.h5"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, ROWS - 1), max_size=30))
def test_any_rows_of_joined_shards_are_those_in_memory(tmp_path_factory, places):
    folder = tmp_path_factory.getbasetemp() / "joined"
    if not folder.exists():
        folder.mkdir()
        joined(folder, *range(1, 12), 20)  # more than ten: their names do not sort as their rows do
    rows = torch.tensor(places, dtype=torch.long)
    assert torch.equal(Streamed.open(folder / "whole.h5")[rows], torch.from_numpy(TOKENS)[rows])


def test_the_order_has_every_row_once_and_follows_the_seed(cache, small_blocks):
    streamed = Streamed.open(cache)
    orders = [streamed.shuffled(torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(ROWS))
    window = orders[0][:6]  # the rows of two blocks of neighbours
    assert len({row // 3 for row in window}) == 2
    assert window != sorted(window) or orders[2][:6] != sorted(orders[2][:6])


def batch_of(tokens_of) -> Batch:
    return Batch({"cls": torch.arange(ROWS).float()[:, None], "patch": tokens_of}, torch.arange(ROWS))


def test_steps_read_ahead_hold_the_rows_that_were_asked_for(cache):
    held, streamed = batch_of(torch.from_numpy(TOKENS)), batch_of(Streamed.open(cache))
    steps = list(streamed.shuffled(torch.Generator().manual_seed(3)).split(7))
    for chosen, (images, own), (apart, theirs) in zip(steps, ahead(streamed, steps), ahead(held, steps), strict=True):
        assert apart is held and theirs is chosen
        for name in ("cls", "patch"):
            assert torch.equal(images[own].inputs[name], held[chosen].inputs[name])
        assert torch.equal(images[own].compositions, chosen)
        assert len(images) == len(chosen)


@pytest.fixture
def told(monkeypatch) -> list[tuple[str, int, int]]:
    """What the system is told and asked, in turn: "soon" or "now", and which bytes of the file."""
    words: list[tuple[str, int, int]] = []
    preadv = os.preadv

    def soon(descriptor: int, place: int, count: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        words.append(("soon", place, count))

    def now(descriptor: int, views: list[memoryview], place: int) -> int:
        words.append(("now", place, views[0].nbytes))
        return preadv(descriptor, views, place)

    monkeypatch.setattr(cache_files.os, "posix_fadvise", soon)
    monkeypatch.setattr(cache_files.os, "preadv", now)
    return words


def test_the_rows_of_a_few_steps_are_announced_before_they_are_read_and_no_more(cache, told):
    pulled = ahead(batch_of(Streamed.open(cache)), torch.arange(ROWS).split(4))
    next(pulled)
    assert [what for what, *_ in told] == ["soon"] * (1 + STEPS) + ["now"]
    next(pulled)
    assert [what for what, *_ in told[2 + STEPS :]] == ["soon", "now"]
    steps = [list(pulled), told][1]
    announced, read = ([word[1:] for word in steps if word[0] == what] for what in ("soon", "now"))
    assert announced == read and len(read) == ROWS // 4
    assert told[-STEPS - 1 :] == [("now", *where) for where in read[-STEPS - 1 :]]


def test_what_is_announced_is_what_will_be_read_of_every_shard_and_data_set(tmp_path, told, monkeypatch):
    streamed = Streamed.open(joined(tmp_path, 7, 20))
    monkeypatch.setattr(cache_files, "WINDOW", 100)  # a row of 40 bytes: three neighbours take two words
    rows = torch.tensor([39, 6, 7, 8, 9, 19, 20])
    streamed.expect(rows)
    streamed[rows]
    announced = [(place, place + count) for what, place, count in told if what == "soon"]
    read = [(place, place + count) for what, place, count in told if what == "now"]
    assert max(stop - start for start, stop in announced) == 100
    assert [stop - start for start, stop in read] == [40, 120, 40, 40, 40]  # 6 | 7 8 9 | 19 | 20 | 39
    glued = [announced[0], (announced[1][0], announced[2][1]), *announced[3:]]
    assert announced[1][1] == announced[2][0] and glued == read


def refused(*_: object) -> None:
    raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("word", [None, refused])
def test_where_the_system_cannot_be_told_rows_are_read_as_they_are_asked_for(cache, monkeypatch, word):
    if word is None:
        monkeypatch.delattr(cache_files.os, "posix_fadvise")
    else:
        monkeypatch.setattr(cache_files.os, "posix_fadvise", word)
    streamed = Streamed.open(cache)
    streamed.expect(torch.tensor([1, 2]))
    assert torch.equal(streamed[torch.tensor([1, 2])], torch.from_numpy(TOKENS)[1:3])


def test_a_reading_error_reaches_the_loop(cache):
    streamed = Streamed.open(cache)
    with cache.open("r+b") as file:
        file.truncate(cache.stat().st_size // 2)
    with pytest.raises(OSError, match="ends within its tokens"):
        list(ahead(batch_of(streamed), [torch.arange(ROWS)]))


def test_scores_come_in_blocks_that_fit(cache, monkeypatch):
    """Evaluation never reads more of the disk than the scores it may hold."""
    monkeypatch.setattr("duplex.training.scoring.BLOCK_SCORES", 6 * SHAPE[0] * SHAPE[1])
    field = Field(Target(2, None), lambda inputs: inputs["patch"].float().sum((1, 2))[:, None].repeat(1, 2))
    found = list(field.blocks(batch_of(Streamed.open(cache)).inputs))
    assert max(len(scores) for _, scores in found) == 6
    whole = torch.cat([scores for _, scores in found])
    torch.testing.assert_close(whole[:, 0], torch.from_numpy(TOKENS).float().sum((1, 2)))


def test_just_as_many_as_may_be_held_are_held(cache):
    assert isinstance(read_tokens(cache, limit=ROWS * 5 * 4 * 2), np.ndarray)
    assert read_tokens(cache, "deep") is None


def test_a_disk_that_gives_a_few_bytes_at_a_time_gives_all_of_them(cache, monkeypatch):
    preadv = cache_files.os.preadv
    monkeypatch.setattr(
        cache_files.os, "preadv", lambda descriptor, views, place: preadv(descriptor, [views[0][:7]], place)
    )
    rows = torch.tensor([3, 4, 5, 30])
    assert torch.equal(Streamed.open(cache)[rows], torch.from_numpy(TOKENS)[rows])


def of_size(cache: Path, rows: int, numbers: int) -> Streamed:
    """As if each of so many rows held so many numbers."""
    streamed = Streamed.open(cache).at(np.arange(rows) % ROWS)
    streamed.pieces.row = (numbers,)
    return streamed


def runs(order: list[int], size: int) -> int:
    """How many of the blocks that begin at multiples of `size` lie side by side and in order."""
    found = [order[place : place + size] for place in range(0, len(order), size)]
    return sum(one == list(range(one[0], one[0] + len(one))) and one[0] % size == 0 for one in found)


def test_neighbours_up_to_four_mebibytes_come_in_one_block_and_sixty_four_blocks_are_mixed(cache):
    """Rows of a mebibyte: 65 blocks of four. All but the last one are mixed with one another."""
    order = of_size(cache, 260, 2**19).shuffled(torch.Generator().manual_seed(0)).tolist()
    assert sorted(order) == list(range(260))
    apart = set(order[-4:])
    assert apart == set(range(min(apart), min(apart) + 4)) and min(apart) % 4 == 0
    assert runs(order[:-4], 4) < 8
    drawn = [row // 4 for row in order[:256]]
    assert len(set(drawn)) == 64


def test_a_row_larger_than_a_block_is_one(cache, monkeypatch):
    asked, randperm = [], torch.randperm
    monkeypatch.setattr(tokens.torch, "randperm", lambda n, **options: (asked.append(n), randperm(n, **options))[1])
    order = of_size(cache, 66, 2**22).shuffled(torch.Generator().manual_seed(0)).tolist()
    assert sorted(order) == list(range(66)) and asked == [66, 64, 2]  # blocks, and the rows of two windows
    assert len(of_size(cache, 0, 2**22).shuffled(torch.Generator())) == 0


def test_what_streams_closes_its_file_with_itself(cache, tmp_path):
    before = opened_in(tmp_path)
    streamed = Streamed.open(cache)
    parts = [streamed.at(np.arange(3)), streamed.to(torch.device("cpu"))]
    assert len(opened_in(tmp_path)) == len(before) + 1
    del streamed
    assert torch.equal(parts[1][torch.tensor([5])][0], torch.from_numpy(TOKENS)[5]), "what was made of it needs it"
    del parts
    assert opened_in(tmp_path) == before


@pytest.mark.parametrize(("size", "held"), [(2**30, True), (2**30 + 1, False)])
def test_two_gibibytes_are_held_and_no_more(monkeypatch, size: int, held: bool) -> None:
    """As docs/methods.md says."""

    class Large:
        """Claims to be so many numbers and has three."""

        def __init__(self) -> None:
            self.size = size

        def __getitem__(self, _: object) -> np.ndarray:
            return TOKENS[:3]

    monkeypatch.setattr(tokens, "open_file", lambda path: nullcontext({"patch": Large()}))
    monkeypatch.setattr(tokens.Streamed, "open", lambda path, name: (path, name))
    found = read_tokens(Path("f.h5"))
    assert isinstance(found, np.ndarray) if held else found == (Path("f.h5"), "patch")  # type: ignore[comparison-overlap]


def test_shards_are_opened_once_each_however_often_they_are_read(tmp_path):
    streamed = Streamed.open(joined(tmp_path, 20))
    for row in (0, 39, 25):
        assert torch.equal(streamed[torch.tensor([row])][0], torch.from_numpy(TOKENS)[row])
        assert len(opened_in(tmp_path)) == 2
    del streamed
    assert opened_in(tmp_path) == []


def test_a_shard_that_is_made_again_meanwhile_is_read_as_it_was(tmp_path):
    """Whoever writes a cache gives it its name in the end."""
    streamed = Streamed.open(joined(tmp_path, 20))
    shard = shard_path(tmp_path / "whole.h5", 1, 2)
    (tmp_path / "other").write_bytes(bytes(shard.stat().st_size))
    os.replace(tmp_path / "other", shard)
    assert torch.equal(streamed[torch.tensor([30])][0], torch.from_numpy(TOKENS)[30])
