"""Adapters in the text tower and of concepts: the prefix tree stays exact; methods train, score and load with them."""

import copy
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duplex.encoders.image_blocks import last_blocks
from duplex.encoders.libraries import open_clip
from duplex.encoders.prompt_tree import PromptTree
from duplex.encoders.text import ClipTextTower
from duplex.errors import UsageError
from duplex.methods.adapters import ConceptBottlenecks, ExpertMixtures
from duplex.methods.blocks import add_text_adapters
from duplex.methods.registry import make_method, parse_options
from duplex.options import FinetuneOptions, OptionError
from duplex.training.loop import make_optimiser, optimiser_step
from tests.encoders.towers import END, START, FakeTokenizer, small_model
from tests.methods.test_with_finetuning import SETTINGS, block_batch, finetuning_task, started

ADAPTERS = ("bottleneck", "parallel", "lora", "full", "concepts", "experts")
PROMPTS = [[START, 1, 2, s, o, END] for s in range(4, 9) for o in range(14, 16 + s)] + [[START, 2, 3, END], [START, 2]]
MASK = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)


def adapted(adapter: str, layers: int = 2) -> tuple[list[ClipTextTower], Any]:
    """A float64 text tower with adapters, or those of compositions, states and objects; and the trained modules."""
    tower = ClipTextTower(small_model({"layers": layers}, quick_gelu=True), FakeTokenizer([START], [END], 0))
    assert tower.shares_prefixes
    torch.manual_seed(0)
    trained = add_text_adapters(tower, FinetuneOptions(1, text=adapter)).double().eval()
    return [tower, *tower.of_paths.values()], nn.ModuleList(trained)


def perturb(trained: Any, scale: float = 0.2) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(scale * torch.randn_like(weight))


def with_gradients(features: Tensor, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    weight = torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view_as(features)
    return features.detach(), list(torch.autograd.grad((features * weight).sum(), inputs))


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_prefix_tree_equals_prompts_one_by_one(adapter: str, layers: int) -> None:
    towers, trained = adapted(adapter, layers)
    lexicon, tree = towers[0].vocabulary.table.clone().requires_grad_(), PromptTree.of(PROMPTS)
    frozen = ClipTextTower(small_model({"layers": layers}, quick_gelu=True)).encode(tree, lexicon)
    assert torch.equal(towers[0].encode(tree, lexicon), frozen) == (adapter != "concepts"), "at the start"
    perturb(trained)
    for k, tower in enumerate(towers):
        own = trained[k :: len(towers)] if adapter == "concepts" else trained
        inputs = [lexicon, *own.parameters()]
        shared, found = with_gradients(tower.encode(tree, lexicon), inputs)
        plain, expected = with_gradients(tower.encode_plain(PROMPTS, lexicon), inputs)
        again, recomputed = with_gradients(tower.encode(tree, lexicon, checkpoint=True), inputs)
        assert (shared - plain).abs().max() <= 1e-12 and torch.equal(shared, again)
        for ours, theirs, third in zip(found, expected, recomputed, strict=True):
            assert (ours - theirs).abs().max() <= 1e-10 * max(1.0, float(theirs.abs().max()))
            assert torch.equal(ours, third)


def written(block: Any, x: Tensor, updates: Any, mask: Tensor | None = None) -> Tensor:
    """A block on tokens [T, w] with nothing hooked: adds `updates`, functions of (x, y), beside attention and MLP."""
    h = block.ln_1(x)[None]
    y = block.attn(h, h, h, need_weights=False, attn_mask=mask)[0][0]
    x = x + y + updates[0](x, y)
    y = block.mlp(block.ln_2(x))
    return x + y + updates[1](x, y)


def quickgelu(z: Tensor) -> Tensor:
    return z / (1 + torch.exp(-1.702 * z))


FORMULAS: dict[str, Any] = {
    "bottleneck": lambda a, x, y: a(y),
    "parallel": lambda a, x, y: 0.1 * a(x),
    "concepts": lambda a, x, y: a.up(quickgelu(a.down(y))),
}


@pytest.mark.parametrize("adapter", FORMULAS)
@torch.no_grad()
def test_text_features_are_those_of_the_formula(adapter: str) -> None:
    towers, trained = adapted(adapter)
    assert len(towers) == (3 if adapter == "concepts" else 1)
    assert trained[0].down.out_features == (16 // 4 if adapter == "concepts" else 64)
    perturb(trained)
    model, prompt = small_model({"layers": 2}, quick_gelu=True), [START, 1, 2, 5, 20, END]
    for k, tower in enumerate(towers):
        updates = [partial(FORMULAS[adapter], own) for own in trained[k :: len(towers)]]
        x = model.token_embedding.weight[prompt] + model.positional_embedding[:6]
        for place, block in enumerate(model.transformer.resblocks):
            x = written(block, x, updates[2 * place : 2 * place + 2], MASK)
        found = tower.encode(PromptTree.of([*PROMPTS, prompt]), tower.vocabulary.table)[-1]
        assert (found - model.ln_final(x)[-1] @ model.text_projection).abs().max() <= 1e-12


@torch.no_grad()
def test_experts_follow_the_formula_in_both_towers() -> None:
    """Beside the MLP: y + B_0 A_0 h + G_i B_i A_i h + G_j B_j A_j h, with the two experts of the largest R h."""

    def update(one: Any, h: Tensor) -> Tensor:
        a, b = one.a.weight.unflatten(0, (9, 3)), one.b.weight.unflatten(1, (9, 3))
        result = torch.zeros_like(h)
        for place, token in enumerate(h):
            scores = [float(row @ token) for row in one.router.weight]
            i, j = sorted(range(8), key=scores.__getitem__)[:-3:-1]
            share = 1 / (1 + math.exp(scores[j] - scores[i]))
            for expert, gate in ((0, 1.0), (1 + i, share), (1 + j, 1 - share)):
                result[place] += gate * b[:, expert] @ (a[expert] @ token)
        return result

    torch.manual_seed(0)
    visual = open_clip.transformer.VisionTransformer(32, 8, 32, 2, 4, 4.0, output_dim=16).double().eval()
    cut = last_blocks(SimpleNamespace(visual=visual.requires_grad_(False), name="vit"), 2)
    tuned, x = copy.deepcopy(cut.blocks), torch.randn(2, 17, 32, dtype=torch.float64)
    trained: Any = ExpertMixtures(tuned, cut, [32] * 2, FinetuneOptions("all", "experts", width=3)).double()
    assert torch.equal(tuned[0](x), cut.blocks[0](x)), "at the start"
    perturb(trained)
    for place, block in enumerate(cut.blocks):
        found, one = tuned[place](x), partial(update, trained[place])
        beside = lambda x, y, block=block[-1], one=one: one(block.ln_2(x))  # noqa: E731
        expected = torch.stack([written(block[-1], image, [lambda x, y: 0, beside]) for image in x])
        assert (found - expected).abs().max() <= 1e-12
        x = found
    with pytest.raises(UsageError, match="'experts' needs an encoder with transformer blocks"):
        finetuning_task("experts").finetuned_blocks()


def mixed(three: Any, x: Tensor, y: Tensor) -> Tensor:
    z = [quickgelu(a.down(y)) for a in three]
    return (three[0].up(sum(z) / 3) + three[1].up(z[1]) + three[2].up(z[2])) / 3


def test_images_of_concepts_follow_the_formula() -> None:
    """States and objects alone in the lower two of four blocks; above, a mixture on the tokens of both as well."""
    torch.manual_seed(0)
    visual = open_clip.transformer.VisionTransformer(32, 8, 32, 4, 4, 4.0, output_dim=16).double().eval()
    cut = last_blocks(SimpleNamespace(visual=visual.requires_grad_(False), name="vit"), 4)
    tuned = copy.deepcopy(cut.blocks)
    trained: Any = ConceptBottlenecks(tuned, cut, [32] * 4, FinetuneOptions("all", "concepts", width=5)).double()
    perturb(trained, 0.1)
    images, own = torch.randn(2, 17, 32, dtype=torch.float64), list(trained)
    lower = [own[i : i + 2] for i in range(0, 8, 2)]  # of states and objects
    adapters = [*(a for two in lower for a in (None, *two)), *own[8:]]  # three at each of eight places
    outputs = trained.outputs(images, tuned, nn.Module.__call__)
    one = FORMULAS["concepts"]
    for image, found in zip(images, zip(*outputs, strict=True), strict=True):
        state = object = image
        both = torch.empty(0)
        for place, block in enumerate(cut.blocks):
            first, second = adapters[6 * place : 6 * place + 3], adapters[6 * place + 3 : 6 * place + 6]
            both = torch.cat([state, object]) if place == 2 else both
            if place >= 2:
                both = written(block[-1], both, [partial(mixed, first), partial(mixed, second)])
            state = written(block[-1], state, [partial(one, first[1]), partial(one, second[1])])
            object = written(block[-1], object, [partial(one, first[2]), partial(one, second[2])])
        for ours, expected in zip(found, ((both[:17] + both[17:]) / 2, state, object), strict=True):
            assert (ours - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("kind", ["prompts", "caila"])
def test_a_method_trains_scores_and_loads_with_adapters_in_both_towers(kind: str) -> None:
    context = finetuning_task("bottleneck", text="parallel", learning_rate=0.003)
    columns, batch = context.labels.candidates("open", "test"), block_batch()
    frozen = context.encode_prompts(columns).compositions
    method = started(kind, context, random_blocks=False)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    optimiser = make_optimiser(method, SETTINGS)
    for _ in range(2):
        optimiser_step(method.train(), batch, torch.arange(48), replace(SETTINGS, accumulate=3), optimiser)
    for part in ("text.0.up.weight", "blocks.trained.0.up.weight"):
        assert 0.003 < (method.state_dict()[part] - before[part]).abs().max() <= 0.0061, part
    if kind == "caila":  # fixed prompts, which a frozen tower encodes only once
        assert not torch.allclose(method.method.prompts.encode(columns).compositions, frozen, atol=1e-4)
    assert torch.equal(context.encode_prompts(columns).compositions, frozen), "the shared tower has changed"


def test_plid_trains_with_the_descriptions_that_it_scores_with() -> None:
    plain = started("plid", finetuning_task("bottleneck", text="parallel"))
    perturb(plain)
    prepared = plain.method.prepare(plain.method.train_candidates)
    for found, expected in zip(plain.method.shared(), prepared, strict=False):
        torch.testing.assert_close(found, expected)


def test_low_rank_updates_fit_a_tower_in_half_precision() -> None:
    tower = ClipTextTower(small_model(quick_gelu=True).float(), precision="bf16")
    trained = add_text_adapters(tower, FinetuneOptions(1, text="lora"))
    tower.encode(PromptTree.of(PROMPTS), tower.vocabulary.table).sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in trained.parameters())


def test_text_adapters_without_use_are_refused_in_one_line() -> None:
    context, options = finetuning_task("bottleneck", text="bottleneck"), parse_options("compcos", {})
    with pytest.raises(UsageError, match=r"finetune\.text is bottleneck, but the encoder has no text tower; leave"):
        make_method("compcos", options, replace(context, text=None))
    other: Any = SimpleNamespace(width=16)
    with pytest.raises(UsageError, match=r"a text tower with blocks of an unknown kind; leave the setting out"):
        make_method("compcos", options, replace(context, text=other))
    method = make_method("compcos", options, context)
    method.start(block_batch())
    with pytest.raises(UsageError, match=r"CompCos uses no prompts, so finetune\.text trains nothing"):
        optimiser_step(method.train(), block_batch(), torch.arange(48), SETTINGS, make_optimiser(method, SETTINGS))
    with pytest.raises(OptionError, match="adapter: full has no width"):
        FinetuneOptions(1, text="full", width=8)
