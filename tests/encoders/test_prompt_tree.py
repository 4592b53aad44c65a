from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.encoders import prompt_tree
from duplex.encoders.prompt_tree import PromptTree, blocks, padded
from duplex.errors import DuplexError

prompts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=40)


@contextmanager
def shape(small: int, share: int, limit: int = 128) -> Iterator[None]:
    """Other thresholds for the trunk, so that small trees have levels too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_tree, "SMALL", small)
        patch.setattr(prompt_tree, "TRUNK_SHARE", share)
        patch.setattr(prompt_tree, "TRUNK_LIMIT", limit)
        yield


def unpadded(rows: np.ndarray) -> list[list[int]]:
    return [[int(r) for r in row if r >= 0] for row in rows]


@given(prompts, st.sampled_from([0, 128]), st.sampled_from([1, 4, 16]))
@settings(max_examples=60, deadline=None)
def test_nodes_are_the_distinct_prefixes(sequences: list[list[int]], small: int, share: int) -> None:
    with shape(small, share):
        tree = PromptTree.of(sequences)
    naive = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    walked = {tuple(int(tree.rows[n]) for n in path[::-1] if n >= 0) for path in tree.ancestors}
    assert walked == naive
    assert tree.tokens == len(naive)
    assert unpadded(tree.sequences()) == sequences
    assert (tree.parents < np.arange(tree.tokens)).all()
    assert tree.length == max(map(len, sequences))


@given(prompts, st.sampled_from([2, 8]))
@settings(max_examples=60, deadline=None)
def test_levels_count_the_ancestors_outside_the_trunk(sequences: list[list[int]], share: int) -> None:
    with shape(0, share, limit=3):
        tree = PromptTree.of(sequences)
    assert tree.trunk <= 3
    assert (np.diff(tree.levels) >= 0).all()
    assert ((tree.levels == -1) == (np.arange(tree.tokens) < tree.trunk)).all()
    for node, path in enumerate(tree.ancestors):
        if node >= tree.trunk:
            assert tree.levels[node] == (path[1:] >= tree.trunk).sum()
        else:
            assert (path < tree.trunk).all()


@given(prompts, st.integers(1, 15))
@settings(max_examples=40, deadline=None)
def test_blocks_hold_every_prompt_once(sequences: list[list[int]], size: int) -> None:
    seen: dict[int, list[int]] = {}
    for chosen, tree in blocks(sequences, size):
        assert 1 <= tree.prompts <= size
        seen |= dict(zip(chosen.tolist(), unpadded(tree.sequences()), strict=True))
    assert [seen[i] for i in range(len(sequences))] == sequences


def test_blocks_keep_shared_prefixes_together() -> None:
    rng = np.random.default_rng(0)
    pairs = rng.permutation([[0, 1, 2 + s, 20 + o, 50] for s in range(8) for o in range(25)])
    assert sum(tree.tokens for _, tree in blocks(pairs, 25)) == 8 * (2 + 1 + 25 + 25)


def test_an_array_is_the_same_as_lists() -> None:
    sequences = [[0, 1, 2], [0, 1], [0, 3, 4, 5]]
    lists, array = PromptTree.of(sequences), PromptTree.of(padded(sequences).astype(np.int32))
    assert (lists.rows == array.rows).all()
    assert (lists.ends == array.ends).all()


def test_an_open_world_shares_its_states() -> None:
    states, objects = 30, 40
    rows = [[0, 1, 2 + s, 2 + states + o, 100] for s in range(states) for o in range(objects)]
    tree = PromptTree.of(rows)
    assert tree.tokens == 2 + states + 2 * states * objects
    assert np.bincount(tree.levels + 1).tolist() == [2, 30, 1200, 1200]


@pytest.mark.parametrize(
    ("sequences", "sentence"),
    [
        ([], "no prompt to encode"),
        ([[1, 2], []], "prompt 1 has no tokens"),
        ([[1, -2]], "below 0"),
        (np.array([[1, -1, 2]]), "below 0"),
    ],
)
def test_what_is_no_prompt_is_refused(sequences: object, sentence: str) -> None:
    with pytest.raises(DuplexError, match=sentence):
        PromptTree.of(sequences)  # type: ignore[arg-type]
