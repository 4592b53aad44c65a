"""Tokens that stay on the disk: the same rows as in memory, and a shuffled order."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.features import tokens
from duplex.features.file import row_checksums
from duplex.features.tokens import DiskTokens, read_tokens
from duplex.methods.base import Batch
from duplex.training.loop import prefetch, shuffled_rows
from tests.features.test_store import write_cache

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
    steps = list(shuffled_rows(streamed, torch.Generator().manual_seed(3)).split(7))
    for chosen, (images, own), (apart, theirs) in zip(
        steps, prefetch(streamed, steps), prefetch(held, steps), strict=True
    ):
        assert apart is held and theirs is chosen
        for name in ("cls", "patch"):
            assert torch.equal(images[own].inputs[name], held[chosen].inputs[name])
        assert torch.equal(images[own].compositions, chosen)
        assert len(images) == len(chosen)


def test_a_cache_that_is_replaced_meanwhile_is_read_as_it_was(cache, tmp_path):
    """A finished cache gets its name by a rename, which leaves the open file as it was."""
    streamed = DiskTokens.open(cache)
    (tmp_path / "other").write_bytes(bytes(cache.stat().st_size))
    os.replace(tmp_path / "other", cache)
    assert torch.equal(streamed[torch.tensor([30])][0], torch.from_numpy(TOKENS)[30])


def test_rows_are_compared_with_their_checksums_once(cache, monkeypatch):
    streamed = DiskTokens.open(cache)
    first = streamed[2:5]
    compared = []
    monkeypatch.setattr(tokens, "row_checksums", lambda rows: compared.append(len(rows)) or row_checksums(rows))
    assert torch.equal(streamed[2:5], first) and compared == []
    assert torch.equal(streamed[3:8][:2], first[1:]) and compared == [3]
