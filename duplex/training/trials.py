"""Trials: trainings that are compared by validation, each in a folder named by a digest of settings, seed and data.

`duplex tune` tries a grid of trials. `finetune: auto` and `duplex fit` choose how much to train: nothing, prompts, then
one, two, four … fine-tuned blocks of the image tower. A trial whose files exist is not trained again, and an
interrupted one continues.

A *recipe* is a trial of such a search. Recipes are tried in order of cost, the cheapest first. A recipe replaces the
best one so far if its validation AUC is higher by more than the standard error of the difference,

    AUC' - AUC > SE(AUC' - AUC),    by DeLong's formula over the same validation images.

Of recipes with equal costs, such as two learning rates of prompts, the one with the highest AUC replaces it.

Recipes with fine-tuned blocks are first compared with each other, after the same two epochs of each. Any gain in AUC
decides, as recipes recognise images equally fast once they are trained. Several learning rates are tried at the
smallest number of blocks, and all larger numbers use the best of them. Two numbers of blocks in a row without a gain
are the last. Only the best of these recipes is trained to its end and compared with those without blocks. If its last
epoch was its best, it is trained again for twice as many epochs, as long as time is left and validation AUC rises.

A *schedule* says which recipes fit into a time limit. `finetunable_blocks` finds how many blocks can be fine-tuned at
all, `block_cost` times these on random inputs, and `choose_depths` chooses. The schedule is stored: an interrupted
search continues with the same recipes, even if the machine is faster or slower then.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from duplex.artifacts import RunPaths
from duplex.config.params import EvaluationParams
from duplex.encoders.base import Encoder, load_encoder
from duplex.encoders.image_blocks import block_input_shape, last_blocks
from duplex.errors import DuplexError, UsageError
from duplex.evaluation.curve import AucComponents, Margins
from duplex.features.encode import WantedOutputs
from duplex.features.file import row_bytes
from duplex.features.tokens import Examples
from duplex.methods.base import Method
from duplex.options import AutoFinetune, FinetuneOptions
from duplex.system.files import json_digest, write_text
from duplex.training.checkpoint import TrainingRecord, load_checkpoint, read_checkpoint_header, read_novelty
from duplex.training.inputs import InputRequest, RunInputs
from duplex.training.logs import TrainingHooks
from duplex.training.loop import ResumePoint, TrainingResult
from duplex.training.run import MethodSpec, Run, train_run


@dataclass(frozen=True)
class Trial:
    """A method with options and a seed, to be trained on the data set of a `Trials` store."""

    name: str  # for messages, such as `2 blocks, rate 0.0003`
    spec: MethodSpec
    seed: int = 0
    pause: int | None = None  # epoch after which training pauses; None: it is trained to its end
    longer: tuple[Trial, ...] = ()  # this recipe to its end, then with more epochs; tried if it is the best at `pause`

    @property
    def blocks(self) -> int:
        """How many of the image tower's last blocks are fine-tuned; 0: none."""
        return 0 if self.spec.finetune is None else self.spec.finetune.depth

    @property
    def slug(self) -> str:
        """The trial's name with hyphens instead of spaces and commas, for the name of a folder."""
        return re.sub(r"[^\w.]+", "-", self.name)

    @property
    def rate(self) -> float | None:
        """Learning rate of the fine-tuned blocks; None if there are none, or if they have the method's rate."""
        return None if self.spec.finetune is None else self.spec.finetune.learning_rate


@dataclass(frozen=True)
class TrialResult:
    """The outcome of a trial: its best epoch, and its results on validation images."""

    name: str
    margins: Margins  # of the validation images, closed world
    epoch: int  # the best one
    auc_all: float | None = None  # percent, with every pair a candidate; None: not for the open world
    accuracy: float | None = None  # percent, of the most probable answers
    seconds: float = 0.0  # of training and validation
    seconds_per_epoch: float = 0.0

    @property
    def components(self) -> AucComponents:
        return AucComponents.of(self.margins)

    @property
    def epoch_seconds(self) -> float:
        """Seconds per epoch or, if there are no epochs, of the whole fit with its validation."""
        return self.seconds_per_epoch or self.seconds

    @property
    def auc(self) -> float:
        """Validation AUC, in percent."""
        return 100 * (self.components.auc or 0.0)


@dataclass(frozen=True)
class Trials:
    """Store of the trials on one data set, each with a folder of its own inside `folder`.

    Results and tensors are always read from files, even those of a trial trained in this process, so that an
    interrupted search makes the same choice.
    """

    folder: Path
    read: Callable[[InputRequest], RunInputs]  # returns the data set's inputs for a request
    device: torch.device
    settings: EvaluationParams
    label: str = ""  # name of what is trained, for the progress
    key: str = ""  # hash of what the trials depend on besides their methods and seeds
    accuracy: Callable[[Run, Examples], float | None] | None = None  # percent, of a run on validation images
    hooks: Callable[[Trial], TrainingHooks] = lambda trial: TrainingHooks()

    def files(self, trial: Trial) -> RunPaths:
        """Paths of a trial's checkpoint and results. A longer trial that continues a short one has the same paths."""
        spec = trial.spec
        tuned = None if spec.finetune is None else spec.finetune.to_dict()
        key = [self.key, spec.kind, spec.options.to_dict(), spec.training.to_dict(), tuned, trial.seed]
        return RunPaths(self.folder / json_digest(key)[:12])

    def result(self, trial: Trial) -> TrialResult:
        """A trial's result, after training it if its files are missing; raises `DuplexError` for damaged files."""
        files, part = self.files(trial), "" if trial.pause is None else f"-epoch{trial.pause}"
        result, margins = files.root / f"result{part}.json", files.root / f"margins{part}.npz"
        if not result.is_file():
            self._train(trial, files, result, margins)
        with errors_as_damage(files.root), np.load(margins) as arrays:
            return TrialResult(trial.name, Margins(**arrays), **json.loads(result.read_text(encoding="utf-8")))

    def _train(self, trial: Trial, files: RunPaths, result: Path, margins: Path) -> None:
        start, inputs = time.monotonic(), self.read(trial.spec.request)
        label = ", ".join(filter(None, (self.label, trial.name)))
        resume = ResumePoint(label, files.unfinished_training, files.root.name, trial.pause)
        run = train_run(trial.spec, inputs, trial.seed, self.device, self.settings, resume, self.hooks(trial))
        accuracy = None if self.accuracy is None else self.accuracy(run, inputs.examples["val"].to(self.device))
        if trial.pause is None:
            run.write(files)
        files.root.mkdir(parents=True, exist_ok=True)
        assert run.margins is not None
        np.savez(margins, **asdict(run.margins))
        record = {
            "epoch": run.record.epoch,
            "auc_all": run.val_auc_all,
            "accuracy": accuracy,
            "seconds": time.monotonic() - start,
            "seconds_per_epoch": run.result.timing["seconds_per_epoch"],
        }
        write_text(result, json.dumps(record) + "\n")
        if trial.pause is None:
            files.unfinished_training.unlink(missing_ok=True)

    def delete_paused(self) -> None:
        """At the end of a search, delete the files from which paused trials could have been continued."""
        for file in self.folder.glob(f"*/{RunPaths(self.folder).unfinished_training.name}"):
            file.unlink()

    def load(self, trial: Trial) -> tuple[TrainingRecord, Method[Any], RunInputs]:
        """Load a finished trial: its metadata, the trained method, and the inputs that it was trained on."""
        files, inputs = self.files(trial), self.read(trial.spec.request)
        with errors_as_damage(files.root):
            header = read_checkpoint_header(files.checkpoint)
            method = load_checkpoint(header, inputs.context(), inputs.encoder).to(self.device)
            record = replace(header.record, novelty=read_novelty(header, self.device))
        return record, method, inputs

    def run(self, trial: Trial) -> Run:
        """The `Run` of a finished trial, restored from files."""
        record, method, _ = self.load(trial)
        files = self.files(trial)
        with errors_as_damage(files.root):
            rows = pd.read_csv(files.history).to_dict("records")
            history = [
                {str(name): int(value) if name == "epoch" else float(value) for name, value in row.items()}
                for row in rows
            ]
            timing = json.loads(files.timing.read_text(encoding="utf-8"))
        result = TrainingResult(record.epoch, record.val_auc, history, timing, record.selected_by)
        return Run(trial.spec.name, method, record, trial.spec.training, result)


@contextmanager
def errors_as_damage(folder: Path) -> Iterator[None]:
    """Context manager for reading a trial's files: any error inside becomes a `DuplexError` that names `folder`."""
    try:
        yield
    except Exception as error:
        problem = str(error).partition(";")[0]  # what comes after is advice for other folders
        raise DuplexError(
            f"the folder {folder} has a damaged file ({problem}); delete that folder and run the same command again"
        ) from error


FAILURES = 2  # numbers of blocks in a row without a gain, after which the search ends


@dataclass(frozen=True)
class RecipeChoice:
    """Outcome of a search: the chosen recipe, and a table of all recipes tried."""

    recipe: Trial
    table: tuple[dict[str, Any], ...]  # one row per attempt, in order: `recipe_row`


def search_recipes(
    levels: Iterable[Sequence[Trial]], attempt: Callable[[Trial], TrialResult], report: Callable[[str], None]
) -> RecipeChoice:
    """Try recipes, the cheapest first, and choose one by validation AUC; the module's docstring has the rules.

    levels: lists of recipes of equal cost, such as two learning rates.
    attempt: function that trains a recipe and returns its result.
    report: function that is called with a line of text per recipe.
    """
    best: tuple[Trial, TrialResult] | None = None
    leader: tuple[Trial, TrialResult] | None = None  # the best of those with fine-tuned blocks, after their pause
    table: list[dict[str, Any]] = []
    failures = 0

    def tried(recipe: Trial) -> tuple[Trial, TrialResult]:
        result, before = attempt(recipe), leader if leader and recipe.pause else best
        table.append(recipe_row(recipe, result, None if before is None else before[1]))
        report(recipe_line(table[-1], result))
        return recipe, result

    for level in levels:
        results = [tried(recipe) for recipe in level if leader is None or recipe.rate == leader[0].rate]
        if level[0].pause is None:
            gaining = [each for each in results if best is None or gain_exceeds_error(each[1], best[1])]
            best = max(gaining, key=lambda each: each[1].auc) if gaining else best
            continue
        top = max(results, key=lambda each: each[1].auc)
        if leader is None or top[1].auc > leader[1].auc:
            leader, failures = top, 0
        else:
            failures += 1
            if failures == FAILURES:
                break
    if best is None:
        raise DuplexError("there is no recipe to try; give at least one")
    for recipe in leader[0].longer if leader else ():
        longer = tried(recipe)
        if not (longer[1].auc > best[1].auc if best[0].blocks else gain_exceeds_error(longer[1], best[1])):
            break
        best = longer
        if best[1].epoch < recipe.spec.training.epochs:
            break
    for row in table:
        row["chosen"] = row["recipe"] == best[0].name
    return RecipeChoice(best[0], tuple(table))


def gain_exceeds_error(dearer: TrialResult, cheaper: TrialResult) -> bool:
    """Whether the costlier trial's validation AUC is higher by more than the standard error of the difference."""
    difference = dearer.components.minus(cheaper.components)
    gain, error = difference.auc, difference.standard_error
    return gain is not None and gain > (error or 0.0)


def recipe_row(recipe: Trial, result: TrialResult, best: TrialResult | None) -> dict[str, Any]:
    """A recipe's row in the table: validation AUC in percent, gain over the best so far, standard errors of both."""
    own = result.components
    row: dict[str, Any] = {"recipe": recipe.name, "blocks": recipe.blocks}
    row |= {"rate": recipe.rate, "epochs": recipe.pause or recipe.spec.training.epochs} if recipe.blocks else {}
    row |= {"auc": result.auc, "error": _percent(own.standard_error)}
    if best is not None:
        difference = own.minus(best.components)
        row |= {"gain": result.auc - best.auc, "gain_error": _percent(difference.standard_error)}
    return row | {"accuracy": result.accuracy, "epoch": result.epoch, "chosen": False}


def recipe_line(row: Mapping[str, Any], result: TrialResult) -> str:
    """One line of text about a recipe that was tried: validation AUC, accuracy, gain over the best so far, seconds."""
    parts = [f"{row['recipe']:<31} validation AUC {row['auc']:5.1f}"]
    if row["accuracy"] is not None:
        parts.append(f"accuracy {row['accuracy']:5.1f} %")
    if "gain" in row:
        error = row["gain_error"]
        parts.append(f"{row['gain']:+.1f}" + ("" if error is None else f" ± {error:.1f}"))
    return ", ".join([*parts, f"{result.seconds:.0f} s"])


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


DEPTHS = (1, 2, 4, 8)  # numbers of fine-tuned blocks, the cheapest first
RATES = (3e-4, 1e-3)  # learning rates of fine-tuned blocks
EPOCHS = (6, 12, 24)  # of a recipe with fine-tuned blocks, along half a cosine: the first, or more if it is the best
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
    """Recipes that train a method together with the image tower's last blocks, each paused after two epochs.

    Returns one list per number of blocks, with a recipe per learning rate of the blocks. The method keeps its own rate,
    but trains along half a cosine, without warm-up, and stops if validation AUC has not risen for half of the epochs.

    epochs: numbers of epochs of a recipe's complete trainings (`Trial.longer`).
    """

    def recipe(blocks: int, rate: float) -> Trial:
        options = FinetuneOptions(blocks=blocks, adapter="full", learning_rate=rate)
        name = f"{blocks} block{'s' * (blocks > 1)}, rate {rate:g}"
        whole = []
        for number in epochs:
            training = replace(
                spec.training, epochs=number, schedule="cosine", warm_up=0, patience=number // 2, validate_every=1
            )
            whole.append(Trial(f"{name}, {number} epochs", replace(spec, training=training, finetune=options), seed))
        return Trial(f"{name}, epoch {PAUSE}", whole[0].spec, seed, PAUSE, tuple(whole))

    return [[recipe(blocks, rate) for rate in rates] for blocks in depths]


@dataclass(frozen=True)
class BlockRoom:
    """How many of the last blocks of an image encoder can be fine-tuned at most, and the reason for this limit."""

    depth: int  # the largest number of blocks of `DEPTHS`; 0: none
    image_bytes: int  # bytes per image that the inputs of `depth` blocks take in the cache
    reason: str


def finetunable_blocks(encoder: Encoder, images: int, folder: Path, depths: Sequence[int] = DEPTHS) -> BlockRoom:
    """Find how many last blocks of the image tower can be fine-tuned at most, and what limits the number.

    The tower must be of a kind that can be cut before these blocks, and their inputs, cached for all images, must fit
    into half of the free space of the disk of `folder`, which need not exist.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    room = BlockRoom(0, 0, "")
    for depth in depths:
        try:
            last_blocks(encoder, depth)
        except UsageError as error:
            return room if room.depth else BlockRoom(0, 0, str(error).partition(";")[0])
        shapes = WantedOutputs(block_inputs=depth).row_shapes(encoder)
        size = sum(row_bytes(name, shape) for name, shape in shapes.items())
        if images * size > DISK_SHARE * free:
            reason = f"inputs of {depth} block{'s' * (depth > 1)} take {images * size / 1e9:.1f} of {free / 1e9:.1f}"
            return replace(room, reason=f"{reason} GB free")
        room = BlockRoom(depth, size, f"their inputs take {images * size / 1e6:,.0f} MB of {free / 1e9:,.1f} GB free")
    return room


@dataclass(frozen=True)
class BlockCost:
    """Measured seconds per image: to train an image tower's last blocks, to run them, and to compute their inputs."""

    train: float  # forward and backward
    forward: float
    inputs: float = 0.0  # to compute the blocks' inputs from cached inputs of more blocks, once before the first epoch


def block_cost(encoder: Encoder, blocks: int, cached: int, images: int = TIMED_IMAGES) -> BlockCost:
    """Measure how many seconds per image it takes to train the last blocks, and to run them without training.

    Random numbers stand in for the blocks' inputs. The fastest of three passes counts.

    cached: number of last blocks that a pass runs, at least `blocks`; all before the last `blocks` are frozen.
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
        train = min(seconds(True) for _ in range(3))
        return BlockCost(train, min(seconds(False) for _ in range(3)))
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.requires_grad_(value)


@dataclass(frozen=True)
class Schedule:
    """Which numbers of fine-tuned blocks and which learning rates a search tries, and how long this should take."""

    depths: tuple[int, ...]  # numbers of blocks to fine-tune, one after another
    rates: tuple[float, ...]  # learning rates to try at the first depth
    epochs: tuple[int, ...]  # of the best recipe's trainings, one after another
    seconds: float  # predicted time, if all recipes are tried and the last is chosen
    reason: str  # for the user


@dataclass(frozen=True)
class ImageCounts:
    """Numbers of images for training, validation and the final fit, to predict how long a search takes."""

    train: int
    val: int
    final: int  # images of the final fit; 0: there is none


def choose_depths(
    depth: int, cost: Callable[[int], BlockCost], sizes: ImageCounts, budget: float, epoch_seconds: float
) -> Schedule:
    """Choose the numbers of fine-tuned blocks and the learning rates that a search tries within `budget` seconds.

    Of the numbers `DEPTHS` up to `depth`, the largest that fits the budget is always tried; if none fits, the schedule
    is empty. If time remains, all smaller ones are tried as well or, if it is too short for all, only the smallest.
    Time left then goes to more learning rates for the smallest, and then to more epochs of the best. Predicted times
    include a final fit with the largest.

    cost: number of blocks -> measured seconds per image.
    epoch_seconds: duration of an epoch without fine-tuned blocks.
    """
    costs = {blocks: cost(blocks) for blocks in DEPTHS if blocks <= depth}

    def predicted(depths: Sequence[int], tried: int, longest: int = 1) -> float:
        total = 0.0
        for place, blocks in enumerate(depths):
            each = costs[blocks]
            epoch = epoch_seconds + sizes.train * (each.train + each.forward) + sizes.val * each.forward
            total += PAUSE * epoch * (tried if place == 0 else 1) + sizes.final * each.inputs
        total += (sum(EPOCHS[:longest]) - PAUSE) * epoch  # of the largest
        last, share = costs[depths[-1]], sizes.final / max(1, sizes.train)
        return total + EPOCHS[longest - 1] * (share * epoch_seconds + sizes.final * (last.train + last.forward))

    possible = tuple(costs)
    for end in range(len(possible), 0, -1):
        for depths, tried in _depth_choices(possible[:end], len(RATES)):
            fitting = [n for n in range(1, len(EPOCHS) + 1) if predicted(depths, tried, n) <= budget]
            if fitting:
                epochs, seconds = EPOCHS[: fitting[-1]], predicted(depths, tried, fitting[-1])
                listed = ", ".join(map(str, depths))
                reason = f"blocks {listed}, up to {epochs[-1]} epochs: at most {_duration(seconds)}"
                return Schedule(depths, RATES[:tried], epochs, seconds, reason)
    if not possible:
        return Schedule((), (), (), 0.0, "no block of the encoder can be fine-tuned")
    least = min(predicted((blocks,), 1) for blocks in possible)
    left = _duration(max(budget, 0.0))
    return Schedule((), (), (), 0.0, f"fine-tuning takes at least {_duration(least)}, and {left} are left")


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} seconds" if seconds < 60 else f"{seconds / 60:.1f} minutes"


def _depth_choices(depths: tuple[int, ...], rates: int) -> list[tuple[tuple[int, ...], int]]:
    """Pairs (numbers of blocks, number of rates to try at the smallest of them), the most thorough first."""
    choices = [(depths, rates), (depths, 1)]
    if len(depths) > 2:
        choices += [((depths[0], depths[-1]), rates), ((depths[0], depths[-1]), 1)]
    return [*choices, (depths[-1:], 1)]


def stored_schedule(folder: Path, minutes: float, make: Callable[[], Schedule]) -> Schedule:
    """Read a search's schedule for the limit `minutes` from `folder`; if it is not there, store that of `make()`."""
    path = folder / f"schedule-{minutes:g}.json"
    if not path.is_file():
        write_text(path, json.dumps(asdict(make())) + "\n")
    with errors_as_damage(folder):
        record = json.loads(path.read_text(encoding="utf-8"))
        lists = {name: tuple(record[name]) for name in ("depths", "rates", "epochs")}
        return Schedule(**{**record, **lists})


def search_block_counts(
    spec: MethodSpec, options: AutoFinetune, seed: int, runs: Trials, say: Callable[[str], None]
) -> Run:
    """Train with several numbers of fine-tuned blocks and return the run that validation chooses.

    The run's metadata has a table of all recipes tried. Keep the files of `runs` until the run is saved.
    """

    def report(line: str) -> None:
        say(f"{runs.label}: {line}")

    first = Trial("0 blocks", spec, seed)
    schedule = stored_schedule(runs.folder, options.minutes, lambda: _schedule(first, options, runs))
    report(f"fine-tuning: {schedule.reason}")
    levels = [[first], *finetuned_recipes(spec, schedule.depths, schedule.rates, schedule.epochs, seed)]
    choice = search_recipes(levels, runs.result, report)
    report(f"chosen: {choice.recipe.name}")
    run = runs.run(choice.recipe)
    numbers = [
        {name: float(value) for name, value in row.items() if isinstance(value, (int, float))} for row in choice.table
    ]
    return replace(run, record=replace(run.record, recipes=tuple(numbers)))


def _schedule(first: Trial, options: AutoFinetune, runs: Trials) -> Schedule:
    inputs = runs.read(first.spec.request)
    depth = int(inputs.identity.get("block_inputs", 0))
    if not depth:
        raise UsageError(
            f"{first.spec.name} has `finetune: auto`, but the feature cache holds no block inputs; set the data set's "
            "encoder.block_inputs to the largest number of blocks to fine-tune, and run `duplex extract`"
        )
    name, tag = inputs.encoder["name"], inputs.encoder["tag"] or None
    tower = load_encoder(name, tag, towers="image", device=str(runs.device))
    last_blocks(tower, depth)  # raises for an encoder that cannot be cut
    counts = ImageCounts(len(inputs.examples["train"]), len(inputs.examples["val"]), 0)
    epoch = runs.result(first).epoch_seconds
    return choose_depths(depth, lambda blocks: block_cost(tower, blocks, depth), counts, 60 * options.minutes, epoch)
