"""Adapters in the text tower and of concepts: the prefix tree stays exact; methods train, score and load with them."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from duplex.encoders.image_blocks import last_blocks
from duplex.encoders.open_clip import open_clip
from duplex.encoders.prompt_tree import PromptTree
from duplex.encoders.text import ClipTextTower
from duplex.errors import UsageError
from duplex.labels import Ints
from duplex.methods.adapters import ConceptBottlenecks
from duplex.methods.finetuned import text_adapters
from duplex.methods.registry import make_method, parse_options
from duplex.options import FinetuneOptions, OptionError
from duplex.training.loop import make_optimiser, optimiser_step
from tests.encoders.towers import END, START, FakeTokenizer, small_model
from tests.methods.test_with_finetuning import SETTINGS, block_batch, finetuning_task, started

ADAPTERS = ("bottleneck", "parallel", "lora", "full")
PROMPTS = [[START, 1, 2, s, o, END] for s in range(4, 9) for o in range(14, 16 + s)] + [[START, 2, 3, END], [START, 2]]


def adapted(adapter: str, layers: int = 3, **options: Any) -> tuple[ClipTextTower, Any]:
    """A float64 text tower with adapters, and their modules, at their start."""
    tower = ClipTextTower(small_model({"layers": layers}, quick_gelu=True), FakeTokenizer([START], [END], 0))
    torch.manual_seed(0)
    trained = text_adapters(tower, FinetuneOptions(1, text=adapter, **options)).double().eval()
    return tower, trained


def perturb(trained: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(0.2 * torch.randn_like(weight))


def with_gradients(features: Tensor, inputs: list[Tensor], **options: Any) -> tuple[Tensor, list[Tensor]]:
    weight = torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view_as(features)
    return features.detach(), list(torch.autograd.grad((features * weight).sum(), inputs, **options))


def lexicon_of(tower: ClipTextTower) -> Tensor:
    return tower.vocabulary.table.clone().requires_grad_()


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_prefix_tree_equals_prompts_one_by_one(adapter: str, layers: int) -> None:
    tower, trained = adapted(adapter, layers)
    assert tower.shares_prefixes
    perturb(trained)
    lexicon, tree = lexicon_of(tower), PromptTree.of(PROMPTS)
    inputs = [lexicon, *trained.parameters()]
    shared, found = with_gradients(tower.encode(tree, lexicon), inputs)
    plain, expected = with_gradients(tower.encode_plain(PROMPTS, lexicon), inputs)
    again, recomputed = with_gradients(tower.encode(tree, lexicon, checkpoint=True), inputs)
    assert (shared - plain).abs().max() <= 1e-12 and torch.equal(shared, again)
    for ours, theirs, third in zip(found, expected, recomputed, strict=True):
        assert (ours - theirs).abs().max() <= 1e-10 * max(1.0, float(theirs.abs().max()))
        assert torch.equal(ours, third)
    assert sum(float(grad.abs().max()) > 1e-6 for grad in found[1:]) >= 0.9 * len(found[1:])


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_features_start_as_those_of_the_frozen_tower_which_stays_as_it_is(adapter: str) -> None:
    model = small_model({"layers": 2}, quick_gelu=True)
    frozen = ClipTextTower(model)
    tree, lexicon = PromptTree.of(PROMPTS), frozen.vocabulary.table
    with torch.no_grad():
        before = frozen.encode(tree, lexicon)
        tower = ClipTextTower(model)
        trained = text_adapters(tower, FinetuneOptions(1, text=adapter)).double().eval()
        assert torch.equal(tower.encode(tree, lexicon), before)
        perturb(trained)
        assert not torch.allclose(tower.encode(tree, lexicon), before, atol=1e-3)
        assert torch.equal(frozen.encode(tree, lexicon), before)


@pytest.mark.parametrize("adapter", ["bottleneck", "parallel"])
def test_features_are_those_of_the_formula(adapter: str) -> None:
    """The residual stream written out, with nothing hooked."""
    tower, trained = adapted(adapter, layers=2)
    perturb(trained)
    model: Any = small_model({"layers": 2}, quick_gelu=True)
    prompt, (first, *rest) = [START, 1, 2, 5, 20, END], list(trained)
    x = model.token_embedding.weight[prompt] + model.positional_embedding[: len(prompt)]
    mask = torch.full((len(prompt), len(prompt)), -torch.inf, dtype=torch.float64).triu(1)
    with torch.no_grad():
        for block, (a, b) in zip(model.transformer.resblocks, [(first, rest[0]), (rest[1], rest[2])], strict=True):
            h = block.ln_1(x)
            y = block.attn(h, h, h, need_weights=False, attn_mask=mask)[0]
            x = x + y + (0.1 * a(x) if adapter == "parallel" else a(y))
            y = block.mlp(block.ln_2(x))
            x = x + y + (0.1 * b(x) if adapter == "parallel" else b(y))
        expected = model.ln_final(x)[-1] @ model.text_projection
        found = tower.encode(PromptTree.of([*PROMPTS, prompt]), tower.vocabulary.table)[-1]
    assert (found - expected).abs().max() <= 1e-12


def prototypes(method: Any, compositions: Ints) -> Tensor:
    encoded: Tensor = method.method.prompts.encode(compositions).compositions
    return encoded


@pytest.mark.parametrize("kind", ["prompts", "caila"])
def test_a_method_trains_scores_and_loads_with_adapters_in_both_towers(kind: str) -> None:
    context = finetuning_task("bottleneck", text="parallel", learning_rate=0.003)
    columns, batch = context.labels.candidates("open", "test"), block_batch()
    frozen = context.encode_prompts(columns).compositions
    method = started(kind, context, random_blocks=False)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    if kind == "caila":  # fixed prompts, which a frozen tower encodes only once
        torch.testing.assert_close(prototypes(method, columns), frozen)
    optimiser = make_optimiser(method, SETTINGS)
    for _ in range(2):
        optimiser_step(method.train(), batch, torch.arange(48), replace(SETTINGS, accumulate=3), optimiser)
    for part in ("text.0.up.weight", "blocks.trained.0.up.weight"):
        moved = (method.state_dict()[part] - before[part]).abs().max()
        assert 0.003 < moved <= 0.0061, part
    if kind == "caila":
        assert not torch.allclose(prototypes(method, columns), frozen, atol=1e-4)
    assert torch.equal(context.encode_prompts(columns).compositions, frozen), "the shared tower has changed"
    loaded = started(kind, context, random_blocks=False)
    loaded.load_state_dict(method.state_dict())
    scores = method.eval().scorer(columns)(batch.inputs)
    assert torch.equal(loaded.scorer(columns)(batch.inputs), scores)
    with torch.no_grad():
        loaded.text[-1].up.weight.zero_()
    assert not torch.allclose(loaded.scorer(columns)(batch.inputs), scores, atol=1e-4)
    assert method.portable(columns) is None


def test_text_adapters_without_use_are_refused_in_one_line() -> None:
    context = finetuning_task("bottleneck", text="bottleneck")
    options = parse_options("compcos", {})
    with pytest.raises(UsageError, match=r"finetune\.text is bottleneck, and the method has no text tower; leave"):
        make_method("compcos", options, replace(context, text=None))
    other: Any = SimpleNamespace(width=16)
    with pytest.raises(UsageError, match=r"a text tower with blocks of an unknown kind; leave finetune\.text out"):
        make_method("compcos", options, replace(context, text=other))
    method = make_method("compcos", options, context)
    method.start(block_batch())
    with pytest.raises(UsageError, match=r"finetune\.text trains nothing: CompCos trains on no prompts; leave it out"):
        optimiser_step(method.train(), block_batch(), torch.arange(48), SETTINGS, make_optimiser(method, SETTINGS))
    with pytest.raises(UsageError, match="unknown adapter 'bottle'"):
        FinetuneOptions(1, text="bottle")
    with pytest.raises(OptionError, match="adapter: full has no width"):
        FinetuneOptions(1, text="full", width=8)


def concept_blocks(count: int = 4) -> tuple[Any, Any, Any]:
    """A float64 image transformer's blocks, a copy of them with adapters of concepts, and these adapters."""
    torch.manual_seed(0)
    visual = open_clip.transformer.VisionTransformer(32, 8, 32, count, 4, 4.0, output_dim=16).double().eval()
    cut = last_blocks(SimpleNamespace(visual=visual.requires_grad_(False), name="vit"), count)
    tuned = copy.deepcopy(cut.blocks)
    trained = ConceptBottlenecks(tuned, cut, [32] * count, FinetuneOptions("all", "concepts", width=5)).double()
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return cut, tuned, trained


def quickgelu(z: Tensor) -> Tensor:
    return z / (1 + torch.exp(-1.702 * z))


def branch(block: Any, x: Tensor, adapters: list[list[Any]]) -> Tensor:
    """One block on tokens [T, w]; `adapters`: of attention and MLP, each one adapter or composition, state, object."""
    for part, three in zip(("attn", "mlp"), adapters, strict=True):
        h = block.ln_1(x) if part == "attn" else block.ln_2(x)
        y = block.attn(h[None], h[None], h[None], need_weights=False)[0][0] if part == "attn" else block.mlp(h)
        z = [quickgelu(a.down(y)) for a in three]
        ups = [three[0].up(sum(z) / len(z)), *(a.up(hidden) for a, hidden in zip(three[1:], z[1:], strict=True))]
        x = x + y + sum(ups) / len(ups)
    return x


def test_images_of_concepts_follow_the_formula() -> None:
    """States and objects alone in the lower half; above it, both streams' tokens with a mixture of adapters."""
    cut, tuned, trained = concept_blocks()
    adapters = list(trained)
    lower, upper = adapters[:8], adapters[8:]
    assert len(upper) == 12, "two blocks with three adapters at two places"
    images = torch.randn(2, 17, 32, dtype=torch.float64)
    outputs = trained.outputs(images, tuned, torch.nn.Module.__call__)
    for image, found in zip(images, zip(*outputs, strict=True), strict=True):
        state = object = image
        both = torch.empty(0)
        for place, block in enumerate(cut.blocks):
            at = place % 2
            own = [lower[4 * at : 4 * at + 2], lower[4 * at + 2 : 4 * at + 4]]
            if place >= 2:
                three = [upper[6 * at : 6 * at + 3], upper[6 * at + 3 : 6 * at + 6]]
                both = torch.cat([state, object]) if place == 2 else both
                both = branch(block[-1], both, three)
                own = [each[1:] for each in three]
            state = branch(block[-1], state, [[each[0]] for each in own])
            object = branch(block[-1], object, [[each[1]] for each in own])
        for ours, expected in zip(found, ((both[:17] + both[17:]) / 2, state, object), strict=True):
            assert (ours - expected).abs().max() <= 1e-12
    grads = torch.autograd.grad(sum(x.square().sum() for x in outputs), list(trained.parameters()))
    again = trained.outputs(images, tuned, partial(recompute, use_reentrant=False))
    for ours, theirs in zip(
        torch.autograd.grad(sum(x.square().sum() for x in again), list(trained.parameters())), grads, strict=True
    ):
        assert theirs.abs().max() > 0 and torch.equal(ours, theirs)


def test_prompts_of_each_concept_run_through_its_own_adapters() -> None:
    tower, trained = adapted("concepts", layers=2)
    assert torch.equal(trained[0].up.bias, torch.zeros(16)) and trained[0].up.weight.abs().max() > 0
    assert len(trained) == 2 * 2 * 3 and trained[0].down.out_features == 4, "a quarter of the tower's width"
    perturb(trained)
    model: Any = small_model({"layers": 2}, quick_gelu=True)
    prompt = [START, 1, 2, 5, 20, END]
    mask = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)
    towers = (tower, tower.of_paths["state"], tower.of_paths["object"])
    for k, own in enumerate(towers):
        with torch.no_grad():
            x = model.token_embedding.weight[prompt] + model.positional_embedding[:6]
            for place, block in enumerate(model.transformer.resblocks):
                first, second = trained[6 * place + k], trained[6 * place + 3 + k]
                h = block.ln_1(x)
                y = block.attn(h, h, h, need_weights=False, attn_mask=mask)[0]
                x = x + y + first.up(quickgelu(first.down(y)))
                y = block.mlp(block.ln_2(x))
                x = x + y + second.up(quickgelu(second.down(y)))
            expected = model.ln_final(x)[-1] @ model.text_projection
        lexicon, tree = lexicon_of(tower), PromptTree.of([*PROMPTS, prompt])
        inputs = [lexicon, *list(trained.parameters())]
        shared, found = with_gradients(own.encode(tree, lexicon), inputs, allow_unused=True)
        plain, wanted = with_gradients(own.encode_plain([*PROMPTS, prompt], lexicon), inputs, allow_unused=True)
        assert (shared[-1] - expected).abs().max() <= 1e-12 and (shared - plain).abs().max() <= 1e-12
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours - theirs).abs().max() <= 1e-10 * max(1.0, float(theirs.abs().max()))
