"""Choose by validation how much to train: nothing, prompts, then one, two, four … fine-tuned blocks of the image tower.

A training recipe is called a rung, and the search over rungs a climb. Rungs are trained in order of cost, the cheapest
first. A rung replaces the best one so far if its validation AUC is higher by more than the standard error of the
difference,

    AUC' - AUC > SE(AUC' - AUC),    by DeLong's formula over the same validation images.

The climb ends when two numbers of blocks in a row bring no such gain. Several learning rates are tried at the smallest
number of blocks, the lowest first; a higher rate is chosen by the same rule, and all larger numbers of blocks use the
chosen rate.

The choice does not depend on the clock: before any block is fine-tuned, `plan` times a few steps and lists the rungs
that fit into the time limit and the disk space. Callers store this plan, so that a resumed climb makes the same choice.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from duplex.encoders import Encoder
from duplex.encoders.image_blocks import block_input_shape, last_blocks
from duplex.errors import DuplexError, UsageError
from duplex.evaluation.curve import Margins
from duplex.evaluation.uncertainty import Components
from duplex.features.encoding import OutputSpec
from duplex.features.layout import row_bytes
from duplex.library.run_training import MethodSpec
from duplex.options import FinetuneOptions

DEPTHS = (1, 2, 4, 8)  # numbers of fine-tuned blocks, the cheapest first
RATES = (3e-4, 1e-3)  # learning rates of fine-tuned blocks
EPOCHS = 6  # of a fine-tuned rung, along half a cosine
PATIENCE = 3  # epochs without a better validation AUC
DISK_SHARE = 0.5  # of the free space that block inputs may take
TIMED_IMAGES = 64
FAILURES = 2  # numbers of blocks in a row without a gain, after which the climb ends


@dataclass(frozen=True)
class Rung:
    """Training recipe, compared with others by validation AUC: a method, its options and its fine-tuned blocks."""

    name: str  # for messages, such as `2 blocks, rate 0.0003`
    spec: MethodSpec

    @property
    def blocks(self) -> int:
        """Number of fine-tuned blocks."""
        return 0 if self.spec.finetune is None else self.spec.finetune.blocks


@dataclass(frozen=True)
class Attempt:
    """Validation result of a rung."""

    name: str
    margins: Margins  # of the validation images, closed world
    epoch: int  # the best one
    accuracy: float | None = None  # percent, of the most probable answers
    seconds: float = 0.0  # of training and validation
    seconds_per_epoch: float = 0.0

    @property
    def components(self) -> Components:
        return Components.of(self.margins)

    @property
    def auc(self) -> float:
        """Validation AUC in percent."""
        return 100 * (self.components.auc or 0.0)


@dataclass(frozen=True)
class Choice:
    """The chosen rung, its validation result, and the table of all rungs tried."""

    rung: Rung
    attempt: Attempt
    table: tuple[dict[str, Any], ...]  # one row per attempt, in order: `row_of`


def climb(
    levels: Iterable[Sequence[Rung]], attempt: Callable[[Rung], Attempt], report: Callable[[str], None] = lambda _: None
) -> Choice:
    """Try training recipes (rungs), the cheapest first, and return the chosen one.

    levels: lists of rungs of equal cost, such as two learning rates. Within a list, the first rung counts unless
        another one pays; the best rung of a later list replaces the choice so far if it pays.
    attempt: trains and validates a rung.
    report: called with one line per rung.
    """
    best: tuple[Rung, Attempt] | None = None
    table: list[dict[str, Any]] = []
    rates: set[float | None] | None = None  # those still tried; None: all
    failures = 0
    for level in levels:
        rungs = [rung for rung in level if rates is None or not rung.blocks or _rate(rung) in rates]
        tried = []
        for rung in rungs:
            result = attempt(rung)
            tried.append((rung, result))
            table.append(row_of(rung, result, None if best is None else best[1]))
            report(describe(table[-1], result))
        top = tried[0]
        for other in tried[1:]:
            top = other if pays(other[1], top[1]) else top
        adopted = best is None or pays(top[1], best[1])
        if adopted:
            best = top
            for row in table:
                row["chosen"] = row["rung"] == top[0].name
        if top[0].blocks:
            rates = {_rate(top[0])}
            failures = 0 if adopted else failures + 1
            if failures == FAILURES:
                break
    if best is None:
        raise DuplexError("there is no rung to try; expected at least one")
    return Choice(*best, tuple(table))


def pays(dearer: Attempt, cheaper: Attempt) -> bool:
    """Return whether the validation AUC of a costlier rung is higher by more than the difference's standard error."""
    difference = dearer.components.minus(cheaper.components)
    gain, error = difference.auc, difference.standard_error
    return gain is not None and gain > (error or 0.0)


def row_of(rung: Rung, result: Attempt, best: Attempt | None) -> dict[str, Any]:
    """Return a rung's row of the table of rungs: AUC in percent, its standard error, and the gain over `best`, the best
    cheaper rung."""
    own = result.components
    row: dict[str, Any] = {"rung": rung.name, "blocks": rung.blocks}
    row |= {"rate": _rate(rung)} if rung.blocks else {}
    row |= {"auc": result.auc, "error": _percent(own.standard_error)}
    if best is not None:
        difference = own.minus(best.components)
        row |= {"gain": result.auc - best.auc, "gain_error": _percent(difference.standard_error)}
    return row | {"accuracy": result.accuracy, "epoch": result.epoch, "chosen": False}


def describe(row: Mapping[str, Any], result: Attempt) -> str:
    """Return one line about a rung: validation AUC, accuracy, gain over the best cheaper rung, and seconds."""
    parts = [f"{row['rung']:<24} validation AUC {row['auc']:5.1f}"]
    if row["accuracy"] is not None:
        parts.append(f"accuracy {row['accuracy']:5.1f} %")
    if "gain" in row:
        error = row["gain_error"]
        parts.append(f"{row['gain']:+.1f}" + ("" if error is None else f" ± {error:.1f}"))
    return ", ".join([*parts, f"{result.seconds:.0f} s"])


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _rate(rung: Rung) -> float | None:
    return None if rung.spec.finetune is None else rung.spec.finetune.learning_rate


# -- rungs of fine-tuned blocks -----------------------------------------------------------------------------------


def finetuned_rungs(spec: MethodSpec, depths: Iterable[int], rates: Iterable[float] = RATES) -> list[list[Rung]]:
    """Return the levels of rungs that train a method together with 1, 2, 4 … blocks of the image tower."""
    training = replace(spec.training, epochs=EPOCHS, schedule="cosine", warm_up=0, patience=PATIENCE)
    levels = []
    for blocks in depths:
        level = []
        for rate in rates:
            options = FinetuneOptions(blocks=blocks, adapter="full", learning_rate=rate)
            name = f"{blocks} block{'s' * (blocks > 1)}, rate {rate:g}"
            level.append(Rung(name, replace(spec, training=training, finetune=options)))
        levels.append(level)
    return levels


@dataclass(frozen=True)
class BlockRoom:
    """Room for block inputs: how many of an encoder's last blocks can be fine-tuned, and why not more."""

    depth: int  # the largest number of blocks of `DEPTHS`; 0: none
    image_bytes: int  # bytes per image that the inputs of `depth` blocks take in the cache
    reason: str


def block_room(encoder: Encoder, images: int, folder: Path, depths: Sequence[int] = DEPTHS) -> BlockRoom:
    """Return how many of the image tower's last blocks can be fine-tuned.

    The tower must be one that can be cut before these blocks, and the blocks' inputs for all `images` must fit into
    half of the free space on the disk of `folder`, which need not exist. `depths`: numbers of blocks to consider, the
    smallest first.
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
            reason = f"inputs of {depth} block{'s' * (depth > 1)} take {images * size / 1e9:.1f} GB of {free / 1e9:.1f}"
            return replace(room, reason=f"{reason} GB free")
        room = BlockRoom(depth, size, f"{images * size / 1e6:,.0f} MB of {free / 1e9:,.1f} GB free")
    return room


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


# -- time ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockCost:
    """Seconds per image of the last blocks of an image tower."""

    train: float  # forward and backward
    forward: float
    inputs: float = 0.0  # to compute the blocks' inputs from cached inputs of more blocks, once before the first epoch


def block_cost(encoder: Encoder, blocks: int, cached: int, images: int = TIMED_IMAGES) -> BlockCost:
    """Return the seconds per image of fine-tuning an encoder's last `blocks` blocks, the fastest of three timed passes.

    cached: number of last blocks whose inputs the cache holds, so that each pass runs that many blocks.
    images: number of images per pass, all random numbers.
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
class Plan:
    """The training recipes with fine-tuned blocks (rungs) that fit into the time limit."""

    depths: tuple[int, ...]  # numbers of blocks to fine-tune, one after another
    rates: tuple[float, ...]  # learning rates to try at the first depth
    seconds: float  # predicted time, if all rungs are tried and the last is chosen
    reason: str  # for the user

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Plan:
        return cls(tuple(record["depths"]), tuple(record["rates"]), record["seconds"], record["reason"])


@dataclass(frozen=True)
class Sizes:
    """Numbers of images, from which the time of a climb is predicted."""

    train: int
    val: int
    final: int  # images of the final fit; 0: there is none


def plan(
    depth: int,
    cost: Callable[[int], BlockCost],
    sizes: Sizes,
    budget: float,
    epoch_seconds: float,
    rates: Sequence[float] = RATES,
) -> Plan:
    """Return the plan of the rungs that can all be tried, with a final fit of the last one, in `budget` seconds.

    The plan reaches the largest number of blocks that the time allows. Among such plans, one that tries all smaller
    numbers of blocks is preferred to one that skips some, and then one with all rates to one with the first rate only.

    depth: the largest possible number of blocks.
    cost: returns the time of a number of last blocks of the image tower.
    sizes: numbers of images.
    epoch_seconds: duration of an epoch without fine-tuned blocks.
    rates: learning rates to try at the smallest number of blocks.
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
        for depths, tried in _climbs(possible[:end], len(rates)):
            if (seconds := predicted(depths, tried)) <= budget:
                listed = ", ".join(map(str, depths))
                return Plan(depths, tuple(rates[:tried]), seconds, f"blocks {listed}: about {seconds / 60:.1f} minutes")
    if not possible:
        return Plan((), (), 0.0, "no block of the encoder can be fine-tuned")
    least = min(predicted((blocks,), 1) for blocks in possible)
    return Plan((), (), 0.0, f"fine-tuning takes at least {least / 60:.1f} minutes, {budget / 60:.1f} are left")


def _climbs(depths: tuple[int, ...], rates: int) -> list[tuple[tuple[int, ...], int]]:
    """Return the possible climbs to the last of `depths`, the most thorough first.

    A climb is (numbers of blocks to try, number of learning rates to try at the first of them).
    """
    climbs = [(depths, rates), (depths, 1)]
    if len(depths) > 2:
        climbs += [((depths[0], depths[-1]), rates), ((depths[0], depths[-1]), 1)]
    return [*climbs, (depths[-1:], 1)]


@contextmanager
def report_damage(folder: Path) -> Iterator[None]:
    """Raise a `DuplexError` that names `folder` if the `with` block cannot read the files of finished rungs in it."""
    try:
        yield
    except (DuplexError, OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError, BadZipFile
    ) as error:  # fmt: skip
        problem = str(error).partition(";")[0]  # what comes after is advice for other folders
        raise DuplexError(
            f"{folder} has a damaged file ({problem}); delete the folder and run the same command again"
        ) from error


def load_margins(path: Path) -> Margins:
    """Read margins that `save_margins` wrote."""
    with np.load(path) as arrays:
        return Margins(arrays["seen"], arrays["unseen"], arrays["is_seen"])


def save_margins(path: Path, margins: Margins) -> None:
    """Write margins as an .npz file."""
    np.savez(path, seen=margins.seen, unseen=margins.unseen, is_seen=margins.is_seen)
