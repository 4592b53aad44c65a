"""Measure the cost of fine-tuning blocks: seconds per training step and bytes per image, at ViT-L/14 size.

    python -m benchmarks.depth --json

Weights are random. A step is the image side alone, forward and backward: the feature adapter (0 blocks), bottlenecks in
the last k blocks over cached block inputs, and in all blocks over images (`all`). `speedup_depth2` is the step of `all`
divided by that of two blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import alternate, emit, options, say
from duplex.encoders.image_blocks import capture_block_input, last_blocks
from duplex.encoders.libraries import open_clip
from duplex.methods.blocks import FinetunedBlocks
from duplex.methods.layers import Adapter
from duplex.options import FinetuneOptions

DIM, SIZE, PATCH, LAYERS, WIDTH = 768, 224, 14, 24, 1024
DEPTHS = (1, 2, 4)


def encoder(layers: int, width: int) -> Any:
    """A frozen image tower with random weights."""
    torch.manual_seed(0)
    visual = open_clip.transformer.VisionTransformer(SIZE, PATCH, width, layers, width // 64, 4.0, output_dim=DIM)
    return SimpleNamespace(visual=visual.eval().requires_grad_(False), name="random")


def step(module: nn.Module, given: Tensor) -> Callable[[], None]:
    """Run forward and backward of a module over one batch."""

    def run() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        module(given).square().sum().backward()

    return run


class Whole(nn.Module):
    """Bottlenecks in all blocks, over images."""

    def __init__(self, tower: Any, depth: int, row: tuple[int, ...]) -> None:
        super().__init__()
        self.tail, self._tower = FinetunedBlocks(last_blocks(tower, depth), FinetuneOptions(depth), row), (tower,)

    def forward(self, pictures: Tensor) -> Tensor:
        found: Tensor = self.tail(self._tower[0].visual._embeds(pictures))
        return found


def measure(batch: int, layers: int, width: int) -> dict[str, Any]:
    tower, pictures = encoder(layers, width), torch.randn(batch, 3, SIZE, SIZE)
    row = ((SIZE // PATCH) ** 2 + 1, width)
    with torch.no_grad(), capture_block_input(tower, 1) as seen:
        cls = tower.visual(pictures)
    works = {"0": step(Adapter(DIM, 64, 0.1, 0.1), cls)}
    tails = {depth: FinetunedBlocks(last_blocks(tower, depth), FinetuneOptions(depth), row) for depth in DEPTHS}
    works |= {str(depth): step(tail, seen[0].half()) for depth, tail in tails.items()}
    works["all"] = step(Whole(tower, layers, row), pictures)
    seconds = alternate(works, rounds=1, warm=0)
    return {
        "batch": batch,
        "threads": torch.get_num_threads(),
        "seconds_a_step": seconds,
        "bytes_an_image": {"0": 2 * DIM, **{str(depth): 2 * DIM + 2 * row[0] * row[1] for depth in tails}},
        "speedup_depth2": seconds["all"] / seconds["2"],
    }


def main() -> None:
    wanted = options(__doc__).parse_args()
    record = measure(2, LAYERS, WIDTH)
    emit(record) if wanted.json else say(str(record))


if __name__ == "__main__":
    main()
