import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.text import SIZES, Names, made_up, random_tower
from duplex.encoders import prompt_tree
from duplex.encoders.prompt_tree import PromptTree, TreeLayout, attend
from duplex.encoders.text import ClipTextTower
from duplex.errors import DuplexError
from tests.encoders.towers import CONTEXT, END, START, VOCABULARY, FakeTokenizer, small_model, text_ids
from tests.pretended import Pretended

names = st.lists(st.integers(4, 9), min_size=1, max_size=3)
prompts = st.lists(
    st.tuples(st.integers(0, 2), names, st.one_of(st.just([]), names)).map(
        lambda parts: [START, parts[0], parts[0] + 1, *parts[1], *parts[2], END]  # three paths, each with its context
    ),
    min_size=1,
    max_size=25,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model(quick_gelu=True)


@pytest.fixture(scope="module")
def tower(model: Any) -> ClipTextTower:
    return ClipTextTower(model, FakeTokenizer([START], [END], 0))


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Attention in blocks of another size, so that small trees have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_tree, "BLOCK", size)
        yield


def lexicon_of(model: Any) -> Tensor:
    return model.token_embedding.weight.detach().clone().requires_grad_()


def with_gradient(features: Tensor, lexicon: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view_as(features)
    (gradient,) = torch.autograd.grad((features * weight).sum(), lexicon)
    return features.detach(), gradient


def assert_equal_to_plain(tower: ClipTextTower, sequences: list[list[int]], lexicon: Tensor) -> Tensor:
    """Compare features and gradients of a tree with those of prompts one by one; return the features."""
    features, gradient = with_gradient(tower.encode(PromptTree.of(sequences), lexicon), lexicon)
    plain, expected = with_gradient(tower.encode_plain(sequences, lexicon), lexicon)
    assert (features - plain).abs().max() <= 1e-12
    assert (gradient - expected).abs().max() <= 1e-10
    return features


@given(prompts, st.sampled_from([1, 2, 5, 32]))
@example([[START, *[5] * (CONTEXT - 2), END]], 32)  # as long as the context
@example([[START, 9, END], [START, 5, 6, END], [START, 9, END], [START, 5, END]], 1)  # repeated, unsorted
@settings(max_examples=40, deadline=None)
def test_a_tree_equals_prompts_one_by_one(
    tower: ClipTextTower, model: Any, sequences: list[list[int]], size: int
) -> None:
    lexicon = lexicon_of(model)
    with blocks_of(size):
        features = assert_equal_to_plain(tower, sequences, lexicon)
    assert (features - model.encode_text(text_ids(sequences))).abs().max() <= 1e-12


def test_float32_is_within_1e_5(model: Any) -> None:
    sequences = [[START, 1, 2, s, o, END] for s in range(4, 14) for o in range(14, 34)]
    single = small_model(quick_gelu=True).float()
    features = ClipTextTower(single).encode(PromptTree.of(sequences), single.token_embedding.weight.detach())
    assert features.dtype == torch.float32
    assert (features - single.encode_text(text_ids(sequences))).abs().max() <= 1e-5


def test_a_prompt_may_begin_another(tower: ClipTextTower, model: Any) -> None:
    lexicon, sequences = lexicon_of(model), [[START, 5], [START, 5, END], [START, 5, END, 6, END], [START]]
    for size in (1, 2, 32):
        with blocks_of(size):
            assert_equal_to_plain(tower, sequences, lexicon)


def test_a_tower_of_one_layer_is_first_and_last_at_once() -> None:
    model = small_model({"layers": 1})
    sequences = [[START, 1, s, o, END] for s in range(4, 12) for o in range(20, 30)]
    assert_equal_to_plain(ClipTextTower(model), sequences, lexicon_of(model))


@pytest.mark.parametrize("size", [2, 4, 32])
def test_attention_has_the_gradient_it_says(size: int) -> None:
    tree = PromptTree.of([[0, 1, 2, 7], *([0, 1, s, *[9] * (s % 2), o] for s in (2, 3, 4) for o in (5, 6))])
    with blocks_of(size):
        layout = TreeLayout.of(tree, 3, 2, torch.device("cpu"))
    assert any(plan.unused_slots for plan in layout.layers) == (size < 32)
    for plan, count in zip(layout.layers, (len(layout.entry_rows), tree.tokens, tree.tokens), strict=True):
        states = torch.randn(count, 12, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda states, plan=plan: attend(states, plan), (states,))


@pytest.fixture(scope="module")
def closed() -> list[list[int]]:
    return [[START, 1, 2, s, o, END] for s in range(4, 14) for o in range(14, 14 + 2 * (s - 3))]


@pytest.mark.parametrize("shares", [True, False])
def test_recomputing_layers_changes_nothing(
    tower: ClipTextTower, model: Any, closed: list[list[int]], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tower, "shares_prefixes", shares)
    lexicon, tree, found, runs = lexicon_of(model), PromptTree.of(closed), [], []
    hook = tower.blocks[0].ln_2.register_forward_hook(lambda *_: runs.append(1))
    try:
        for checkpoint in (False, True):
            runs.clear()
            found.append(with_gradient(tower.encode(tree, lexicon, checkpoint=checkpoint), lexicon))
            assert len(runs) == (2 if checkpoint else 1)
    finally:
        hook.remove()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("block", [5, 41, 10_000])
def test_blocks_equal_the_whole(tower: ClipTextTower, model: Any, closed: list[list[int]], block: int) -> None:
    lexicon = lexicon_of(model)
    features = tower.encode_blocks(closed, lexicon, block=block)
    assert not features.requires_grad
    assert (features - tower.encode(PromptTree.of(closed), lexicon)).abs().max() <= 1e-12


def test_the_image_tower_can_be_freed() -> None:
    model = small_model()
    tower, visual = ClipTextTower(model), weakref.ref(model.visual)
    del model
    gc.collect()
    assert visual() is None
    assert tower.width == 16


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_returns_float32_near_it(precision: str, closed: list[list[int]]) -> None:
    model = small_model(quick_gelu=True).float()
    exact, low = ClipTextTower(model), ClipTextTower(model, precision=precision)
    lexicon, tree, alike = lexicon_of(model), PromptTree.of(closed), torch.nn.functional.cosine_similarity
    features, gradient = with_gradient(low.encode(tree, lexicon), lexicon)
    assert features.dtype == gradient.dtype == torch.float32
    expected, direction = with_gradient(exact.encode(tree, lexicon), lexicon)
    assert alike(features, expected).min() > 0.999
    assert alike(gradient.flatten(), direction.flatten(), dim=0) > 0.99
    assert alike(low.encode_plain(closed, lexicon), expected).min() > 0.999
    assert all(weight.dtype == torch.float32 for weight in model.transformer.parameters())


def test_a_model_in_half_precision_is_widened(closed: list[list[int]]) -> None:
    model = small_model().bfloat16()
    tower = ClipTextTower(model)
    assert tower.encode(PromptTree.of(closed), model.token_embedding.weight.detach().float()).dtype == torch.float32
    assert next(model.transformer.parameters()).dtype == torch.bfloat16


def test_prompts_beyond_the_context_are_refused(tower: ClipTextTower) -> None:
    lexicon = torch.zeros(VOCABULARY, tower.width, dtype=torch.float64)
    for encode in (lambda s, x: tower.encode(PromptTree.of(s), x), tower.encode_plain, tower.encode_blocks):
        with pytest.raises(DuplexError, match="13 tokens; this text tower reads at most 12"):
            encode([[START, *[5] * (CONTEXT - 1), END]], lexicon)


A_LAYER = 39  # operations, 17 of them attention's, forward and backward


def test_a_step_takes_few_operations_and_no_synchronisation(pretended: Pretended) -> None:
    states, objects, count, _ = SIZES["mit-states"]
    pairs = made_up(states, objects, count)
    tower = random_tower("ViT-L-14-quickgelu", width=64, device=pretended.name)
    names = Names.of(pairs, "learned", tower)
    tree = PromptTree.of(names.pairs(pairs) + names.alone())
    lexicon = (torch.randn(names.size, tower.width) * 0.02).to(pretended.name).requires_grad_()
    tower.encode(tree, lexicon)  # index tensors are made once
    layers = len(tower.blocks)
    for checkpoint in (False, True):
        lexicon.grad = None
        pretended.reset()
        tower.encode(tree, lexicon, checkpoint=checkpoint).square().sum().backward()
        assert pretended.synchronisations == {}
        assert pretended.operations.total() <= layers * A_LAYER * (1.5 if checkpoint else 1) + 20
        assert lexicon.grad is not None
        assert lexicon.grad.device == lexicon.device
