"""The cut: what enters the last blocks, and those blocks, are together the whole tower, in values and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duplex.encoders import PACKAGED, load_encoder
from duplex.encoders.arithmetic import arithmetic
from duplex.encoders.image_blocks import Cut, cut, entering, entering_shape
from duplex.encoders.openclip import ModifiedResNet, VisionTransformer
from duplex.errors import UsageError
from duplex.layers.finetuned_blocks import LowRank, Tail
from duplex.options import TailOptions

ADAPTERS = ("tail", "lora", "trained")


def clip_resnet() -> nn.Module:
    return ModifiedResNet((1, 1, 1, 1), 16, 8, 32, 8)


def clip_vit() -> nn.Module:
    return VisionTransformer(32, 8, 32, 3, 4, 4.0, output_dim=16)


def in_clip(name: str, pool: str, size: int) -> nn.Module:
    from open_clip.timm_model import TimmModel

    return TimmModel(name, 16, size, pool=pool)


def alone(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=0)


TOWERS = {
    "OpenAI ViT": (clip_vit, 32),
    "OpenAI ResNet": (clip_resnet, 32),
    "timm ViT in CLIP": (lambda: in_clip("test_vit", "token", 160), 160),
    "timm ViT": (lambda: alone("test_vit"), 160),
    "ConvNeXt": (lambda: in_clip("test_convnext", "avg", 32), 32),
    "ResNet": (lambda: alone("test_resnet"), 32),
    "EfficientNet": (lambda: alone("test_efficientnet"), 32),
    "MobileNetV3": (lambda: alone("mobilenetv3_small_050"), 32),
    "packaged": (lambda: load_encoder(PACKAGED, towers="image").visual, 48),
}


def tower(name: str) -> tuple[Any, Tensor]:
    """An encoder as far as a cut sees it, frozen, and pictures for it."""
    make, size = TOWERS[name]
    torch.manual_seed(0)
    visual = make()
    with torch.no_grad():
        for weight in visual.parameters():  # branches that start at zero would hide faults
            weight.add_(0.05 * torch.randn_like(weight))
    return SimpleNamespace(visual=visual.eval().requires_grad_(False), name=name), torch.randn(3, 3, size, size)


def halves(encoder: Any, pictures: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The tower's features, and what entered its last blocks."""
    with torch.no_grad(), entering(encoder, depth) as seen:
        whole = encoder.visual(pictures)
    return whole, seen[0]


def stirred(tail: Tail) -> Tail:
    """With nothing trained at zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in tail.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    return tail.eval()


@pytest.mark.parametrize("name", TOWERS)
def test_head_and_tail_are_the_tower(name: str) -> None:
    encoder, pictures = tower(name)
    for depth in (1, 2, 3):
        whole, entered = halves(encoder, pictures, depth)
        with torch.no_grad():
            torch.testing.assert_close(cut(encoder, depth)(entered), whole, atol=1e-5, rtol=0)
        assert not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_is_trained_starts_as_the_frozen_tower_bit_for_bit(name: str, adapter: Any) -> None:
    encoder, pictures = tower(name)
    whole, entered = halves(encoder, pictures, 3)
    tail = Tail(cut(encoder, 3), TailOptions(2, adapter), tuple(entered.shape[1:])).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(tail(entered), whole)
        assert not torch.equal(stirred(tail)(entered), whole)
        assert torch.equal(encoder.visual(pictures), whole)  # whose own blocks nobody touched


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_gradients_through_the_cache_are_those_through_the_tower(name: str, adapter: Any) -> None:
    """The twin puts the tail's own blocks, with all that is trained in them, back into the tower."""
    encoder, pictures = tower(name)
    _, entered = halves(encoder, pictures, 2)
    tail = stirred(Tail(cut(encoder, 2), TailOptions(1, adapter), tuple(entered.shape[1:])))  # type: ignore[arg-type]
    with torch.no_grad():
        target = torch.randn_like(tail(entered))
    (tail(entered) * target).sum().backward()
    found = [parameter.grad.clone() for parameter in tail.parameters()]
    for parameter in tail.parameters():
        parameter.grad = None
    whole = put_back(encoder, tail)
    (whole(pictures) * target).sum().backward()
    assert any(grad.abs().max() > 1e-4 for grad in found)
    for parameter, grad in zip(tail.parameters(), found, strict=True):
        scale = max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(parameter.grad, grad, atol=1e-5 * scale, rtol=0)


def put_back(encoder: Any, tail: Tail) -> nn.Module:
    own = [module for block in cut(encoder, 2).blocks for module in block]
    moved = [module for block in tail._blocks for module in block]
    for parent in list(encoder.visual.modules()):
        for name, child in list(parent.named_children()):
            if any(child is one for one in own):
                setattr(parent, name, moved[[child is one for one in own].index(True)])
    return encoder.visual


@pytest.mark.parametrize("adapter", ["tail", "trained"])
def test_recomputing_blocks_changes_no_gradient(adapter: Any) -> None:
    encoder, pictures = tower("OpenAI ViT")
    _, entered = halves(encoder, pictures, 2)
    tail = stirred(Tail(cut(encoder, 2), TailOptions(2, adapter), tuple(entered.shape[1:])))  # type: ignore[arg-type]
    grads, runs = [], list[nn.Module]()
    tail._blocks[-1].register_forward_pre_hook(lambda block, _: runs.append(block))
    for tail.checkpointing, passes in (False, 1), (True, 2):
        tail.zero_grad()
        runs.clear()
        tail(entered).square().sum().backward()
        assert len(runs) == passes
        grads.append(torch.cat([parameter.grad.flatten() for parameter in tail.parameters()]))
    torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 5), (4, 5), (3, 2, 3, 3), (1, 2, 3, 3)], ids=str)
def test_an_update_is_of_any_matrix_or_kernel_and_starts_at_nothing(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, update = torch.randn(shape), LowRank(torch.zeros(shape), 2)
    cells = weight[0].numel()
    assert update.a.shape == (2, cells) and update.b.shape == (shape[0], 2)
    assert torch.equal(update(weight), weight)
    wide = LowRank(torch.zeros(2, 4000), 50).a.detach()
    assert float(wide.std() * 4000**0.5) == pytest.approx(1, abs=0.02)
    torch.nn.init.normal_(update.b)
    for row, (found, kept) in enumerate(zip(update(weight), weight, strict=True)):
        torch.testing.assert_close(found.flatten() - kept.flatten(), update.b[row] @ update.a, atol=1e-6, rtol=1e-5)


def test_a_bottleneck_hangs_at_every_place_and_nothing_else_does() -> None:
    encoder, pictures = tower("OpenAI ViT")
    _, entered = halves(encoder, pictures, 2)
    tail = Tail(cut(encoder, 2), TailOptions(2), tuple(entered.shape[1:]))
    hung = [len(module._forward_hooks) for block in tail._blocks for part in block for module in part.modules()]
    assert sum(hung) == len(list(tail.trained)) == 4 and max(hung) == 1


def test_only_bottlenecks_know_that_training_goes_on() -> None:
    """Statistics of batches stay, dropout is the bottlenecks' own."""
    encoder, pictures = tower("ResNet")
    _, entered = halves(encoder, pictures, 2)
    trained = Tail(cut(encoder, 2), TailOptions(2, "trained"), tuple(entered.shape[1:]))
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    assert torch.equal(trained.train()(entered), trained.eval()(entered))
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    dropped = stirred(Tail(cut(encoder, 2), TailOptions(2, dropout=0.5), tuple(entered.shape[1:])))
    assert not torch.equal(dropped.train()(entered), dropped.eval()(entered))


def test_any_number_of_pictures_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, pictures = tower("ResNet")
    whole, entered = halves(encoder, pictures, 2)
    tail = Tail(cut(encoder, 2), TailOptions(1), tuple(entered.shape[1:])).eval()
    monkeypatch.setattr("duplex.layers.finetuned_blocks.IMAGES", 2)
    at_once, plain = list[int](), Tail.features
    monkeypatch.setattr(Tail, "features", lambda self, some: at_once.append(len(some)) or plain(self, some))
    with torch.no_grad():
        torch.testing.assert_close(tail(entered), whole)
        assert at_once == [2, 1]
        assert tail(entered[:0]).shape == (0, whole.shape[1])
    tail(entered)
    assert at_once[3:] == [3], "where gradients are asked for, they need all of it"


def test_frozen_blocks_stay_frozen_whatever_the_tower_is() -> None:
    encoder, pictures = tower("ResNet")
    whole, entered = halves(encoder, pictures, 2)
    encoder.visual.train().requires_grad_(True)
    tail = Tail(cut(encoder, 2), TailOptions(1), tuple(entered.shape[1:]))
    frozen = [parameter for block in tail._blocks for parameter in block.parameters()]
    assert not any(parameter.requires_grad for parameter in frozen)
    encoder.visual.eval().requires_grad_(False)
    torch.testing.assert_close(tail(entered), whole)


def test_bfloat16_is_close() -> None:
    encoder, pictures = tower("OpenAI ViT")
    whole, entered = halves(encoder, pictures, 2)
    with torch.no_grad():
        found = Tail(cut(encoder, 2), TailOptions(2), tuple(entered.shape[1:]), "bf16").eval()(entered)
    assert found.dtype == torch.float32 and not torch.equal(found, whole)
    torch.testing.assert_close(found, whole, atol=0.05, rtol=0.05)


def test_products_are_those_of_the_cache_except_in_an_epoch_which_has_its_own() -> None:
    encoder, pictures = tower("ResNet")
    _, entered = halves(encoder, pictures, 2)
    rounded: list[bool] = []
    made = {name: Tail(cut(encoder, 2), TailOptions(1), tuple(entered.shape[1:]), name) for name in ("fp32", "tf32")}
    for tail in made.values():
        tail._blocks[-1].register_forward_hook(lambda *_: rounded.append(torch.backends.cudnn.allow_tf32))
    with torch.no_grad():
        for outside in (True, False):
            torch.backends.cudnn.allow_tf32 = outside
            made["fp32"](entered), made["tf32"](entered)
    with arithmetic("tf32"):
        made["fp32"](entered)
    torch.backends.cudnn.allow_tf32 = True  # as torch has it
    assert rounded == [False, True, False, True, True]


def test_what_cannot_be_cut_is_one_sentence() -> None:
    encoder, _ = tower("OpenAI ViT")
    with pytest.raises(UsageError, match="has 3 blocks, so depth 4 cannot be cut off"):
        cut(encoder, 4)
    with pytest.raises(UsageError, match="'odd' cannot be cut: no known blocks"):
        cut(SimpleNamespace(name="odd", visual=nn.Linear(2, 2)), 1)
    with pytest.raises(UsageError, match="'blind' cannot be cut"), entering(SimpleNamespace(name="blind"), 1):
        pass


def test_the_shape_that_a_cache_needs() -> None:
    encoder = load_encoder(PACKAGED, towers="image")
    assert entering_shape(encoder, 1) == (192, 3, 3)
    assert entering_shape(encoder, 2) == (48, 6, 6)
    assert isinstance(cut(encoder, 2), Cut)
