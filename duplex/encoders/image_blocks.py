"""An image tower cut in two: what runs once and is cached, and the last blocks, which run again and again.

    with entering(encoder, 2) as seen:             # extraction: the whole tower, as ever
        features = encoder.encode_images(pixels)
    cut(encoder, 2)(seen[0])                       # the same features, from what entered the last two blocks

A block is a residual block: of attention and MLP in a transformer, of convolutions elsewhere. What follows the last one
(norm, pooling, projection) belongs to the tail.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from duplex.errors import UsageError

TowerBlocks = list[nn.Sequential]


@dataclass(frozen=True)
class Family:
    """How towers of one make are put together."""

    blocks: Callable[[Any], TowerBlocks]  # in their order; a module that stands between two belongs to the later one
    end: Callable[[Any, Tensor], Tensor]  # what leaves the last block -> what leaves the tower [B, w]
    inside: tuple[str, ...] = ()  # modules of a block that hand over what attention and MLP said


@dataclass(frozen=True)
class Cut:
    """The last blocks of a tower, its own modules, and what follows them."""

    blocks: TowerBlocks
    end: Callable[[Tensor], Tensor]  # what leaves the last block -> features [B, d]
    inside: tuple[str, ...]

    def __call__(self, entering: Tensor) -> Tensor:
        """What enters the blocks, [B, T, w] or [B, C, H, W] -> features [B, d]."""
        for block in self.blocks:
            entering = block(entering)
        return self.end(entering)


def cut(encoder: Any, depth: int) -> Cut:
    """The last `depth` blocks of an encoder's image tower."""
    trunk, family = _trunk(encoder)
    blocks, rest = _last(encoder, depth), _without_blocks(trunk)
    project = encoder.visual.head if trunk is not encoder.visual else nn.Identity()
    return Cut(blocks, lambda x: project(family.end(rest, x)), family.inside)


@contextmanager
def entering(encoder: Any, depth: int) -> Iterator[list[Tensor]]:
    """While this is open, every pass of the encoder over pictures leaves here what entered its last `depth` blocks;
    with depth 0 nothing."""
    seen: list[Tensor] = []
    if depth == 0:
        yield seen
        return
    hook = _last(encoder, depth)[0][0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        hook.remove()


def entering_shape(encoder: Any, depth: int) -> tuple[int, ...]:
    """Of one picture: (T, w) or (C, H, W), seen on a blank one."""
    import torch
    from PIL import Image

    size = encoder.image_transform(Image.new("RGB", (8, 8))).shape
    with entering(encoder, depth) as seen:
        encoder.encode_images(torch.zeros((1, *size), dtype=torch.uint8))
    return tuple(seen[0].shape[1:])


def _last(encoder: Any, depth: int) -> TowerBlocks:
    trunk, family = _trunk(encoder)
    blocks = family.blocks(trunk)
    if not 1 <= depth <= len(blocks):
        raise UsageError(f"encoder {encoder.name!r} has {len(blocks)} blocks, so depth {depth} cannot be cut off")
    return blocks[len(blocks) - depth :]


def _trunk(encoder: Any) -> tuple[Any, Family]:
    """The part of an image tower that holds its blocks, and its family. What runs its blocks in a way not known here is
    refused: its tail would give other features."""
    visual = getattr(encoder, "visual", None)
    trunk = getattr(visual, "trunk", visual)
    for name in ("forward", "forward_features"):
        family = _families().get(getattr(type(trunk), name, None))
        if family is not None:
            return trunk, family
    raise UsageError(f"encoder {encoder.name!r} cannot be cut: no known blocks in its image tower; set depth to 0")


def _families() -> dict[Any, Family]:
    """By the function that runs the blocks."""
    from timm.models import convnext, efficientnet, mobilenetv3, resnet, vision_transformer

    from duplex.encoders.openclip import ModifiedResNet, VisionTransformer

    return {
        VisionTransformer.forward: Family(_resblocks, _clip_feature, ("ls_1", "ls_2")),
        ModifiedResNet.forward: Family(_layers, lambda tower, x: tower.attnpool(x)),
        vision_transformer.VisionTransformer.forward_features: Family(
            lambda trunk: _each(trunk.blocks),
            lambda trunk, x: trunk.forward_head(trunk.norm(x)),
            ("drop_path1", "drop_path2"),
        ),
        resnet.ResNet.forward_features: Family(_layers, lambda trunk, x: trunk.forward_head(x)),
        convnext.ConvNeXt.forward_features: Family(_convnext, lambda trunk, x: trunk.forward_head(trunk.norm_pre(x))),
        efficientnet.EfficientNet.forward_features: Family(
            _stages, lambda trunk, x: trunk.forward_head(trunk.bn2(trunk.conv_head(x)))
        ),
        mobilenetv3.MobileNetV3.forward_features: Family(_stages, lambda trunk, x: trunk.forward_head(x)),
    }


def _resblocks(tower: Any) -> TowerBlocks:
    return _each(tower.transformer.resblocks)


def _clip_feature(tower: Any, x: Tensor) -> Tensor:
    pooled: Tensor = tower._pool(x)[0]
    return pooled if tower.proj is None else pooled @ tower.proj


def _each(modules: Sequence[nn.Module]) -> TowerBlocks:
    return [nn.Sequential(module) for module in modules]


def _layers(trunk: Any) -> TowerBlocks:
    return _each([block for layer in (trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4) for block in layer])


def _stages(trunk: Any) -> TowerBlocks:
    return _each([block for stage in trunk.blocks for block in stage])


def _convnext(trunk: Any) -> TowerBlocks:
    return [
        nn.Sequential(stage.downsample, block) if place == 0 else nn.Sequential(block)
        for stage in trunk.stages
        for place, block in enumerate(stage.blocks)
    ]


def _without_blocks(trunk: Any) -> Any:
    """The tower without its blocks, which need not stay in memory for what follows them."""
    rest = copy.copy(trunk)
    gone = ("transformer", "blocks", "stages", "layer1", "layer2", "layer3", "layer4")
    rest._modules = {name: part for name, part in trunk._modules.items() if name not in gone}
    return rest
