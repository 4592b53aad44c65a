"""Run the last blocks of an image tower alone, from cached outputs of the earlier blocks.

    with capture_block_input(encoder, 2) as inputs:    # extraction: the whole tower runs
        features = encoder.encode_images(pixels)
    last_blocks(encoder, 2)(inputs[0])                 # the same features
    last_blocks(encoder, 2)(stem(encoder)(pixels))     # too, if these two are all blocks

A block is a residual block: of attention and MLP in a transformer, of convolutions elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from PIL import Image
from torch import Tensor, nn

from duplex.errors import UsageError

TowerBlocks = list[nn.Sequential]
# a tower's modules of blocks
HOLDERS = ("transformer", "blocks", "stages", "layer1", "layer2", "layer3", "layer4")


def patch_tokens(trunk: Any, cells: Tensor) -> Tensor:
    """Patch tokens [B, P, w] in a trunk's output, a feature map or tokens after class tokens."""
    if cells.ndim == 4:
        if getattr(trunk, "output_fmt", "") == "NHWC":
            return cells.flatten(1, 2)
        return cells.flatten(2).transpose(1, 2)
    return cells[:, getattr(trunk, "num_prefix_tokens", 0) :]


@dataclass(frozen=True)
class TowerLayout:
    """Where the image towers of one architecture keep their blocks, and what follows the blocks."""

    # tower -> its blocks in order; a module between two belongs to the later one
    blocks: Callable[[Any], TowerBlocks]
    cells: Callable[[Any, Tensor], Tensor]  # tower, last block's output -> what the pooling reads
    pool: Callable[[Any, Tensor], Tensor]  # tower, cells -> output of the tower [B, w]
    branch_outputs: tuple[str, ...] = ()  # a block's modules that return attention's and MLP's outputs
    branch_inputs: tuple[str, ...] = ()  # a block's layer norms before attention and MLP
    tokens: Callable[[Any, Tensor], Tensor] = patch_tokens  # tower, cells -> patch tokens


@dataclass(frozen=True)
class LastBlocks:
    """A tower's last blocks, not copies; a call maps the first one's input to features [B, d]."""

    blocks: TowerBlocks
    end: Callable[[Tensor], Tensor]  # output of the last block -> features [B, d]
    branch_outputs: tuple[str, ...]
    branch_inputs: tuple[str, ...]
    of_text: bool = False
    tokens: Callable[[Tensor], Tensor] | None = None  # last block's output -> patch tokens [B, T, w]

    def __call__(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.end(x)


class RotaryBlock(nn.Sequential):
    """A block of timm's `Eva`, whose attention also reads the rotary embedding of the patches' positions."""

    rope: Tensor | None

    def __init__(self, block: nn.Module, rope: Tensor | None) -> None:
        super().__init__(block)
        self.register_buffer("rope", rope, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[0](x, rope=self.rope)
        return y


def last_blocks(encoder: Any, count: int) -> LastBlocks:
    """The last `count` blocks of an encoder's image tower and the layers after them, as one callable."""
    trunk, layout = _trunk(encoder)
    blocks = select_blocks(encoder, count)
    rest = copy.copy(trunk)
    rest._modules = {name: part for name, part in trunk._modules.items() if name not in HOLDERS}
    project = encoder.visual.head if trunk is not encoder.visual else nn.Identity()
    return LastBlocks(
        blocks,
        lambda x: project(layout.pool(rest, layout.cells(rest, x))),
        layout.branch_outputs,
        layout.branch_inputs,
        tokens=lambda x: layout.tokens(rest, layout.cells(rest, x)),
    )


class BlockReached(Exception):
    """Raised to stop an image tower before its first block; the argument is that block's input."""


class StopBlock(nn.Module):
    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        raise BlockReached(x)


def stem(encoder: Any) -> Callable[[Tensor], Tensor]:
    """A function that maps uint8 pixels [B, 3, R, R] to the input of the tower's first block."""
    first = select_blocks(encoder, block_count(encoder))[0][0]
    [path] = [name for name, module in encoder.visual.named_modules() if module is first]
    tower = _with_part(encoder.visual, path.split("."), StopBlock())

    def block_input(pixels: Tensor) -> Tensor:
        try:
            tower(encoder.normalise(pixels))
        except BlockReached as reached:
            x: Tensor = reached.args[0]
            return x
        raise AssertionError("the image tower skipped its first block; make its `forward` run all blocks in order")

    return block_input


def _with_part(module: nn.Module, path: Sequence[str], part: nn.Module) -> nn.Module:
    # copies only the modules on the way, so that the encoder stays as it is in other threads
    twin = copy.copy(module)
    inner: Any = module._modules[path[0]]
    inner = part if len(path) == 1 else _with_part(inner, path[1:], part)
    twin._modules = module._modules | {path[0]: inner}
    return twin


def cached_blocks(encoder: Any, record: Mapping[str, str]) -> int:
    """How many of the image tower's last blocks can be computed from a cache with these settings."""
    return block_count(encoder) if "pixels" in record else int(record["block_inputs"])


@contextmanager
def capture_block_input(encoder: Any, count: int) -> Iterator[list[Tensor]]:
    """Context manager that yields a list, to which encodings append the last `count` blocks' input."""
    inputs: list[Tensor] = []
    if count == 0:
        yield inputs
        return
    first = select_blocks(encoder, count)[0][0]
    hook = first.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        yield inputs
    finally:
        hook.remove()


def block_input_shape(encoder: Any, count: int) -> tuple[int, ...]:
    """Shape of one image's input to the last `count` blocks, without the batch's dimension."""
    with capture_block_input(encoder, count) as inputs:
        encoder.encode_images(encoder.image_transform(Image.new("RGB", (8, 8)))[None])
    return tuple(inputs[0].shape[1:])


def block_count(encoder: Any) -> int:
    """How many blocks an encoder's image tower has."""
    trunk, layout = _trunk(encoder)
    return len(layout.blocks(trunk))


def select_blocks(encoder: Any, count: int) -> TowerBlocks:
    """The image tower's last `count` blocks; UsageError if it has fewer or is unknown."""
    trunk, layout = _trunk(encoder)
    blocks = layout.blocks(trunk)
    if not 1 <= count <= len(blocks):
        raise UsageError(
            f"encoder {encoder.name!r} has {len(blocks)} blocks, but its last {count} were requested; "
            f"set `block_inputs` and, if you fine-tune, `finetune: {{blocks: ...}}` to 1–{len(blocks)}"
        )
    return blocks[len(blocks) - count :]


def _trunk(encoder: Any) -> tuple[Any, TowerLayout]:
    visual = getattr(encoder, "visual", None)
    trunk = getattr(visual, "trunk", visual)
    for name in ("forward", "forward_features"):
        layout = _layouts().get(getattr(type(trunk), name, None))
        if layout is not None:
            return trunk, layout
    raise UsageError(
        f"encoder {encoder.name!r} has an image tower whose blocks duplex cannot find; "
        "set `block_inputs` to 0 and leave out `finetune`"
    )


def _layouts() -> dict[Any, TowerLayout]:
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.transformer import VisionTransformer
    from timm.models import convnext, efficientnet, eva, fastvit, mobilenetv3, resnet, vision_transformer

    return {
        VisionTransformer.forward: TowerLayout(
            lambda tower: _each(tower.transformer.resblocks),
            _unchanged,
            _clip_feature,
            ("ls_1", "ls_2"),
            ("ln_1", "ln_2"),
            lambda tower, x: tower.ln_post(x)[:, 1:],
        ),
        ModifiedResNet.forward: TowerLayout(_layers, _unchanged, lambda tower, x: tower.attnpool(x)),
        vision_transformer.VisionTransformer.forward_features: TowerLayout(
            lambda trunk: _each(trunk.blocks),
            lambda trunk, x: trunk.norm(x),
            _timm_feature,
            ("drop_path1", "drop_path2"),
            ("norm1", "norm2"),
        ),
        eva.Eva.forward_features: TowerLayout(
            _rotary_blocks,
            lambda trunk, x: trunk.norm(x),
            _timm_feature,
            ("drop_path1", "drop_path2"),
            ("norm1", "norm2"),
        ),
        fastvit.FastVit.forward_features: TowerLayout(_fastvit, lambda trunk, x: trunk.final_conv(x), _timm_feature),
        resnet.ResNet.forward_features: TowerLayout(_layers, _unchanged, _timm_feature),
        convnext.ConvNeXt.forward_features: TowerLayout(_convnext, lambda trunk, x: trunk.norm_pre(x), _timm_feature),
        efficientnet.EfficientNet.forward_features: TowerLayout(
            _stages, lambda trunk, x: trunk.bn2(trunk.conv_head(x)), _timm_feature
        ),
        mobilenetv3.MobileNetV3.forward_features: TowerLayout(_stages, _unchanged, _timm_feature),
    }


def _unchanged(_: Any, x: Tensor) -> Tensor:
    return x


def _clip_feature(tower: Any, x: Tensor) -> Tensor:
    pooled: Tensor = tower._pool(x)[0]
    return pooled if tower.proj is None else pooled @ tower.proj


def _timm_feature(trunk: Any, cells: Tensor) -> Tensor:
    feature: Tensor = trunk.forward_head(cells)
    return feature


def _each(modules: Iterable[nn.Module]) -> TowerBlocks:
    return [nn.Sequential(module) for module in modules]


def _layers(trunk: Any) -> TowerBlocks:
    return _each(chain(trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4))


def _stages(trunk: Any) -> TowerBlocks:
    return _each(chain.from_iterable(trunk.blocks))


def _convnext(trunk: Any) -> TowerBlocks:
    blocks = []
    for stage in trunk.stages:
        first, *others = stage.blocks
        blocks += [nn.Sequential(stage.downsample, first), *_each(others)]
    return blocks


def _fastvit(trunk: Any) -> TowerBlocks:
    blocks = []
    for stage in trunk.stages:
        first, *others = stage.blocks
        blocks += [nn.Sequential(stage.downsample, stage.pos_emb, first), *_each(others)]
    return blocks


def _rotary_blocks(trunk: Any) -> TowerBlocks:
    if trunk.rope is None:
        return [RotaryBlock(block, None) for block in trunk.blocks]
    rope = trunk.rope.get_embed(shape=trunk.patch_embed.grid_size).detach()
    ropes = rope if trunk.rope_mixed else [rope] * len(trunk.blocks)  # mixed: one for each block
    return [RotaryBlock(block, own) for block, own in zip(trunk.blocks, ropes, strict=True)]
