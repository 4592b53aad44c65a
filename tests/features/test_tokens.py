"""Patch tokens that stay on the disk: the same rows as in memory, an order of their own, read ahead of each step."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex import ahead as ahead_module
from duplex.ahead import ahead
from duplex.assessment import Field
from duplex.features import tokens
from duplex.features.layout import ENCODED, Span
from duplex.features.shards import join_shards, shard_path
from duplex.features.store import PartialCache
from duplex.features.tokens import Streamed, read_tokens
from duplex.labels import Target
from duplex.methods.base import Batch
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
    held, streamed = torch.from_numpy(TOKENS[own]), Streamed(path).at(own)
    assert streamed.shape == held.shape and len(streamed) == len(held)
    assert torch.equal(streamed[torch.tensor(places, dtype=torch.long)], held[torch.tensor(places, dtype=torch.long)])
    if part.step is None or part.step > 0:
        assert torch.equal(streamed[part], held[part])


def test_joined_shards_stream_as_well(tmp_path):
    for k in range(2):
        write(shard_path(tmp_path / "whole.h5", k, 2), Span(20 * k, 20 * k + 20, ROWS))
    join_shards(tmp_path / "whole.h5")
    streamed = Streamed(tmp_path / "whole.h5")
    rows = torch.tensor([25, 0, 19, 20, 39])
    assert torch.equal(streamed[rows], torch.from_numpy(TOKENS)[rows])


def test_the_order_has_every_row_once_and_follows_the_seed(cache, small_blocks):
    streamed = Streamed(cache)
    orders = [streamed.shuffled(torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(ROWS))
    window = orders[0][:6]  # the rows of two blocks of neighbours
    assert len({row // 3 for row in window}) == 2
    assert window != sorted(window) or orders[2][:6] != sorted(orders[2][:6])


def batch_of(tokens_of) -> Batch:
    return Batch({"cls": torch.arange(ROWS).float()[:, None], "patch": tokens_of}, torch.arange(ROWS))


def test_steps_read_ahead_hold_the_rows_that_were_asked_for(cache):
    held, streamed = batch_of(torch.from_numpy(TOKENS)), batch_of(Streamed(cache))
    steps = list(streamed.shuffled(torch.Generator().manual_seed(3)).split(7))
    for chosen, (images, own), (apart, theirs) in zip(steps, ahead(streamed, steps), ahead(held, steps), strict=True):
        assert apart is held and theirs is chosen
        for name in ("cls", "patch"):
            assert torch.equal(images[own].inputs[name], held[chosen].inputs[name])
        assert torch.equal(images[own].compositions, chosen)
        assert len(images) == len(chosen)


def test_a_few_steps_are_read_before_they_are_asked_for_and_no_more(cache, monkeypatch):
    read, enough = [], threading.Event()
    original = Streamed._read

    def counted(self, wanted):
        read.append(len(wanted))
        if len(read) == 1 + ahead_module.STEPS:
            enough.set()
        return original(self, wanted)

    monkeypatch.setattr(Streamed, "_read", counted)
    pulled = ahead(batch_of(Streamed(cache)), torch.arange(ROWS).split(4))
    next(pulled)
    assert enough.wait(10)
    pulled.close()
    assert len(read) == 1 + ahead_module.STEPS


def test_a_reading_error_reaches_the_loop(cache):
    streamed = Streamed(cache)
    with cache.open("r+b") as file:
        file.truncate(cache.stat().st_size // 2)
    with pytest.raises(OSError, match="ends within its tokens"):
        list(ahead(batch_of(streamed), [torch.arange(ROWS)]))


def test_scores_come_in_blocks_that_fit(cache, monkeypatch):
    """Evaluation never reads more of the disk than the scores it may hold."""
    monkeypatch.setattr("duplex.assessment.BLOCK_SCORES", 6 * SHAPE[0] * SHAPE[1])
    field = Field(Target(2, None), lambda inputs: inputs["patch"].float().sum((1, 2))[:, None].repeat(1, 2))
    found = list(field.blocks(batch_of(Streamed(cache)).inputs))
    assert max(len(scores) for _, scores in found) == 6
    whole = torch.cat([scores for _, scores in found])
    torch.testing.assert_close(whole[:, 0], torch.from_numpy(TOKENS).float().sum((1, 2)))


def test_just_as_many_as_may_be_held_are_held(cache):
    assert isinstance(read_tokens(cache, limit=ROWS * 5 * 4 * 2), np.ndarray)
    assert read_tokens(cache, "deep") is None


def test_a_disk_that_gives_a_few_bytes_at_a_time_gives_all_of_them(cache, monkeypatch):
    preadv = tokens.os.preadv
    monkeypatch.setattr(tokens.os, "preadv", lambda descriptor, views, place: preadv(descriptor, [views[0][:7]], place))
    rows = torch.tensor([3, 4, 5, 30])
    assert torch.equal(Streamed(cache)[rows], torch.from_numpy(TOKENS)[rows])


def of_size(cache: Path, rows: int, numbers: int) -> Streamed:
    """As if each of so many rows held so many numbers."""
    streamed = Streamed(cache, np.arange(rows) % ROWS)
    streamed._row = (numbers,)
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
    streamed = Streamed(cache)
    parts = [streamed.at(np.arange(3)), streamed.to(torch.device("cpu"))]
    assert len(opened_in(tmp_path)) == len(before) + 3
    del streamed, parts
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
    monkeypatch.setattr(tokens, "Streamed", lambda path, name: (path, name))
    found = read_tokens(Path("f.h5"))
    assert isinstance(found, np.ndarray) if held else found == (Path("f.h5"), "patch")  # type: ignore[comparison-overlap]


def test_a_view_of_shards_is_opened_once_however_often_it_is_read(tmp_path):
    for k in range(2):
        write(shard_path(tmp_path / "whole.h5", k, 2), Span(20 * k, 20 * k + 20, ROWS))
    join_shards(tmp_path / "whole.h5")
    streamed = Streamed(tmp_path / "whole.h5")
    assert opened_in(tmp_path) == []
    seen = []
    for row in (0, 39, 25):
        assert torch.equal(streamed[torch.tensor([row])][0], torch.from_numpy(TOKENS)[row])
        seen.append(opened_in(tmp_path).count("whole.h5"))
    assert seen == [1, 1, 1]
    del streamed
    assert opened_in(tmp_path) == []
