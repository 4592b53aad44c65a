"""The last blocks of image towers: block inputs and blocks together are the whole tower, in values and gradients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duplex.encoders.base import PACKAGED, load_encoder
from duplex.encoders.image_blocks import RotaryBlock, block_count, capture_block_input, last_blocks, stem
from duplex.encoders.libraries import open_clip, timm
from duplex.encoders.open_clip import ClipEncoder
from duplex.encoders.others import TimmEncoder
from duplex.errors import UsageError
from duplex.methods.adapters import LowRank
from duplex.methods.blocks import FinetunedBlocks
from duplex.options import FinetuneOptions
from duplex.recognition.onnx_files import OnnxImageTower
from duplex.system.threads import float32_arithmetic, in_initial_modes

TimmModel = open_clip.timm_model.TimmModel
ADAPTERS = ("bottleneck", "lora", "full", "parallel", "experts")
CONVOLUTIONAL = ("bottleneck", "lora", "full")
ROTARY = ("DINOv3", "PE-Core", "mixed rotary ViT", "EVA-02")
TRANSFORMERS = ("OpenAI ViT", "timm ViT in CLIP", "timm ViT", "DINOv2", *ROTARY)
SMALL: dict[str, Any] = {"embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}
FASTVIT: dict[str, Any] = {"layers": (1, 2, 1, 1), "embed_dims": (8, 16, 32, 64)}

TOWERS = {
    "OpenAI ViT": (lambda: open_clip.transformer.VisionTransformer(32, 8, 32, 3, 4, 4.0, output_dim=16), 32),
    "OpenAI ResNet": (lambda: open_clip.modified_resnet.ModifiedResNet((1, 1, 1, 1), 16, 8, 32, 8), 32),
    "timm ViT in CLIP": (lambda: TimmModel("test_vit", 16, 160, pool="token"), 160),
    "timm ViT": (lambda: timm.create_model("test_vit", num_classes=0), 160),
    "DINOv2": (lambda: timm.create_model("vit_small_patch14_reg4_dinov2", img_size=28, **SMALL), 28),
    "DINOv3": (lambda: timm.create_model("vit_small_patch16_dinov3", img_size=48, **SMALL), 48),
    "PE-Core": (lambda: timm.create_model("vit_pe_core_tiny_patch16_384", img_size=48, **SMALL), 48),
    "mixed rotary ViT": (lambda: timm.create_model("vit_small_patch16_rope_mixed_224", img_size=48, **SMALL), 48),
    "EVA-02": (lambda: timm.create_model("eva02_tiny_patch14_224", img_size=42, **SMALL), 42),
    "SigLIP 2": (lambda: timm.create_model("vit_base_patch32_siglip_256", img_size=64, **SMALL), 64),
    "FastViT": (lambda: timm.create_model("fastvit_mci0", num_classes=16, **FASTVIT), 64),
    "DINOv3 ConvNeXt": (
        lambda: timm.create_model("convnext_tiny.dinov3_lvd1689m", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
        64,
    ),
    "ConvNeXt alone": (lambda: timm.create_model("test_convnext", num_classes=0), 32),
    "ConvNeXt": (lambda: TimmModel("test_convnext", 16, 32, pool="avg"), 32),
    "ResNet": (lambda: timm.create_model("test_resnet", num_classes=0), 32),
    "EfficientNet": (lambda: timm.create_model("test_efficientnet", num_classes=0), 32),
    "MobileNetV3": (lambda: timm.create_model("mobilenetv3_small_050", num_classes=0), 32),
    "packaged": (lambda: load_encoder(PACKAGED, towers="image").visual, 48),
}


PAIRS = [(name, adapter) for name in TOWERS for adapter in ADAPTERS if name in TRANSFORMERS or adapter in CONVOLUTIONAL]


def tower(name: str) -> tuple[Any, Tensor]:
    """A frozen encoder as far as `image_blocks` needs it, and images for it."""
    make, size = TOWERS[name]
    torch.manual_seed(0)
    visual = make()
    with torch.no_grad():
        for weight in visual.parameters():  # branches that start at zero would hide faults
            weight.add_(0.05 * torch.randn_like(weight))
    return SimpleNamespace(visual=visual.eval().requires_grad_(False), name=name), torch.randn(3, 3, size, size)


def run_tower(encoder: Any, images: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The tower's features, and the input of its last blocks."""
    with torch.no_grad(), capture_block_input(encoder, count) as inputs:
        features = encoder.visual(images)
    return features, inputs[0]


def finetuned(encoder: Any, inputs: Tensor, count: int, *options: Any, dropout: float = 0.1, **more: Any) -> Any:
    shape = tuple(inputs.shape[1:])
    return FinetunedBlocks(last_blocks(encoder, count), FinetuneOptions(*options, dropout=dropout), shape, **more)


def perturb(blocks: FinetunedBlocks) -> FinetunedBlocks:
    """Move all trained parameters away from their start."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in blocks.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    return blocks.eval()


@pytest.mark.parametrize("name", TOWERS)
def test_last_blocks_of_their_input_are_the_tower(name: str) -> None:
    encoder, images = tower(name)
    for count in (1, 2, 3):
        features, inputs = run_tower(encoder, images, count)
        with torch.no_grad():
            torch.testing.assert_close(last_blocks(encoder, count)(inputs), features, atol=1e-5, rtol=0)
        assert not torch.equal(features[0], features[1])
    if name != "OpenAI ResNet":
        whole: Any = SimpleNamespace(**vars(encoder), normalise=lambda pixels: pixels, precision="fp32")
        kind = ClipEncoder if hasattr(encoder.visual, "trunk") or hasattr(encoder.visual, "ln_post") else TimmEncoder
        tokens = last_blocks(encoder, 1).tokens(last_blocks(encoder, 1).blocks[0](run_tower(encoder, images, 1)[1]))
        torch.testing.assert_close(tokens, kind.encode_patches(whole, images)[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", TOWERS)
def test_stem_and_all_blocks_are_the_tower_bit_for_bit(name: str) -> None:
    encoder, images = tower(name)
    encoder.normalise = lambda pixels: pixels.float() / 255
    pixels = (images * 60 + 128).clamp(0, 255).to(torch.uint8)
    count = block_count(encoder)
    features, inputs = run_tower(encoder, encoder.normalise(pixels), count)
    begin = stem(encoder)
    with torch.no_grad():
        assert torch.equal(begin(pixels), inputs)
        assert torch.equal(last_blocks(encoder, count)(begin(pixels)), features)
        assert torch.equal(encoder.visual(encoder.normalise(pixels)), features), "the tower itself has not changed"
    blocks = perturb(finetuned(encoder, inputs, count, "all", "full", begin=begin))
    blocks(pixels).sum().backward()
    assert all(parameter.grad is not None for parameter in blocks.parameters())
    assert torch.equal(blocks(pixels), blocks(inputs))


@pytest.mark.parametrize(("name", "adapter"), PAIRS)
def test_finetuned_blocks_start_as_the_frozen_tower(name: str, adapter: Any) -> None:
    """Copies of weights lie elsewhere in memory, which changes the last bits of products on some processors."""
    encoder, images = tower(name)
    features, inputs = run_tower(encoder, images, 3)
    blocks = finetuned(encoder, inputs, 3, 2, adapter).eval()
    with torch.no_grad():
        torch.testing.assert_close(blocks(inputs), features, atol=1e-6, rtol=0)
        assert not torch.allclose(perturb(blocks)(inputs), features, atol=1e-4, rtol=0)
        assert torch.equal(encoder.visual(images), features), "the tower's own blocks have not changed"


@pytest.mark.parametrize(("name", "adapter"), PAIRS)
def test_gradients_through_cached_inputs_equal_those_through_the_tower(name: str, adapter: Any) -> None:
    encoder, images = tower(name)
    _, inputs = run_tower(encoder, images, 2)
    blocks = perturb(finetuned(encoder, inputs, 2, 1, adapter))
    with torch.no_grad():
        target = torch.randn_like(blocks(inputs))
    (blocks(inputs) * target).sum().backward()
    grads = [parameter.grad.clone() for parameter in blocks.parameters()]
    blocks.zero_grad()
    (with_blocks(encoder, blocks)(images) * target).sum().backward()
    assert any(grad.abs().max() > 1e-4 for grad in grads)
    for parameter, grad in zip(blocks.parameters(), grads, strict=True):
        scale = max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(parameter.grad, grad, atol=1e-5 * scale, rtol=0)


def with_blocks(encoder: Any, blocks: FinetunedBlocks) -> nn.Module:
    """The tower with fine-tuned blocks in the place of its own."""
    frozen = [module for block in last_blocks(encoder, 2).blocks for module in block]
    tuned = [module for block in blocks._blocks for module in block]
    for parent in list(encoder.visual.modules()):
        for name, child in list(parent.named_children()):
            if any(child is module for module in frozen):
                setattr(parent, name, tuned[[child is module for module in frozen].index(True)])
    return encoder.visual


@pytest.mark.parametrize("adapter", ["bottleneck", "full"])
def test_recomputing_blocks_changes_no_gradient(adapter: Any) -> None:
    encoder, images = tower("OpenAI ViT")
    _, inputs = run_tower(encoder, images, 2)
    blocks = perturb(finetuned(encoder, inputs, 2, 2, adapter))
    grads, runs = [], list[nn.Module]()
    blocks._blocks[-1].register_forward_pre_hook(lambda block, _: runs.append(block))
    for blocks.checkpointing, passes in (False, 1), (True, 2):
        blocks.zero_grad()
        runs.clear()
        blocks(inputs).square().sum().backward()
        assert len(runs) == passes
        grads.append(torch.cat([parameter.grad.flatten() for parameter in blocks.parameters()]))
    torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 5), (4, 5), (3, 2, 3, 3), (1, 2, 3, 3)], ids=str)
def test_low_rank_updates_fit_any_matrix_or_kernel_and_start_at_zero(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, update = torch.randn(shape), LowRank(torch.zeros(shape), 2)
    assert update.a.shape == (2, weight[0].numel()) and update.b.shape == (shape[0], 2)
    assert torch.equal(update(weight), weight)
    wide = LowRank(torch.zeros(2, 4000), 50).a.detach()
    assert float(wide.std() * 4000**0.5) == pytest.approx(1, abs=0.02)
    torch.nn.init.normal_(update.b)
    expected = weight + (update.b @ update.a).view(shape)
    torch.testing.assert_close(update(weight), expected, atol=1e-6, rtol=1e-5)


def test_batch_statistics_stay_and_only_bottlenecks_have_dropout() -> None:
    encoder, images = tower("ResNet")
    _, inputs = run_tower(encoder, images, 2)
    full = finetuned(encoder, inputs, 2, 2, "full")
    before = {name: value.clone() for name, value in full.state_dict().items()}
    assert torch.equal(full.train()(inputs), full.eval()(inputs))
    assert all(torch.equal(value, before[name]) for name, value in full.state_dict().items())
    bottleneck = perturb(finetuned(encoder, inputs, 2, 2, dropout=0.5))
    assert not torch.equal(bottleneck.train()(inputs), bottleneck.eval()(inputs))


def test_images_beyond_a_block_and_none_at_all_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, images = tower("ResNet")
    features, inputs = run_tower(encoder, images, 2)
    blocks = finetuned(encoder, inputs, 2, 1).eval()
    monkeypatch.setattr("duplex.methods.blocks.IMAGES", 2)
    with torch.no_grad():
        torch.testing.assert_close(blocks(inputs), features)
        assert blocks(inputs[:0]).shape == (0, features.shape[1])


def test_frozen_blocks_stay_frozen_in_a_trainable_tower() -> None:
    encoder, images = tower("ResNet")
    features, inputs = run_tower(encoder, images, 2)
    encoder.visual.train().requires_grad_(True)
    blocks = finetuned(encoder, inputs, 2, 1)
    assert not any(parameter.requires_grad for block in blocks._blocks for parameter in block.parameters())
    encoder.visual.eval().requires_grad_(False)
    torch.testing.assert_close(blocks(inputs), features)


def test_bfloat16_is_close() -> None:
    encoder, images = tower("OpenAI ViT")
    features, inputs = run_tower(encoder, images, 2)
    with torch.no_grad():
        rounded = finetuned(encoder, inputs, 2, 2, precision="bf16").eval()(inputs)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, features)
    torch.testing.assert_close(rounded, features, atol=0.05, rtol=0.05)


def test_onnx_gets_the_blocks_of_a_bfloat16_cache_in_float32() -> None:
    encoder, images = tower("OpenAI ViT")
    pixels = (255 * images.sigmoid()).byte()
    _, inputs = run_tower(encoder, pixels / 255, 2)
    blocks = finetuned(encoder, inputs, 2, 2, precision="bf16").eval()
    model: Any = SimpleNamespace(finetuned=blocks, backbone=SimpleNamespace(record={"block_inputs": "2"}))
    with torch.no_grad():
        exact, rounded = last_blocks(encoder, 2)(inputs.half().float()), blocks(inputs.half())
        found = OnnxImageTower(encoder, {"mean": [0.0] * 3, "std": [1.0] * 3}, model)(pixels)
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)
        assert not torch.allclose(rounded, exact, atol=1e-3) and torch.equal(blocks(inputs.half()), rounded)


def test_bfloat16_follows_a_step_of_training() -> None:
    encoder, images = tower("OpenAI ViT")
    _, inputs = run_tower(encoder, images, 2)
    blocks = finetuned(encoder, inputs, 2, 2, "full", precision="bf16")
    with in_initial_modes():
        before = blocks.method_inputs(inputs)["cls"]
        with torch.no_grad():
            for parameter in blocks.parameters():
                parameter.add_(0.1 * (parameter.dim() == 2))  # only what autocast rounds
        assert not torch.equal(blocks.method_inputs(inputs)["cls"], before)


def test_tf32_follows_the_cache_outside_of_training_and_the_epoch_inside() -> None:
    encoder, images = tower("ResNet")
    _, inputs = run_tower(encoder, images, 2)
    allowed: list[bool] = []
    blocks = {name: finetuned(encoder, inputs, 2, 1, precision=name) for name in ("fp32", "tf32")}
    for some in blocks.values():
        some._blocks[-1].register_forward_hook(lambda *_: allowed.append(torch.backends.cudnn.allow_tf32))
    with torch.no_grad():
        for outside in (True, False):
            torch.backends.cudnn.allow_tf32 = outside
            blocks["fp32"](inputs), blocks["tf32"](inputs)
    with float32_arithmetic("tf32"):
        blocks["fp32"](inputs)
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    assert allowed == [False, True, False, True, True]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_parallel_bottlenecks_read_what_enters_the_layer_norms(name: str) -> None:
    """x <- x + attention(norm(x)) + 0.1 A_1(x), then x <- x + MLP(norm(x)) + 0.1 A_2(x), with nothing hooked."""
    encoder, images = tower(name)
    _, x = run_tower(encoder, images, 2)
    blocks = perturb(finetuned(encoder, x, 2, 2, "parallel"))
    cut = last_blocks(encoder, 2)
    with torch.no_grad():
        found = blocks(x)
        for i, block in enumerate(cut.blocks):
            layer = block[-1]
            first, second = blocks.trained[2 * i], blocks.trained[2 * i + 1]
            if hasattr(layer, "ln_1"):
                attended = layer.attn(*[layer.ln_1(x)] * 3, need_weights=False)[0]
                x = x + attended + 0.1 * first(x)
                x = x + layer.mlp(layer.ln_2(x)) + 0.1 * second(x)
            elif isinstance(block, RotaryBlock):
                scales = [1 if scale is None else scale for scale in (layer.gamma_1, layer.gamma_2)]
                x = x + scales[0] * layer.attn(layer.norm1(x), rope=block.rope) + 0.1 * first(x)
                x = x + scales[1] * layer.mlp(layer.norm2(x)) + 0.1 * second(x)
            else:
                x = x + layer.ls1(layer.attn(layer.norm1(x))) + 0.1 * first(x)
                x = x + layer.ls2(layer.mlp(layer.norm2(x))) + 0.1 * second(x)
        torch.testing.assert_close(found, cut.end(x), atol=1e-5, rtol=0)


def test_parallel_bottlenecks_need_a_transformer() -> None:
    encoder, images = tower("ResNet")
    with pytest.raises(UsageError, match="'parallel' needs an encoder with transformer blocks; use 'bottleneck'"):
        finetuned(encoder, run_tower(encoder, images, 1)[1], 1, 1, "parallel")


def test_concepts_need_positions_that_are_not_rotary() -> None:
    encoder, images = tower("DINOv3")
    with pytest.raises(UsageError, match=r"'concepts' joins the tokens of two runs.*rotary.*use 'bottleneck'"):
        finetuned(encoder, run_tower(encoder, images, 1)[1], 1, 1, "concepts")


def test_towers_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(UsageError, match=r"has 3 blocks, but its last 4 were requested; set .* to 1–3"):
        last_blocks(tower("OpenAI ViT")[0], 4)
    with pytest.raises(UsageError, match="'odd' has an image tower whose blocks duplex cannot find"):
        last_blocks(SimpleNamespace(name="odd", visual=nn.Linear(2, 2)), 1)
