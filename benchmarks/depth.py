"""Measure the cost of fine-tuning blocks: seconds per training step and bytes per image, at ViT-L/14 size.

python -m benchmarks.depth [--json] [--depths 0,1,2,4] [--batch 2] [--rounds 1] [--images 6] [--layers 24]
                           [--width 1024] [--budget 128]

Weights are random. A step is the image side alone, forward and backward: the feature adapter (0 blocks), bottlenecks in
the last k blocks over cached block inputs, and in all blocks over images (`all`). `speedup_depth2` is the step of `all`
divided by that of two blocks; `share_of_memory` an epoch over block inputs in memory divided by the same from disk,
without the system's page cache; `peak_share_of_budget` the peak memory of reading an epoch, as a share of a budget in
MiB (`training.memory`): over block inputs that fit into it, and over twice as many.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import alternate, begin_peak, emit, memory, say
from benchmarks.tokens import drop_pages, write
from duplex.encoders.image_blocks import capture_block_input, last_blocks
from duplex.encoders.openclip import VisionTransformer
from duplex.features.layout import row_bytes
from duplex.features.tokens import DiskTokens, read_tokens
from duplex.layers.factors import Adapter
from duplex.layers.finetuned_blocks import FinetunedBlocks
from duplex.methods.base import Batch
from duplex.options import FinetuneOptions
from duplex.training.epoch import prefetch

DIM, SIZE, PATCH = 768, 224, 14


def encoder(layers: int, width: int) -> Any:
    """Return a frozen image tower with random weights."""
    torch.manual_seed(0)
    visual = VisionTransformer(SIZE, PATCH, width, layers, width // 64, 4.0, output_dim=DIM)
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


def streamed_share(
    tail: FinetunedBlocks, row: tuple[int, ...], images: int, batch: int, folder: Path
) -> dict[str, float]:
    """Return the time of an epoch over block inputs in memory, divided by that from disk."""
    path, own = folder / "features.h5", torch.zeros(images, dtype=torch.long)
    write(path, images, row, 4, "block_inputs")
    held = DiskTokens.open(path, "block_inputs")[slice(None)]
    order = DiskTokens.open(path, "block_inputs").shuffled_rows(torch.Generator().manual_seed(0)).split(batch)

    def epoch(tokens: Any) -> None:
        for some, chosen in prefetch(Batch({"block_inputs": tokens}, own), order):
            step(tail, some[chosen].inputs["block_inputs"])()

    def from_disk() -> None:
        drop_pages(path)
        epoch(DiskTokens.open(path, "block_inputs"))

    seconds = alternate({"memory": lambda: epoch(held), "disk": from_disk}, rounds=1, warm=1)
    return {"share_of_memory": seconds["memory"] / seconds["disk"], "file_bytes": path.stat().st_size}


def peak_share(row: tuple[int, ...], batch: int, budget: int, images: int, folder: Path) -> float:
    """Return the peak memory of reading an epoch of `images`, as a share of the budget."""
    path, own = folder / "read.h5", torch.zeros(images, dtype=torch.long)
    write(path, images, row, 4, "block_inputs")
    order = DiskTokens.open(path, "block_inputs").shuffled_rows(torch.Generator().manual_seed(0)).split(batch)
    drop_pages(path)
    begin = begin_peak()
    read = read_tokens(path, "block_inputs", budget)
    tokens: Any = read if isinstance(read, DiskTokens) else torch.from_numpy(read)
    for some, chosen in prefetch(Batch({"block_inputs": tokens}, own), order):
        some[chosen]
    path.unlink()
    return (memory("VmHWM") - begin) / budget


def measure(
    depths: list[int], batch: int, rounds: int, images: int, layers: int, width: int, budget: int
) -> dict[str, Any]:
    tower, pictures = encoder(layers, width), torch.randn(batch, 3, SIZE, SIZE)
    row = ((SIZE // PATCH) ** 2 + 1, width)
    with torch.no_grad(), capture_block_input(tower, 1) as seen:
        cls = tower.visual(pictures)
    works = {"0": step(Adapter(DIM, 64, 0.1, 0.1), cls)}
    tails = {
        depth: FinetunedBlocks(last_blocks(tower, depth), FinetuneOptions(depth), row) for depth in depths if depth
    }
    works |= {str(depth): step(tail, seen[0].half()) for depth, tail in tails.items()}
    works["all"] = step(Whole(tower, layers, row), pictures)
    seconds = alternate(works, rounds=rounds, warm=1 if rounds > 1 else 0)
    record: dict[str, Any] = {
        "batch": batch,
        "threads": torch.get_num_threads(),
        "seconds_a_step": seconds,
        "bytes_an_image": {"0": 2 * DIM, **{str(depth): 2 * DIM + 2 * row[0] * row[1] for depth in tails}},
    }
    if 2 in tails:
        record["speedup_depth2"] = seconds["all"] / seconds["2"]
        with tempfile.TemporaryDirectory() as folder:
            record |= streamed_share(tails[2], row, images, batch, Path(folder))
            size, fit = budget << 20, (budget << 20) // row_bytes("block_inputs", row)
            record["peak_share_of_budget"] = {
                name: peak_share(row, batch, size, images, Path(folder))
                for name, images in (("held", fit), ("streamed", 2 * fit))
            }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--depths", default="0,1,2,4")
    for name, value in {"batch": 2, "rounds": 1, "images": 6, "layers": 24, "width": 1024, "budget": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    wanted, start = parser.parse_args(), time.perf_counter()
    depths = [int(depth) for depth in wanted.depths.split(",")]
    sizes = (wanted.batch, wanted.rounds, wanted.images, wanted.layers, wanted.width, wanted.budget)
    record = measure(depths, *sizes)
    say(f"{record} in {time.perf_counter() - start:.0f} s")
    if wanted.json:
        emit(record)


if __name__ == "__main__":
    main()
