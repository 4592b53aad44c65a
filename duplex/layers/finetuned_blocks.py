"""The end of an image tower with something trained inside: its last blocks run on what is cached of every picture.

`adapter: tail` puts a bottleneck after attention and after the MLP of each block (after each convolutional block),
`y <- y + Up(dropout(relu(Down(y))))`, as Eq. 3 has them inside the encoder; `lora` adds a low-rank update to every
matrix of the blocks (Hu et al., 2022), `W <- W + B A`; `trained` trains the blocks. `Up` and `B` start at zero, so that
the features start as the frozen tower's. Norms of batches keep the statistics they were trained with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint as recompute

from duplex.encoders import load_encoder
from duplex.encoders.arithmetic import arithmetic
from duplex.encoders.image_blocks import Cut, cut, entering_shape
from duplex.options import TailOptions

IMAGES = 256  # at once, where no gradient is asked for


def tail_maker(encoder: Mapping[str, str], options: TailOptions, device: str) -> Callable[[], Tail]:
    """Makes fresh ends of the image tower that a checkpoint names, at the depth of the cache that it was trained on.
    Its weights are float32; what a cache in bf16 holds is multiplied on in bf16."""
    tower, depth = (
        load_encoder(encoder["name"], encoder["tag"] or None, towers="image", device=device),
        encoder["depth"],
    )
    row = entering_shape(tower, int(depth))
    return partial(Tail, cut(tower, int(depth)), options, row, encoder["precision"])


class Bottleneck(nn.Module):
    """`Up(dropout(relu(Down(y))))` over the channels of tokens [B, T, w] or of a feature map [B, w, H, W]."""

    def __init__(self, channels: int, width: int, rate: float) -> None:
        super().__init__()
        self.down, self.up, self.rate = nn.Linear(channels, width), nn.Linear(width, channels), rate
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, y: Tensor) -> Tensor:
        cells = y.movedim(1, -1) if y.ndim == 4 else y
        moved: Tensor = self.up(dropout(relu(self.down(cells)), self.rate, self.training))
        return moved.movedim(-1, 1) if y.ndim == 4 else moved


class LowRank(nn.Module):
    """`W + B A`, with `A [r, in]` random and `B [out, r]` zero at the start; a kernel's inputs are its cells too."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        inputs = weight[0].numel()
        self.a = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(len(weight), rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.b @ self.a).view_as(weight)


class Tail(nn.Module):
    """Cached tokens or feature maps of some pictures -> features [B, d]. What is trained is its state; the frozen
    blocks are copies, on the device of the tower, that no checkpoint holds."""

    def __init__(self, cut: Cut, options: TailOptions, row: tuple[int, ...], precision: str = "fp32") -> None:
        """`cut` is at the cache's depth, which is `options.depth` or more, and `row` the shape of one picture there;
        `precision` is that of the cache."""
        super().__init__()
        self.options, self.checkpointing, self._precision = options, False, precision
        blocks = copy.deepcopy(cut.blocks)
        for block in blocks:
            block.eval().requires_grad_(False)
        moved = blocks[len(blocks) - options.depth :]
        self._blocks, self._end = tuple(blocks), cut.end  # in a tuple: they are no state
        self._frozen = len(blocks) - options.depth
        self._device = next(blocks[-1].parameters()).device
        self.trained = {"tail": self._bottlenecks, "lora": self._updates, "trained": self._own}[options.adapter](
            moved, cut.inside, row
        )

    def _bottlenecks(self, moved: Any, inside: tuple[str, ...], row: tuple[int, ...]) -> nn.ModuleList:
        places = [getattr(block[-1], name) for block in moved for name in inside] or [block[-1] for block in moved]
        found = nn.ModuleList(
            Bottleneck(channels, self.options.inner, self.options.dropout) for channels in self._channels(places, row)
        )
        for place, adapter in zip(places, found, strict=True):
            place.register_forward_hook(lambda _, __, y, adapter=adapter: y + adapter(y))
        return found

    def _channels(self, places: list[nn.Module], row: tuple[int, ...]) -> list[int]:
        """How wide what each of some modules hands over is, seen on a blank picture."""
        widths: dict[nn.Module, int] = {}
        hooks = [
            place.register_forward_hook(
                lambda module, _, y: widths.__setitem__(module, y.shape[1 if y.ndim == 4 else -1])
            )
            for place in places
        ]
        with torch.no_grad():
            x = torch.zeros((1, *row), device=self._device)
            for block in self._blocks:
                x = block(x)
        for hook in hooks:
            hook.remove()
        return [widths[place] for place in places]

    def _updates(self, moved: Any, *_: Any) -> nn.ModuleList:
        found = nn.ModuleList()
        for block in moved:
            matrices = [
                (module, name)
                for module in block.modules()
                for name, weight in module.named_parameters(recurse=False)
                if weight.ndim >= 2
            ]
            for module, name in matrices:
                update = LowRank(getattr(module, name), self.options.inner).to(self._device)
                parametrize.register_parametrization(module, name, update)
                found.append(update)
        return found

    def _own(self, moved: Any, *_: Any) -> nn.ModuleList:
        return nn.ModuleList(block.requires_grad_() for block in moved)

    def train(self, mode: bool = True) -> Tail:
        """Only bottlenecks know training from use: the tower's own parts stay as they were used."""
        super().train(mode)
        for block in self._blocks:
            block.eval()
        return self

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups for the optimiser."""
        rate = self.options.learning_rate
        return [{"params": list(self.parameters()), **({} if rate is None else {"lr": rate})}]

    def forward(self, entering: Tensor) -> Tensor:
        """[B, T, w] or [B, C, H, W] -> [B, d] float32, not normalised."""
        if torch.is_grad_enabled():
            return self.features(entering)
        starts = range(0, max(1, len(entering)), IMAGES)
        return torch.cat([self.features(entering[start : start + IMAGES]) for start in starts])

    def features(self, entering: Tensor) -> Tensor:
        """The same, all at once; an epoch has chosen its own arithmetic, everything else has that of the cache."""
        with nullcontext() if torch.is_grad_enabled() else arithmetic(self._precision):
            return self._features(entering)

    def _features(self, entering: Tensor) -> Tensor:
        x = entering.to(self._device).float()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            with torch.no_grad():
                for block in self._blocks[: self._frozen]:
                    x = block(x)
            for block in self._blocks[self._frozen :]:
                again = self.checkpointing and torch.is_grad_enabled()
                x = recompute(block, x, use_reentrant=False) if again else block(x)
            found: Tensor = self._end(x).float()
        return found
