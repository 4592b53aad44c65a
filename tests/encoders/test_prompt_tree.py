import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.encoders.prompt_tree import PromptTree, pad_prompts, tree_blocks

prompts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=40)


def unpadded(rows: np.ndarray) -> list[list[int]]:
    return [[int(r) for r in row if r >= 0] for row in rows]


@given(prompts)
@settings(max_examples=60, deadline=None)
def test_nodes_are_the_distinct_prefixes(sequences: list[list[int]]) -> None:
    tree = PromptTree.of(sequences)
    naive = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    walked = {tuple(int(tree.rows[n]) for n in path[::-1] if n >= 0) for path in tree.ancestors}
    assert walked == naive
    assert tree.tokens == len(naive)
    assert unpadded(tree.sequences()) == sequences
    assert (tree.parents < np.arange(tree.tokens)).all()
    assert tree.length == max(map(len, sequences))
    array = PromptTree.of(pad_prompts(sequences).astype(np.int32))
    assert (tree.rows == array.rows).all() and (tree.ends == array.ends).all()


@given(prompts)
@settings(max_examples=60, deadline=None)
def test_nodes_are_numbered_depth_first(sequences: list[list[int]]) -> None:
    """A node's descendants follow it directly, and nothing else lies between them."""
    tree = PromptTree.of(sequences)
    for node in range(tree.tokens):
        below = np.flatnonzero((tree.ancestors == node).any(axis=1))
        assert below.tolist() == list(range(node, node + len(below)))


@given(prompts, st.integers(1, 15))
@settings(max_examples=40, deadline=None)
def test_blocks_hold_every_prompt_once(sequences: list[list[int]], size: int) -> None:
    seen: dict[int, list[int]] = {}
    for chosen, tree in tree_blocks(sequences, size):
        assert 1 <= tree.prompts <= size
        seen |= dict(zip(chosen.tolist(), unpadded(tree.sequences()), strict=True))
    assert [seen[i] for i in range(len(sequences))] == sequences
