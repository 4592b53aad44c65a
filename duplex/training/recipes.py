"""The search over recipes, by which `finetune: auto` and `duplex fit` choose how much to train.

A *recipe* is a trial of such a search: nothing trained, prompts, or prompts with one, two, four …
fine-tuned blocks of the image tower, tried in this order. A recipe replaces the best one so far if
its validation AUC is higher by more than the standard error of the difference,

    AUC' - AUC > SE(AUC' - AUC),    by DeLong's formula over the same validation images.

Recipes with fine-tuned blocks are first compared with each other, after the same two epochs of
each; any gain decides. All learning rates are tried at the smallest number of blocks only. Two
numbers of blocks in a row without a gain are the last. Only the best of these recipes is trained
to its end and compared with those without blocks. If its last epoch was its best, it is trained
for twice as many epochs, as long as time is left and validation AUC rises.

A *lineup* says which recipes with fine-tuned blocks fit into a time limit. It is stored: an
interrupted search continues with the same recipes, even if the machine is faster or slower then.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from duplex.config.params import MethodEntry, load_params, shipped_project
from duplex.encoders.base import Encoder, load_encoder
from duplex.encoders.image_blocks import block_input_shape, last_blocks
from duplex.errors import DuplexError, UsageError
from duplex.features.encode import WantedOutputs
from duplex.features.file import row_bytes
from duplex.methods.registry import parse_options
from duplex.options import AutoFinetune, FinetuneOptions, TrainingOptions
from duplex.system.files import write_text
from duplex.training.run import MethodSpec, TrainedMethod
from duplex.training.trials import Trial, TrialResult, Trials

FAILURES = 2  # numbers of blocks in a row without a gain, after which the search ends


@dataclass(frozen=True)
class RecipeChoice:
    """Outcome of a search: the chosen recipe, and a table of all recipes tried."""

    recipe: Trial
    table: tuple[dict[str, Any], ...]  # one row per attempt, in order: `recipe_row`


@dataclass(frozen=True)
class Attempt:
    """A recipe that was tried, with its result."""

    recipe: Trial
    result: TrialResult


TryRecipe = Callable[[Trial, Attempt | None], Attempt]  # also compares it with an earlier attempt
AUC = attrgetter("result.auc")


def search_recipes(
    frozen: Iterable[Sequence[Trial]],
    finetuned: Iterable[Sequence[Trial]],
    train: Callable[[Trial], TrialResult],
    report: Callable[[str], None],
) -> RecipeChoice:
    """Try recipes, the cheapest first, and choose one by validation AUC and the rules above.

    frozen: lists of recipes of equal cost, such as two learning rates, without fine-tuned blocks.
    finetuned: lists of recipes with a number of fine-tuned blocks; read after `frozen` is tried.
    """
    table: list[dict[str, Any]] = []

    def attempt(recipe: Trial, other: Attempt | None) -> Attempt:
        result = train(recipe)
        row = recipe_row(recipe, result, None if other is None else other.result)
        table.append(row)
        report(recipe_line(row, result))
        return Attempt(recipe, result)

    best = best_frozen(frozen, attempt)
    leader = best_depth(finetuned, best, attempt)
    if leader is not None:
        best = extend(leader, best, attempt)
    for row in table:
        row["chosen"] = row["recipe"] == best.recipe.name
    return RecipeChoice(best.recipe, tuple(table))


def best_frozen(levels: Iterable[Sequence[Trial]], attempt: TryRecipe) -> Attempt:
    """Try all recipes; returns the last whose gain over cheaper ones exceeds the gain's error."""
    best: Attempt | None = None
    for level in levels:
        gaining = [attempt(recipe, best) for recipe in level]
        if best is not None:
            cheaper = best.result
            gaining = [each for each in gaining if gain_exceeds_error(each.result, cheaper)]
        best = max(gaining, key=AUC, default=best)
    if best is None:
        raise DuplexError("there is no recipe to try; give at least one")
    return best


def best_depth(levels: Iterable[Sequence[Trial]], frozen: Attempt, attempt: TryRecipe) -> Attempt | None:
    """Try recipes with fine-tuned blocks up to their pause; returns the best, None without any."""
    best: Attempt | None = None
    failures = 0
    for level in levels:
        recipes = [recipe for recipe in level if best is None or recipe.rate == best.recipe.rate]
        top = max((attempt(recipe, best or frozen) for recipe in recipes), key=AUC)
        failures += 1
        if best is None or top.result.auc > best.result.auc:
            best = top
            failures = 0
        if failures == FAILURES:
            break
    return best


def extend(paused: Attempt, frozen: Attempt, attempt: TryRecipe) -> Attempt:
    """Train a paused recipe to its end, then longer as long as AUC rises; returns the best."""
    best = frozen
    for recipe in paused.recipe.longer:
        longer = attempt(recipe, best)
        gains = longer.result.auc > best.result.auc
        if best is frozen:
            gains = gain_exceeds_error(longer.result, best.result)
        if not gains:
            break
        best = longer
        if best.result.epoch < recipe.spec.training.epochs:
            break
    return best


def gain_exceeds_error(dearer: TrialResult, cheaper: TrialResult) -> bool:
    """Whether the costlier trial's AUC is higher by more than the difference's standard error."""
    difference = dearer.components.minus(cheaper.components)
    gain, error = difference.auc, difference.standard_error
    return gain is not None and gain > (error or 0.0)


def recipe_row(recipe: Trial, result: TrialResult, best: TrialResult | None) -> dict[str, Any]:
    """A recipe's row in the table: validation AUC in percent, gain over `best`, their errors."""
    own = result.components
    row: dict[str, Any] = {"recipe": recipe.name, "blocks": recipe.blocks}
    if recipe.blocks:
        row["rate"] = recipe.rate
        row["epochs"] = recipe.pause or recipe.spec.training.epochs
    row |= {"auc": result.auc, "error": _percent(own.standard_error)}
    if best is not None:
        difference = own.minus(best.components)
        row |= {"gain": result.auc - best.auc, "gain_error": _percent(difference.standard_error)}
    return row | {"accuracy": result.accuracy, "epoch": result.epoch, "chosen": False}


def recipe_line(row: Mapping[str, Any], result: TrialResult) -> str:
    """One line of text about a recipe that was tried: validation AUC, accuracy, gain, seconds."""
    parts = [f"{row['recipe']:<31} validation AUC {row['auc']:5.1f}"]
    if row["accuracy"] is not None:
        parts.append(f"accuracy {row['accuracy']:5.1f} %")
    if "gain" in row:
        error = row["gain_error"]
        parts.append(f"{row['gain']:+.1f}" + ("" if error is None else f" ± {error:.1f}"))
    return ", ".join([*parts, f"{result.seconds:.0f} s"])


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


NOTHING_TRAINED = "closed_form"  # methods of the package's params.yaml
TRAINED = "dual"
RIVAL = "linear"  # two logistic regressions, measured beside the model
# For encoders without a text tower
WITHOUT_TEXT = {NOTHING_TRAINED: "closed_form_visual", TRAINED: "dual_visual"}
FROZEN_RATES = (1e-3, 1e-4)  # learning rates of prompts or linear heads on frozen features
FROZEN_EPOCHS = 8  # of these, along half a cosine
BATCH = 64
WIDE_TEXT = 512  # width of a text tower from which several threads train prompts faster


@dataclass(frozen=True)
class SearchSpace:
    """The recipes that `duplex fit` tries; linear heads replace prompts without a text tower."""

    text_width: int  # of the text tower's token embeddings; 0: the encoder has no text tower

    @property
    def kinds(self) -> list[str]:
        """The kinds of methods that are trained, with that of the rival."""
        return [self._entry(name).kind for name in (NOTHING_TRAINED, TRAINED, RIVAL)]

    @property
    def rival(self) -> Trial:
        return Trial("two logistic regressions", self._spec(RIVAL))

    @property
    def nothing_trained(self) -> Trial:
        return Trial("nothing trained", self._spec(NOTHING_TRAINED))

    @property
    def prompts(self) -> list[Trial]:
        """Recipes that train prompts or heads on frozen features, one per learning rate."""
        name = "prompts, rate" if self.text_width else "heads, rate"
        return [Trial(f"{name} {rate:g}", self._spec(TRAINED, rate)) for rate in FROZEN_RATES]

    def finetuned(self, lineup: Lineup) -> list[list[Trial]]:
        """Recipes with fine-tuned blocks beside prompts, which then train at their higher rate."""
        spec = self.prompts[0].spec
        spec = replace(spec, training=replace(spec.training, threads=torch.get_num_threads()))
        return finetuned_recipes(spec, lineup.depths, lineup.rates, lineup.epochs)

    def _entry(self, name: str) -> MethodEntry:
        name = name if self.text_width else WITHOUT_TEXT.get(name, name)
        return load_params(shipped_project() / "params.yaml").methods[name]

    def _spec(self, name: str, rate: float = FROZEN_RATES[0]) -> MethodSpec:
        entry = self._entry(name)
        training = TrainingOptions(
            learning_rate=rate,
            batch_size=BATCH,
            epochs=FROZEN_EPOCHS,
            schedule="cosine",
            patience=FROZEN_EPOCHS // 2,
            threads=1 if self.text_width < WIDE_TEXT else torch.get_num_threads(),
        )
        options = parse_options(entry.kind, entry.options_for(None))
        return MethodSpec(name, entry.kind, options, training, ("closed",), "closed")


DEPTHS = (1, 2, 4, 8)  # numbers of fine-tuned blocks, the cheapest first
RATES = (3e-4, 1e-3)  # learning rates of fine-tuned blocks
EPOCHS = (6, 12, 24)  # of a recipe with fine-tuned blocks; more than the first only of the best
PAUSE = 2  # epochs after which recipes with fine-tuned blocks are compared
DISK_SHARE = 0.5  # of the free space that block inputs may take
TIMED_IMAGES = 64


def finetuned_recipes(
    spec: MethodSpec,
    depths: Iterable[int],
    rates: Iterable[float] = RATES,
    epochs: Sequence[int] = EPOCHS[:1],
    seed: int = 0,
) -> list[list[Trial]]:
    """Lists of recipes with a number of fine-tuned blocks, paused after two epochs, one per rate.

    epochs: numbers of epochs of a recipe's complete trainings (`Trial.longer`).
    """

    def recipe(blocks: int, rate: float) -> Trial:
        options = FinetuneOptions(blocks=blocks, adapter="full", learning_rate=rate)
        name = f"{blocks} block{'s' * (blocks > 1)}, rate {rate:g}"
        whole = []
        for number in epochs:
            training = replace(spec.training, epochs=number, schedule="cosine", patience=number // 2, validate_every=1)
            tuned = replace(spec, training=training, finetune=options)
            whole.append(Trial(f"{name}, {number} epochs", tuned, seed))
        return Trial(f"{name}, epoch {PAUSE}", whole[0].spec, seed, PAUSE, tuple(whole))

    return [[recipe(blocks, rate) for rate in rates] for blocks in depths]


@dataclass(frozen=True)
class BlockRoom:
    """How many of an image tower's last blocks can be fine-tuned, and what limits the number."""

    depth: int  # the largest number of blocks of `DEPTHS`; 0: none
    image_bytes: int  # bytes per image that the inputs of `depth` blocks take in the cache
    reason: str


def finetunable_blocks(encoder: Encoder, images: int, folder: Path) -> BlockRoom:
    """Find how many last blocks can be fine-tuned at most, so that the disk of `folder` holds inputs."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    room = BlockRoom(0, 0, "")
    for depth in DEPTHS:
        try:
            last_blocks(encoder, depth)
        except UsageError as error:
            return room if room.depth else BlockRoom(0, 0, str(error).partition(";")[0])
        shapes = WantedOutputs(block_inputs=depth).row_shapes(encoder)
        size = sum(row_bytes(name, shape) for name, shape in shapes.items())
        if images * size > DISK_SHARE * free:
            blocks = "1 block" if depth == 1 else f"{depth} blocks"
            taken = f"inputs of {blocks} take {images * size / 1e9:.1f} of {free / 1e9:.1f} GB free"
            return replace(room, reason=taken)
        taken = f"their inputs take {images * size / 1e6:,.0f} MB of {free / 1e9:,.1f} GB free"
        room = BlockRoom(depth, size, taken)
    return room


@dataclass(frozen=True)
class BlockCost:
    """Measured seconds per image of an image tower's last blocks."""

    train: float  # forward and backward
    forward: float
    inputs: float = 0.0  # to compute their inputs from those of more blocks, before the first epoch


def block_cost(encoder: Encoder, blocks: int, cached: int, images: int = TIMED_IMAGES) -> BlockCost:
    """Measure seconds per image to train the last blocks, and to run them, on random inputs.

    cached: number of last blocks that a pass runs; all before the last `blocks` are frozen.
    """
    cut = last_blocks(encoder, cached)
    x = torch.randn(images, *block_input_shape(encoder, cached), device=encoder.device)
    parameters = list(torch.nn.ModuleList(cut.blocks[cached - blocks :]).parameters())
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
        train = min(seconds(True) for _ in range(3))
        return BlockCost(train, min(seconds(False) for _ in range(3)))
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.requires_grad_(value)


@dataclass(frozen=True)
class Lineup:
    """Numbers of fine-tuned blocks and learning rates that a search tries, and the time."""

    depths: tuple[int, ...]  # numbers of blocks to fine-tune, one after another
    rates: tuple[float, ...]  # learning rates to try at the first depth
    epochs: tuple[int, ...]  # of the best recipe's trainings, one after another
    seconds: float  # predicted time, if all recipes are tried and the last is chosen
    reason: str  # for the user


@dataclass(frozen=True)
class ImageCounts:
    """Numbers of images, from which the time that a search takes is predicted."""

    train: int
    val: int
    final: int  # images of the final fit; 0: there is none


def choose_lineup(
    depth: int, cost: Callable[[int], BlockCost], sizes: ImageCounts, budget: float, epoch_seconds: float
) -> Lineup:
    """Choose the numbers of fine-tuned blocks and learning rates to try in `budget` seconds.

    Of the numbers `DEPTHS` up to `depth`, the largest that fits is always tried. Time left goes to
    smaller ones (all, or only the smallest), then to more learning rates for the smallest, and
    then to more epochs of the best. Times include a final fit with the largest.
    """
    costs = {blocks: cost(blocks) for blocks in DEPTHS if blocks <= depth}

    def predicted(depths: Sequence[int], tried: int, longest: int = 1) -> float:
        total = 0.0
        for place, blocks in enumerate(depths):
            each = costs[blocks]
            training = sizes.train * (each.train + each.forward)
            epoch = epoch_seconds + training + sizes.val * each.forward
            rates = tried if place == 0 else 1
            total += PAUSE * epoch * rates + sizes.final * each.inputs
        total += (sum(EPOCHS[:longest]) - PAUSE) * epoch  # of the largest
        share = sizes.final / max(1, sizes.train)
        final_epoch = share * epoch_seconds + sizes.final * (each.train + each.forward)
        return total + EPOCHS[longest - 1] * final_epoch

    possible = tuple(costs)
    for end in range(len(possible), 0, -1):
        for depths, tried in _depth_choices(possible[:end], len(RATES)):
            times = [predicted(depths, tried, number + 1) for number in range(len(EPOCHS))]
            fitting = [each for each in times if each <= budget]  # more epochs take longer
            if fitting:
                epochs = EPOCHS[: len(fitting)]
                listed = ", ".join(map(str, depths))
                reason = f"blocks {listed}, up to {epochs[-1]} epochs: at most {_duration(fitting[-1])}"
                return Lineup(depths, RATES[:tried], epochs, fitting[-1], reason)
    if not possible:
        return Lineup((), (), (), 0.0, "no block of the encoder can be fine-tuned")
    least = min(predicted((blocks,), 1) for blocks in possible)
    left = _duration(max(budget, 0.0))
    return Lineup((), (), (), 0.0, f"fine-tuning takes at least {_duration(least)}, and {left} are left")


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} seconds" if seconds < 60 else f"{seconds / 60:.1f} minutes"


def _depth_choices(depths: tuple[int, ...], rates: int) -> list[tuple[tuple[int, ...], int]]:
    """Numbers of blocks, and how many rates to try at the smallest; most thorough first."""
    ends = (depths[0], depths[-1])
    choices = [(depths, rates), (depths, 1)]
    if len(depths) > 2:
        choices += [(ends, rates), (ends, 1)]
    return [*choices, (depths[-1:], 1)]


def stored_lineup(folder: Path, minutes: float, make: Callable[[], Lineup]) -> Lineup:
    """Read a search's lineup for the limit `minutes`; without one, store that of `make()`."""
    path = folder / f"lineup-{minutes:g}.json"
    if not path.is_file():
        write_text(path, json.dumps(asdict(make())) + "\n")
    record = json.loads(path.read_text(encoding="utf-8"))
    lists = {name: tuple(record[name]) for name in ("depths", "rates", "epochs")}
    return Lineup(**{**record, **lists})


def search_block_counts(
    spec: MethodSpec, options: AutoFinetune, seed: int, trials: Trials, say: Callable[[str], None]
) -> TrainedMethod:
    """Train with several numbers of fine-tuned blocks and return the run that validation chooses."""

    def report(line: str) -> None:
        say(f"{trials.label}: {line}")

    first = Trial("0 blocks", spec, seed)
    lineup = stored_lineup(trials.folder, options.minutes, lambda: _lineup(first, options, trials))
    report(f"fine-tuning: {lineup.reason}")
    finetuned = finetuned_recipes(spec, lineup.depths, lineup.rates, lineup.epochs, seed)
    choice = search_recipes([[first]], finetuned, trials.result, report)
    report(f"chosen: {choice.recipe.name}")
    run = trials.run(choice.recipe)
    rows = tuple(
        {key: float(value) for key, value in row.items() if isinstance(value, int | float)} for row in choice.table
    )
    return replace(run, record=replace(run.record, recipes=rows))


def _lineup(first: Trial, options: AutoFinetune, trials: Trials) -> Lineup:
    inputs = trials.read(first.spec.request)
    depth = int(inputs.identity.get("block_inputs", 0))
    if not depth:
        raise UsageError(
            f"{first.spec.name} has `finetune: auto`, but the feature cache holds no block inputs; "
            "set the data set's encoder.block_inputs to the largest number of blocks to fine-tune, "
            "and run `duplex extract`"
        )
    encoder = inputs.encoder
    device = str(trials.device)
    tower = load_encoder(encoder["name"], encoder["tag"] or None, towers="image", device=device)
    last_blocks(tower, depth)  # raises for an encoder that cannot be cut
    counts = ImageCounts(len(inputs.examples["train"]), len(inputs.examples["val"]), 0)
    epoch = trials.result(first).epoch_seconds
    return choose_lineup(depth, lambda blocks: block_cost(tower, blocks, depth), counts, 60 * options.minutes, epoch)
