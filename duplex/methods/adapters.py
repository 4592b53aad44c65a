"""Adapters: what fine-tuning trains in the blocks of a tower. Each is a plug-in of the group `duplex.adapters`.

    bottleneck:  y <- y + Up(dropout(relu(Down(y))))          y: output of attention, MLP or convolutional block
    parallel:    y <- y + 0.1 Up(dropout(relu(Down(x))))      x: what enters the layer norm before attention or MLP
    lora:        W <- W + B A                                 every matrix W of the blocks (Hu et al., 2022)
    full:        all parameters are trained

`Up` and `B` start at zero. The Duplex paper puts adapters "in the image encoder". It builds on the published code of
Troika (Huang et al., 2024), which has parallel adapters; Chen et al. (2022) introduced these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from duplex.encoders.image_blocks import LastBlocks, TowerBlocks
from duplex.errors import UsageError, require
from duplex.methods.layers import Bottleneck
from duplex.options import FinetuneOptions
from duplex.system.plugins import installed_plugins, load_plugin

GROUP = "duplex.adapters"
PARALLEL_SCALE = 0.1  # of Troika's published code


class BlockAdapters(nn.ModuleList):
    """Base class of the modules that fine-tuning trains inside blocks; a subclass inserts them in its constructor.

    blocks: the blocks to fine-tune, whose own parameters are frozen.
    cut: names the modules of a transformer block at which its attention and its MLP begin and end.
    channels: number of output channels of each block.
    options: the options `finetune:`.
    """

    def __init__(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> None:
        super().__init__(self.attach(blocks, cut, channels, options))

    def attach(
        self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions
    ) -> list[nn.Module]:
        """Insert what is to be trained into the blocks; returns the modules whose parameters are trained."""
        raise NotImplementedError


def find_adapters(name: str) -> type[BlockAdapters]:
    """The installed adapter class called `name`; raises UsageError for an unknown name."""
    points = installed_plugins(GROUP)
    found: type[BlockAdapters] = load_plugin(points[require(name, points, "adapter")], "adapter", BlockAdapters)
    return found


class Bottlenecks(BlockAdapters):
    """Trains bottlenecks after the attention and MLP of each transformer block, or after each convolutional block."""

    def attach(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> Any:
        adapters = []
        for block, width in zip(blocks, channels, strict=True):
            for module in [getattr(block[-1], name) for name in cut.branch_outputs] or [block[-1]]:
                adapter = Bottleneck(width, options.inner_width, options.dropout)
                module.register_forward_hook(lambda _, __, y, adapter=adapter: y + adapter(y))
                adapters.append(adapter)
        return adapters


class ParallelBottlenecks(BlockAdapters):
    """Trains two bottlenecks per transformer block, one in parallel to the attention and one to the MLP."""

    def attach(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> Any:
        if not cut.branch_inputs:
            raise UsageError("finetune.adapter: parallel needs a transformer; choose bottleneck")
        adapters = []
        for block, width in zip(blocks, channels, strict=True):
            for begin, end in zip(cut.branch_inputs, cut.branch_outputs, strict=True):
                adapter = Bottleneck(width, options.inner_width, options.dropout)
                _place_beside(getattr(block[-1], begin), getattr(block[-1], end), adapter)
                adapters.append(adapter)
        return adapters


def _place_beside(begin: nn.Module, end: nn.Module, adapter: nn.Module) -> None:
    """Add `adapter(x)` to the output of `end`, where x is the input of `begin`, a module that runs earlier."""
    entered: dict[str, Tensor] = {}
    begin.register_forward_pre_hook(lambda _, inputs: entered.update(x=inputs[0]))
    end.register_forward_hook(lambda _, __, y: y + PARALLEL_SCALE * adapter(entered.pop("x")))


class LowRank(nn.Module):
    """Adds `B A` to a weight [out, in] (kernels are flattened); A [r, in] starts random, B [out, r] at zero."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        inputs = weight[0].numel()
        self.a = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(len(weight), rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.b @ self.a).view_as(weight)


class LowRankUpdates(BlockAdapters):
    """Trains a low-rank matrix that is added to each weight matrix of the blocks."""

    def attach(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> Any:
        updates = []
        for module in [module for block in blocks for module in block.modules()]:
            for name in [name for name, weight in module.named_parameters(recurse=False) if weight.ndim >= 2]:
                weight = getattr(module, name)
                updates.append(LowRank(weight, options.inner_width).to(weight.device))
                parametrize.register_parametrization(module, name, updates[-1])
        return updates


class AllWeights(BlockAdapters):
    """Trains all parameters of the blocks and adds none."""

    def attach(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> Any:
        return [block.requires_grad_() for block in blocks]
