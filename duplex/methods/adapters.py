"""Adapters, which fine-tuning trains in a tower's blocks: plug-ins of the group `duplex.adapters`.

    bottleneck:  y <- y + Up(dropout(relu(Down(y))))         y: output of attention, MLP, convolution
    parallel:    y <- y + 0.1 Up(dropout(relu(Down(x))))     x: input of the layer norm before it
    lora:        W <- W + B A                                every matrix W of the blocks (Hu et al.)
    full:        all parameters are trained
    concepts:    y <- y + Up_k(quickgelu(Down_k(y)))         k: state, object, composition, one by one
    experts:     y <- y + B_0 A_0 h + sum_i G_i B_i A_i h    y: output of the MLP; h: its normed input

Each token has its own `G`: the softmax of the two largest of eight numbers `R h`, R a matrix; the
other six experts get zero. This is EVA's mixture of experts (arXiv 2506.20986), known from others'
summaries, which do not give the ranks.

`Up` and `B` start at zero, except in `concepts`, CAILA's published adapters (Zheng et al., 2024).
There, an image's run for compositions starts at the middle block, with the tokens of the other two
runs joined, and mixes all three adapters:

    y <- y + (Up_c(mean of z_k) + Up_s(z_s) + Up_o(z_o)) / 3,   z_k = quickgelu(Down_k(y))

The Duplex paper puts adapters "in the image encoder". It builds on the published code of Troika
(Huang et al., 2024), which has parallel adapters; Chen et al. (2022) introduced these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from duplex.encoders.image_blocks import LastBlocks, RotaryBlock, TowerBlocks
from duplex.errors import UsageError, require
from duplex.methods.layers import QUICK, Bottleneck
from duplex.options import FinetuneOptions
from duplex.system.plugins import installed_plugins, load_plugin

GROUP = "duplex.adapters"
PARALLEL_SCALE = 0.1  # of Troika's published code
EXPERTS = 8  # routed ones, beside the shared expert 0
CHOSEN = 2  # routed experts of a token
REDUCTION = 4  # of CAILA's published code: channels of a block per hidden unit
Run = Callable[[nn.Module, Tensor], Tensor]


class BlockAdapters(nn.ModuleList):
    """Base class of the modules that fine-tuning trains inside blocks; a subclass defines `attach`.

    cut: names the modules of a transformer block at which its attention and its MLP begin and end.
    channels: number of output channels of each of the `blocks`, whose own parameters are frozen.
    """

    def __init__(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> None:
        super().__init__(self.attach(blocks, cut, channels, options))

    def attach(
        self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions
    ) -> list[nn.Module]:
        """Insert (or unfreeze) and return modules; `channels`: widths of the blocks' outputs."""
        raise NotImplementedError

    def outputs(self, x: Tensor, blocks: TowerBlocks, run: Run) -> list[Tensor]:
        """Pass `x` through the blocks by `run`: one output, or of pairs, states, objects."""
        for block in blocks:
            x = run(block, x)
        return [x]


def find_adapters(name: str) -> type[BlockAdapters]:
    """The installed adapter class called `name`; raises UsageError for an unknown name."""
    points = installed_plugins(GROUP)
    found: type[BlockAdapters] = load_plugin(points[require(name, points, "adapter")], "adapter", BlockAdapters)
    return found


class Bottlenecks(BlockAdapters):
    """Trains bottlenecks after attention and MLP of each block, or after a convolutional one."""

    def attach(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> Any:
        adapters = []
        for block, width in zip(blocks, channels, strict=True):
            for module in [getattr(block[-1], name) for name in cut.branch_outputs] or [block[-1]]:
                adapter = Bottleneck(width, options.inner_width, options.dropout)
                module.register_forward_hook(lambda _, __, y, adapter=adapter: y + adapter(y))
                adapters.append(adapter)
        return adapters


class ParallelBottlenecks(BlockAdapters):
    """Trains two bottlenecks per transformer block, parallel to the attention and to the MLP."""

    def attach(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> Any:
        if not cut.branch_inputs:
            raise UsageError("finetune.adapter 'parallel' needs an encoder with transformer blocks; use 'bottleneck'")
        adapters = []
        for block, width in zip(blocks, channels, strict=True):
            for begin, end in zip(cut.branch_inputs, cut.branch_outputs, strict=True):
                adapter = Bottleneck(width, options.inner_width, options.dropout)
                _place_beside(getattr(block[-1], begin), getattr(block[-1], end), adapter)
                adapters.append(adapter)
        return adapters


def _place_beside(begin: nn.Module, end: nn.Module, adapter: nn.Module) -> None:
    """Add `0.1 adapter(x)` to the output of `end`; x: input of `begin`, which runs earlier."""
    entered: dict[str, Tensor] = {}
    begin.register_forward_pre_hook(lambda _, inputs: entered.update(x=inputs[0]))
    end.register_forward_hook(lambda _, __, y: y + PARALLEL_SCALE * adapter(entered.pop("x")))


class LowRank(nn.Module):
    """Adds the product B A to a weight [out, in]; A [r, in] starts random, B [out, r] at zero."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        inputs = weight[0].numel()
        self.a = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(len(weight), rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.b @ self.a).view_as(weight).to(weight.dtype)


class LowRankUpdates(BlockAdapters):
    """Trains a low-rank matrix that is added to each weight matrix of the blocks."""

    def attach(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> Any:
        updates = []
        for module in [*nn.ModuleList(blocks).modules()][1:]:
            for name, weight in [*module.named_parameters(recurse=False)]:
                if weight.ndim >= 2:
                    updates.append(LowRank(weight, options.inner_width).to(weight.device))
                    parametrize.register_parametrization(module, name, updates[-1])
        return updates


class AllWeights(BlockAdapters):
    """Trains all parameters of the blocks and adds none."""

    def attach(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> Any:
        return [block.requires_grad_() for block in blocks]


class RoutedExperts(nn.Module):
    """EVA's low-rank experts of a block: one for all tokens, and two of eight per token."""

    def __init__(self, channels: int, rank: int) -> None:
        super().__init__()
        self.router = nn.Linear(channels, EXPERTS, bias=False)
        self.a = nn.Linear(channels, (1 + EXPERTS) * rank, bias=False)  # A_0, then the experts'
        self.b = nn.Linear((1 + EXPERTS) * rank, channels, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, h: Tensor) -> Tensor:
        logits = self.router(h)
        best, places = logits.topk(CHOSEN, dim=-1)
        gates = torch.zeros_like(logits).scatter(-1, places, best.softmax(-1).to(logits.dtype))
        gates = torch.cat([torch.ones_like(gates[..., :1]), gates], -1)
        update: Tensor = self.b((self.a(h).unflatten(-1, (1 + EXPERTS, -1)) * gates[..., None]).flatten(-2))
        return update


class ExpertMixtures(BlockAdapters):
    """Trains low-rank experts in parallel to the MLP of each transformer block."""

    def attach(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> Any:
        if not cut.branch_inputs:
            raise UsageError("finetune.adapter 'experts' needs an encoder with transformer blocks; use 'bottleneck'")
        adapters = []
        for block, width in zip(blocks, channels, strict=True):
            norm = getattr(block[-1], cut.branch_inputs[-1])
            end = getattr(block[-1], cut.branch_outputs[-1])
            adapters.append(RoutedExperts(width, options.inner_width))
            _add_beside(norm, end, adapters[-1])
        return adapters


def _add_beside(norm: nn.Module, end: nn.Module, adapter: nn.Module) -> None:
    """Add `adapter(h)` to the output of `end`; h: output of `norm`, which runs earlier."""
    left: dict[str, Tensor] = {}
    norm.register_forward_hook(lambda _, __, h: left.update(h=h))
    end.register_forward_hook(lambda _, __, y: y + adapter(left.pop("h")))


class ConceptBottleneck(nn.Module):
    """CAILA's `Up(quickgelu(Down(y)))` with `width` hidden units; biases start at zero."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, width)
        self.up = nn.Linear(width, channels)
        for layer in (self.down, self.up):
            nn.init.zeros_(layer.bias)

    def hidden(self, y: Tensor) -> Tensor:
        z: Tensor = self.down(y)
        return z * torch.sigmoid(QUICK * z)

    def forward(self, y: Tensor) -> Tensor:
        update: Tensor = self.up(self.hidden(y))
        return update


class ConceptBottlenecks(BlockAdapters):
    """Trains bottlenecks for states, objects and compositions; the blocks run for each."""

    passes: tuple[TowerBlocks, TowerBlocks, TowerBlocks]  # of compositions, states, objects

    def attach(self, blocks: TowerBlocks, cut: LastBlocks, channels: list[int], options: FinetuneOptions) -> Any:
        if not cut.branch_inputs:
            raise UsageError("finetune.adapter 'concepts' needs an encoder with transformer blocks; use 'bottleneck'")
        if any(isinstance(block, RotaryBlock) and block.rope is not None for block in blocks):
            problem = "joins the tokens of two runs, which an encoder with rotary positions cannot read"
            raise UsageError(f"finetune.adapter 'concepts' {problem}; use 'bottleneck'")
        weights = {id(weight): weight for weight in nn.ModuleList(blocks).parameters()}
        self.passes = (blocks, copy.deepcopy(blocks, {**weights}), copy.deepcopy(blocks, {**weights}))
        self.first = 0 if cut.of_text else len(blocks) // 2  # from which on
        adapters = []
        for place, width in enumerate(channels):
            for name in cut.branch_outputs:
                own = [ConceptBottleneck(width, options.width or width // REDUCTION) for _ in self.passes]
                whole = own[0] if cut.of_text else partial(mixture, own)
                for each, adapter in zip(self.passes, (whole, *own[1:]), strict=True):
                    end = getattr(each[place][-1], name)
                    end.register_forward_hook(lambda _, __, y, adapter=adapter: y + adapter(y))
                adapters += own if place >= self.first else own[1:]
        return adapters

    def outputs(self, x: Tensor, blocks: TowerBlocks, run: Run) -> list[Tensor]:
        state = object = x
        for place, (of_both, of_state, of_object) in enumerate(zip(*self.passes, strict=True)):
            if place == self.first:
                both = torch.cat([state, object], 1)
            if place >= self.first:
                both = run(of_both, both)
            state = run(of_state, state)
            object = run(of_object, object)
        return [both.unflatten(1, (2, -1)).mean(1), state, object]


def mixture(adapters: list[ConceptBottleneck], y: Tensor) -> Tensor:
    """Mean output of three adapters for `y`; the first uses the mean of all hidden units."""
    z = [adapter.hidden(y) for adapter in adapters]
    inner = [torch.stack(z).mean(0), *z[1:]]
    return torch.stack([adapter.up(each) for adapter, each in zip(adapters, inner, strict=True)]).mean(0)
