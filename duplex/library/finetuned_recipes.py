"""Plan which training recipes with fine-tuned blocks a search tries within a time limit.

A recipe is one way to train: a number of last blocks of the encoder's image tower to fine-tune together with the
method, and the blocks' learning rate. `finetunable_blocks` finds how many blocks can be fine-tuned at all, `block_cost`
times these on random inputs, and `plan_search` chooses from these times the recipes that fit into the limit.

The times are measured once, before any training, and callers store the plan. Thus an interrupted search continues with
the same recipes, even if the machine is faster or slower then.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from duplex.encoders import Encoder
from duplex.encoders.image_blocks import block_input_shape, last_blocks
from duplex.errors import UsageError
from duplex.features.encoding import OutputSpec
from duplex.features.layout import row_bytes
from duplex.library.recipe_search import Recipe
from duplex.library.run_training import MethodSpec
from duplex.options import FinetuneOptions

DEPTHS = (1, 2, 4, 8)  # numbers of fine-tuned blocks, the cheapest first
RATES = (3e-4, 1e-3)  # learning rates of fine-tuned blocks
EPOCHS = 6  # of a recipe with fine-tuned blocks, along half a cosine
PATIENCE = 3  # epochs without a better validation AUC
DISK_SHARE = 0.5  # of the free space that block inputs may take
TIMED_IMAGES = 64


def finetuned_recipes(spec: MethodSpec, depths: Iterable[int], rates: Iterable[float] = RATES) -> list[list[Recipe]]:
    """Return training recipes (settings to compare) that train a method and the image tower's last blocks together.

    The result has one list per number of blocks in `depths`, with one recipe per learning rate in `rates`.

    spec: the method and its training options, of which recipes change only the schedule: at most `EPOCHS` epochs,
        in which learning rates fall along half a cosine.
    """
    training = replace(spec.training, epochs=EPOCHS, schedule="cosine", warm_up=0, patience=PATIENCE)
    levels = []
    for blocks in depths:
        level = []
        for rate in rates:
            options = FinetuneOptions(blocks=blocks, adapter="full", learning_rate=rate)
            name = f"{blocks} block{'s' * (blocks > 1)}, rate {rate:g}"
            level.append(Recipe(name, replace(spec, training=training, finetune=options)))
        levels.append(level)
    return levels


@dataclass(frozen=True)
class BlockRoom:
    """Result of `finetunable_blocks`: how many last blocks of an image tower can be fine-tuned, and why not more."""

    depth: int  # the largest number of blocks of `DEPTHS`; 0: none
    image_bytes: int  # bytes per image that the inputs of `depth` blocks take in the cache
    reason: str


def finetunable_blocks(encoder: Encoder, images: int, folder: Path, depths: Sequence[int] = DEPTHS) -> BlockRoom:
    """Return the largest number of last blocks of the image tower that can be fine-tuned, and what limits it.

    Fine-tuning reads the activations that enter these blocks from a cache, computed once per image. So the tower must
    be of a kind that can be cut before the blocks, and the cache of all images must fit into half of the disk's free
    space.

    images: number of images.
    folder: where the cache will be; it need not exist.
    depths: numbers of blocks to consider, the smallest first.
    """
    free = shutil.disk_usage(_existing(folder)).free
    room = BlockRoom(0, 0, "")
    for depth in depths:
        try:
            last_blocks(encoder, depth)
        except UsageError as error:
            return room if room.depth else BlockRoom(0, 0, str(error).partition(";")[0])
        shapes = OutputSpec(block_inputs=depth).row_shapes(encoder)
        size = sum(row_bytes(name, shape) for name, shape in shapes.items())
        if images * size > DISK_SHARE * free:
            reason = f"inputs of {depth} block{'s' * (depth > 1)} take {images * size / 1e9:.1f} of {free / 1e9:.1f}"
            return replace(room, reason=f"{reason} GB free")
        room = BlockRoom(depth, size, f"their inputs take {images * size / 1e6:,.0f} MB of {free / 1e9:,.1f} GB free")
    return room


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


@dataclass(frozen=True)
class BlockCost:
    """Measured seconds per image to train the last blocks of an image tower, and to run them without training."""

    train: float  # forward and backward
    forward: float
    inputs: float = 0.0  # to compute the blocks' inputs from cached inputs of more blocks, once before the first epoch


def block_cost(encoder: Encoder, blocks: int, cached: int, images: int = TIMED_IMAGES) -> BlockCost:
    """Measure the seconds per image to train the last blocks of an image tower, and to run them without training.

    Random numbers stand in for the blocks' inputs. The fastest of three passes counts.

    blocks: number of last blocks that are trained.
    cached: number of last blocks that a pass runs, at least `blocks`: all blocks after the activations that the
        feature cache stores. Blocks that are not trained are frozen.
    images: number of images per pass.
    """
    cut = last_blocks(encoder, cached)
    x = torch.randn(images, *block_input_shape(encoder, cached), device=encoder.device)
    parameters = [parameter for block in cut.blocks[cached - blocks :] for parameter in block.parameters()]
    before = [parameter.requires_grad for parameter in parameters]

    def seconds(train: bool) -> float:
        start = time.perf_counter()
        with torch.set_grad_enabled(train):
            y = cut(x)
            if train:
                torch.autograd.grad(y.float().sum(), parameters, allow_unused=True)
            y.sum().item()  # waits for the device
        return (time.perf_counter() - start) / images

    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        return BlockCost(*(min(seconds(train) for _ in range(3)) for train in (True, False)))
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.requires_grad_(value)


@dataclass(frozen=True)
class SearchPlan:
    """Numbers of fine-tuned blocks and learning rates that a search tries in a time limit, with its predicted time."""

    depths: tuple[int, ...]  # numbers of blocks to fine-tune, one after another
    rates: tuple[float, ...]  # learning rates to try at the first depth
    seconds: float  # predicted time, if all recipes are tried and the last is chosen
    reason: str  # for the user

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> SearchPlan:
        return cls(tuple(record["depths"]), tuple(record["rates"]), record["seconds"], record["reason"])


@dataclass(frozen=True)
class ImageCounts:
    """Numbers of images for training, validation and the final fit to all images, to predict a search's duration."""

    train: int
    val: int
    final: int  # images of the final fit; 0: there is none


def plan_search(
    depth: int,
    cost: Callable[[int], BlockCost],
    sizes: ImageCounts,
    budget: float,
    epoch_seconds: float,
    rates: Sequence[float] = RATES,
) -> SearchPlan:
    """Choose the numbers of fine-tuned blocks and the learning rates that a search tries within `budget` seconds.

    The predicted time is that of training every recipe of the plan (a number of blocks at a learning rate), and of a
    final fit to all images with the last recipe. The plan goes up to the largest number of blocks that the time allows.
    It also tries all smaller numbers if there is time for them, and all learning rates rather than only the first. If
    there is no time for even one block, the plan is empty and has the reason.

    depth: the largest number of blocks that can be fine-tuned (`finetunable_blocks`).
    cost: function that returns the `BlockCost` of a number of blocks.
    sizes: numbers of training and validation images and of the final fit.
    epoch_seconds: duration of an epoch without fine-tuned blocks.
    rates: learning rates to try at the smallest number of blocks of the plan.
    """
    costs = {blocks: cost(blocks) for blocks in DEPTHS if blocks <= depth}

    def predicted(depths: Sequence[int], tried: int) -> float:
        total = 0.0
        for place, blocks in enumerate(depths):
            each = costs[blocks]
            epoch = epoch_seconds + sizes.train * (each.train + each.forward) + sizes.val * each.forward
            total += EPOCHS * epoch * (tried if place == 0 else 1) + sizes.final * each.inputs
        last, share = costs[depths[-1]], sizes.final / max(1, sizes.train)
        return total + EPOCHS * (share * epoch_seconds + sizes.final * (last.train + last.forward))

    possible = tuple(costs)
    for end in range(len(possible), 0, -1):
        for depths, tried in _depth_choices(possible[:end], len(rates)):
            if (seconds := predicted(depths, tried)) <= budget:
                listed = ", ".join(map(str, depths))
                return SearchPlan(depths, tuple(rates[:tried]), seconds, f"blocks {listed}: about {_duration(seconds)}")
    if not possible:
        return SearchPlan((), (), 0.0, "no block of the encoder can be fine-tuned")
    least = min(predicted((blocks,), 1) for blocks in possible)
    left = _duration(max(budget, 0.0))
    return SearchPlan((), (), 0.0, f"fine-tuning takes at least {_duration(least)}, and {left} are left")


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} seconds" if seconds < 60 else f"{seconds / 60:.1f} minutes"


def _depth_choices(depths: tuple[int, ...], rates: int) -> list[tuple[tuple[int, ...], int]]:
    """Return possible searches for the number of fine-tuned blocks, the most thorough first.

    A search is (numbers of blocks to try, number of learning rates to try at the smallest of them). The first search
    tries all of `depths`, later ones fewer; the last search tries only the last of `depths`.

    rates: number of learning rates to choose from.
    """
    choices = [(depths, rates), (depths, 1)]
    if len(depths) > 2:
        choices += [((depths[0], depths[-1]), rates), ((depths[0], depths[-1]), 1)]
    return [*choices, (depths[-1:], 1)]
