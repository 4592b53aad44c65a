"""Which numbers of fine-tuned blocks a search tries, for how many epochs, and the time that this takes.

A *lineup* lists them. Without a time limit it depends on the encoder alone; timed steps only
predict its time. With a limit, the deepest one is taken of which a short training of each number
of blocks fits, and each training has its share of the time, with which its learning rate falls to 0.

    t(b, e) = e t_e(b) + 5 n_val f(b),    t_e(b) = t_h + n (g(b) + f(b))
    T(b, e) = e t_e(b) n_all / n + n_all i(b)

* t(b, e): seconds of a recipe with b blocks and e epochs;  T(b, e): of its final fit
* n, n_val, n_all: numbers of training, validation and all images
* g, f, i: seconds per image to train the blocks, to run them, and to compute their inputs
* t_h: seconds of an epoch of the prompts or heads beside them
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from duplex.encoders.base import Encoder
from duplex.encoders.image_blocks import block_input_shape, last_blocks
from duplex.errors import UsageError
from duplex.features.encode import WantedOutputs
from duplex.features.file import row_bytes
from duplex.methods.base import Batch
from duplex.system.files import write_text
from duplex.system.threads import bf16_products
from duplex.training.inputs import RunInputs
from duplex.training.loop import make_optimiser, optimiser_step
from duplex.training.run import MethodSpec, initialised_method

DEPTHS = (1, 2, 4, 8)  # numbers of fine-tuned blocks, the cheapest first
RATES = (3e-4, 1e-3)  # learning rates of fine-tuned blocks
EPOCHS = (3, 6, 12, 24)  # of a whole cosine with every number of blocks, then with the best
DISK_SHARE = 0.5  # of the free space that block inputs may take
TIMED_IMAGES = 64
TIMED_STEPS = 3
VAL_PASSES = 5  # over the validation images at the end of a training: epoch, score weights, bias, accuracies
Clock = Callable[[], float]


@dataclass(frozen=True)
class BlockRoom:
    """How many of an image tower's last blocks can be fine-tuned, and what limits the number."""

    depth: int  # the largest number of blocks of `DEPTHS`; 0: none
    reason: str


def finetunable_blocks(encoder: Encoder, images: int, folder: Path) -> BlockRoom:
    """Find how many last blocks can be fine-tuned at most, so that the disk of `folder` holds inputs."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    room = BlockRoom(0, "")
    for depth in DEPTHS:
        try:
            last_blocks(encoder, depth)
        except UsageError as error:
            return room if room.depth else BlockRoom(0, str(error).partition(";")[0])
        shapes = WantedOutputs(block_inputs=depth).row_shapes(encoder)
        size = sum(row_bytes(name, shape) for name, shape in shapes.items())
        if images * size > DISK_SHARE * free:
            blocks = "1 block" if depth == 1 else f"{depth} blocks"
            taken = f"inputs of {blocks} take {images * size / 1e9:.1f} of {free / 1e9:.1f} GB free"
            return replace(room, reason=taken)
        taken = f"their inputs take {images * size / 1e6:,.0f} MB of {free / 1e9:,.1f} GB free"
        room = BlockRoom(depth, taken)
    return room


@dataclass(frozen=True)
class BlockCost:
    """Measured seconds per image of an image tower's last blocks."""

    train: float  # forward and backward
    forward: float
    inputs: float = 0.0  # to compute their inputs from those of more blocks, before the first epoch


def block_cost(
    encoder: Encoder,
    blocks: int,
    cached: int,
    images: int = TIMED_IMAGES,
    clock: Clock = time.perf_counter,
    precision: str = "fp32",
) -> BlockCost:
    """Measure seconds per image to train the last blocks, and to run them, on random inputs.

    cached: number of last blocks that a pass runs; all before the last `blocks` are frozen.
    """
    cut = last_blocks(encoder, cached)
    x = torch.randn(images, *block_input_shape(encoder, cached), device=encoder.device)
    parameters = list(torch.nn.ModuleList(cut.blocks[cached - blocks :]).parameters())
    before = [parameter.requires_grad for parameter in parameters]

    def seconds(train: bool) -> float:
        start = clock()
        with torch.set_grad_enabled(train), bf16_products(precision, x.device):
            y = cut(x)
            if train:
                torch.autograd.grad(y.float().sum(), parameters, allow_unused=True)
            y.sum().item()  # waits for the device
        return (clock() - start) / images

    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        train = min(seconds(True) for _ in range(TIMED_STEPS))
        return BlockCost(train, min(seconds(False) for _ in range(TIMED_STEPS)))
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.requires_grad_(value)


def epoch_cost(spec: MethodSpec, inputs: RunInputs, device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Measure a few steps of a method without fine-tuned blocks; returns seconds per epoch."""
    images = replace(inputs, examples={**inputs.examples, "train": inputs.examples["train"].to(device)})
    method = initialised_method(spec.kind, spec.options, inputs.context(spec.trained_for), images, 0, device)
    if not method.groups():
        return 0.0
    train = images.examples["train"]
    labels = train.compositions.clone()
    batch = Batch(train.inputs, labels, labels.cpu().numpy())
    optimiser = make_optimiser(method.train(), spec.training)
    rows = torch.arange(min(spec.training.batch_size, len(batch)), device=device)
    taken = []
    for _ in range(1 + TIMED_STEPS):  # the first one allocates
        start = clock()
        losses = optimiser_step(method, batch, rows, spec.training, optimiser)
        torch.stack(list(losses.values())).sum().item()  # waits for the device
        taken.append(clock() - start)
    return min(taken[1:]) * len(batch) / len(rows)


@dataclass(frozen=True)
class ImageCounts:
    """Numbers of images, from which the time that a search takes is predicted."""

    train: int
    val: int
    final: int  # images of the final fit; 0: there is none


@dataclass(frozen=True)
class SearchCosts:
    """Predicted seconds of the recipes with fine-tuned blocks, by the formulas above."""

    images: ImageCounts
    blocks: Mapping[int, BlockCost]  # number of blocks -> cost, of those that can be fine-tuned
    epoch: float  # seconds of an epoch of the prompts or heads alone

    def epoch_of(self, blocks: int) -> float:
        each = self.blocks[blocks]
        return self.epoch + self.images.train * (each.train + each.forward)

    def recipe(self, blocks: int, epochs: float) -> float:
        """Seconds of a training with its validation: t(b, e)."""
        after = VAL_PASSES * self.images.val * self.blocks[blocks].forward
        return epochs * self.epoch_of(blocks) + after + self.images.final * self.blocks[blocks].inputs

    def final(self, blocks: int, epochs: float) -> float:
        """Seconds of the final fit: T(b, e)."""
        share = self.images.final / max(1, self.images.train)
        return epochs * share * self.epoch_of(blocks) + self.images.final * self.blocks[blocks].inputs

    def steps_share(self, blocks: int, epochs: int) -> float:
        """The share of `recipe` that its steps take: without inputs, the last pass and validation."""
        last_pass = self.images.train * self.blocks[blocks].forward
        return (epochs * self.epoch_of(blocks) - last_pass) / self.recipe(blocks, epochs)

    def short(self, depths: Sequence[int], rates: int) -> float:
        """Seconds of the short trainings: of the first number of blocks one per rate, of the others one."""
        return sum(self.recipe(blocks, EPOCHS[0]) * (rates if place == 0 else 1) for place, blocks in enumerate(depths))


@dataclass(frozen=True)
class Lineup:
    """The numbers of fine-tuned blocks and learning rates that a search tries."""

    depths: tuple[int, ...]  # numbers of blocks to fine-tune, one after another
    rates: tuple[float, ...]  # learning rates to try at the first depth

    def describe(self) -> str:
        """The trainings in words."""
        if not self.depths:
            return "no blocks"
        *others, last = map(str, self.depths)
        blocks = f"{', '.join(others)} and {last}" if others else last
        return f"{blocks} block{'s' * (self.depths != (1,))}, {EPOCHS[0]} epochs each, then the best for longer"


def whole_lineup(depth: int) -> Lineup:
    """All numbers of blocks up to `depth`, which take however long they take."""
    depths = tuple(blocks for blocks in DEPTHS if blocks <= depth)
    return Lineup(depths, RATES if depths else ())


def lineup_within(seconds: float, costs: SearchCosts) -> Lineup:
    """The lineup with the most blocks whose short trainings and final fit take `seconds` at most.

    Several numbers of blocks are compared where there is also time for a longer training of the
    last. If even one block takes longer, it is tried all the same, in fewer steps.
    """
    possible = tuple(costs.blocks)
    for end in range(len(possible), 0, -1):
        last = possible[end - 1]
        for depths, rates in _depth_choices(possible[:end], len(RATES)):
            least = costs.short(depths, rates) + costs.final(last, EPOCHS[0])
            if len(depths) * rates > 1:
                least = costs.short(depths, rates) + costs.recipe(last, EPOCHS[1]) + costs.final(last, EPOCHS[1])
            if least <= seconds:
                return Lineup(depths, RATES[:rates])
    return Lineup(possible[:1], RATES[:1] if possible else ())


def _depth_choices(depths: tuple[int, ...], rates: int) -> list[tuple[tuple[int, ...], int]]:
    ends = (depths[0], depths[-1])
    choices = [(depths, rates), (depths, 1)]
    if len(depths) > 2:
        choices += [(ends, rates), (ends, 1)]
    return [*choices, (depths[-1:], 1)]


def time_range(lineup: Lineup, costs: SearchCosts) -> tuple[float, float]:
    """Predicted seconds of a whole lineup: if longer trainings gain nothing, and if all gain."""
    if not lineup.depths:
        return 0.0, 0.0
    last = lineup.depths[-1]
    short = costs.short(lineup.depths, len(lineup.rates))
    least = short + costs.recipe(last, EPOCHS[1]) + costs.final(last, EPOCHS[0])
    longer = sum(costs.recipe(last, epochs) for epochs in EPOCHS[1:])
    return least, short + longer + costs.final(last, EPOCHS[-1])


def duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 60 else f"{seconds / 60:.1f} minutes"


def stored_lineup(path: Path, make: Callable[[], tuple[Lineup, SearchCosts]]) -> tuple[Lineup, SearchCosts]:
    """Read a search's lineup and the times measured for it; without a file, store those of `make()`."""
    if not path.is_file():
        lineup, costs = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"lineup": asdict(lineup), "costs": asdict(costs)}) + "\n")
    record = json.loads(path.read_text(encoding="utf-8"))
    lists = {name: tuple(values) for name, values in record["lineup"].items()}
    costs = record["costs"]
    blocks = {int(number): BlockCost(**each) for number, each in costs["blocks"].items()}
    return Lineup(**lists), SearchCosts(ImageCounts(**costs["images"]), blocks, costs["epoch"])
