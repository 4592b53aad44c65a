"""The search over recipes, by which `finetune: auto` and `duplex fit` choose how much to train.

A *recipe* is a trial: nothing trained, regressions, their product, prompts, or prompts with fine-tuned
blocks. All have trainings that end: blocks are tuned along short cosines that fall to 0, which rank numbers of
blocks as longer ones do. The best of these is trained again along a cosine of twice as many epochs
as long as validation AUC rises by more than the standard error of the difference (DeLong's formula
over the same validation images). Of the recipes whose AUC is at most this error below the highest,
that with the best mean of the accuracies on seen and on unseen pairs is chosen.

No time enters the choice, unless there is a limit: each training then ends with its share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from duplex.config.params import MethodEntry, load_params, shipped_project
from duplex.encoders.base import load_encoder
from duplex.encoders.image_blocks import last_blocks
from duplex.errors import DuplexError, UsageError
from duplex.methods.registry import parse_options
from duplex.options import AutoFinetune, FinetuneOptions, TrainingOptions
from duplex.training.lineup import (
    EPOCHS,
    ImageCounts,
    Lineup,
    SearchCosts,
    block_cost,
    duration,
    epoch_cost,
    lineup_within,
    stored_lineup,
    whole_lineup,
)
from duplex.training.run import MethodSpec, TrainedMethod
from duplex.training.trials import Trial, TrialResult, Trials

FAILURES = 2  # numbers of blocks in a row without a gain, after which the search ends
AUC = attrgetter("result.auc")
# of a result -> in words
ACCURACIES = {"accuracy": "accuracy", "accuracy_seen": "known pairs", "accuracy_unseen": "new pairs"}


@dataclass(frozen=True)
class Attempt:
    """A recipe that was tried, with its result."""

    recipe: Trial
    result: TrialResult


@dataclass(frozen=True)
class RecipeChoice:
    """Outcome of a search: the chosen recipe, and a table of all recipes tried."""

    recipe: Trial
    table: tuple[dict[str, Any], ...]  # one row per attempt, in order: `recipe_row`
    seconds: float = 0.0  # of all trainings and validations


@dataclass(frozen=True)
class BlockRecipes:
    """The recipes with fine-tuned blocks: `spec` beside the blocks of a lineup, perhaps in limited time."""

    spec: MethodSpec  # method whose prompts or heads are trained with the blocks
    lineup: Lineup
    seed: int = 0
    limit: float | None = None  # seconds of the search, with that before, and of the final fit
    costs: SearchCosts | None = None  # known where there is a limit

    def levels(self, spent: float) -> list[list[Trial]]:
        """Recipes along short cosines, a list per number of blocks; `spent`: seconds before them."""
        lineup = self.lineup
        if self.limit is None or self.costs is None:
            return [[self._recipe(blocks, rate) for rate in lineup.rates] for blocks in lineup.depths]
        left = self.limit - spent
        if not lineup.depths or left <= 0:
            return []
        costs = self.costs
        needed = costs.short(lineup.depths, len(lineup.rates)) + costs.final(lineup.depths[-1], EPOCHS[0])
        levels = []
        for blocks in lineup.depths:
            seconds = left / needed * costs.recipe(blocks, EPOCHS[0]) * costs.steps_share(blocks, EPOCHS[0])
            levels.append([self._recipe(blocks, rate, EPOCHS[0], seconds) for rate in lineup.rates])
        return levels

    def longer(self, leader: Attempt, spent: float) -> list[Trial]:
        """Longer trainings of the best recipe, one after another; in limited time one, of what is left."""
        recipe = leader.recipe
        rate = recipe.rate
        assert rate is not None
        if self.limit is None or self.costs is None:
            return [self._recipe(recipe.blocks, rate, epochs) for epochs in EPOCHS[1:]]
        costs = self.costs
        slower = leader.result.seconds / costs.recipe(recipe.blocks, EPOCHS[0])  # than predicted
        left = (self.limit - spent) / slower
        both = costs.recipe(recipe.blocks, 0) + costs.final(recipe.blocks, 0)
        epoch = costs.recipe(recipe.blocks, 1) + costs.final(recipe.blocks, 1) - both
        epochs = min(int((left - both) / epoch), EPOCHS[-1])
        if epochs <= EPOCHS[0]:
            return []
        own = costs.recipe(recipe.blocks, epochs)
        share = own / (own + costs.final(recipe.blocks, epochs)) * costs.steps_share(recipe.blocks, epochs)
        return [self._recipe(recipe.blocks, rate, epochs, share * (self.limit - spent))]

    def _recipe(self, blocks: int, rate: float, epochs: int = EPOCHS[0], seconds: float | None = None) -> Trial:
        options = FinetuneOptions(blocks=blocks, adapter="full", learning_rate=rate)
        name = f"{blocks} block{'s' * (blocks > 1)}, rate {rate:g}, {epochs} epochs"
        tuned = replace(self.spec, training=whole_cosine(self.spec.training, epochs), finetune=options)
        return Trial(name, tuned, self.seed, seconds)


def whole_cosine(training: TrainingOptions, epochs: int) -> TrainingOptions:
    """The same options with a learning rate that falls to 0 in `epochs` epochs, the last of which is kept."""
    return replace(
        training,
        epochs=epochs,
        schedule="cosine_steps",
        select="last",
        select_world="closed",
        validate_every=epochs,
        patience=None,
    )


@dataclass
class RecipeSearch:
    """A search under way: recipes that were tried, and what is said about them."""

    train: Callable[[Trial], TrialResult]
    report: Callable[[str], None]
    attempts: list[Attempt] = field(default_factory=list)
    table: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(each.result.seconds for each in self.attempts)

    def attempt(self, recipe: Trial) -> Attempt:
        """Train a recipe, and compare it with the best so far."""
        result = self.train(recipe)
        best = max(self.attempts, key=AUC, default=None)
        row = recipe_row(recipe, result, None if best is None else best.result)
        self.table.append(row)
        self.report(recipe_line(row, result))
        self.attempts.append(Attempt(recipe, result))
        return self.attempts[-1]

    def best_depth(self, levels: Iterable[Sequence[Trial]]) -> Attempt | None:
        """Try numbers of blocks, with the best rate of the first; returns the best, None without any."""
        best: Attempt | None = None
        failures = 0
        for level in levels:
            recipes = [recipe for recipe in level if best is None or recipe.rate == best.recipe.rate]
            top = max(map(self.attempt, recipes), key=AUC)
            failures += 1
            if best is None or top.result.auc > best.result.auc:
                best = top
                failures = 0
            if failures == FAILURES:
                break
        return best

    def extend(self, best: Attempt, longer: Iterable[Trial], is_limited: bool) -> Attempt:
        """Train a recipe longer as long as AUC rises by more than the error, in limited time at all."""
        for recipe in longer:
            attempt = self.attempt(recipe)
            if is_limited:
                gains = attempt.result.auc > best.result.auc
            else:
                gains = gain_exceeds_error(attempt.result, best.result)
            if not gains:
                break
            best = attempt
        return best

    def choice(self, candidates: Sequence[Attempt]) -> RecipeChoice:
        """The choice among `candidates`, the cheapest first, with the table of all attempts."""
        chosen = choose(candidates).recipe
        for row in self.table:
            row["chosen"] = row["recipe"] == chosen.name
        return RecipeChoice(chosen, tuple(self.table), self.seconds)


def search_recipes(
    frozen: Iterable[Trial],
    tuned: BlockRecipes | None,
    train: Callable[[Trial], TrialResult],
    report: Callable[[str], None],
) -> RecipeChoice:
    """Try recipes, the cheapest first, and choose one by validation and the rules above.

    frozen: recipes without fine-tuned blocks; tuned: makes those with such blocks.
    """
    search = RecipeSearch(train, report)
    candidates = [search.attempt(recipe) for recipe in frozen]
    leader = None if tuned is None else search.best_depth(tuned.levels(search.seconds))
    if tuned is not None and leader is not None:
        longer = tuned.longer(leader, search.seconds)
        candidates.append(search.extend(leader, longer, tuned.limit is not None))
    return search.choice(candidates)


def choose(candidates: Sequence[Attempt]) -> Attempt:
    """Of the candidates at most an error below the highest AUC, the best on seen and unseen pairs, or the first."""
    if not candidates:
        raise DuplexError("there is no recipe to try; give at least one")
    top = max(candidates, key=AUC)
    level = [each for each in candidates if each is top or not gain_exceeds_error(top.result, each.result)]
    return max(level, key=lambda each: each.result.mean_accuracy)


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
        row["epochs"] = recipe.spec.training.epochs
    row |= {"auc": result.auc, "error": _percent(own.standard_error)}
    if best is not None:
        difference = own.minus(best.components)
        row |= {"gain": result.auc - best.auc, "gain_error": _percent(difference.standard_error)}
    for key in ACCURACIES:
        row[key] = getattr(result, key)
    return row | {"epoch": result.epoch, "chosen": False}


def recipe_line(row: Mapping[str, Any], result: TrialResult) -> str:
    """One line of text about a recipe that was tried: AUC, accuracies, gain, seconds."""
    parts = [f"{row['recipe']:<31} validation AUC {row['auc']:5.1f}"]
    for key in ("accuracy_seen", "accuracy_unseen"):
        if row[key] is not None:
            parts.append(f"{ACCURACIES[key]} {row[key]:5.1f} %")
    if "gain" in row:
        error = row["gain_error"]
        parts.append(f"{row['gain']:+.1f}" + ("" if error is None else f" ± {error:.1f}"))
    return ", ".join([*parts, f"{result.seconds:.0f} s"])


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


NOTHING_TRAINED = "closed_form"  # methods of the package's params.yaml
TRAINED = "dual"
RIVAL = "linear"  # two logistic regressions, measured beside the model
PRODUCT = "closed_form_linear"  # of both
# For encoders without a text tower
WITHOUT_TEXT = {
    NOTHING_TRAINED: "closed_form_visual",
    TRAINED: "dual_visual",
    PRODUCT: "closed_form_visual_linear",
}
FROZEN_RATES = (1e-3, 1e-4)  # learning rates of prompts or linear heads on frozen features
FROZEN_EPOCHS = 8  # of these, along half a cosine
FROZEN_SHARE = 0.05  # of limited time, that each of these may take
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

    def frozen(self, limit: float | None = None, regressions: bool = True) -> list[Trial]:
        """All recipes without fine-tuned blocks, the cheapest first; `limit`: seconds of a whole fit."""
        return [*self.untrained(regressions), *self.prompts(limit)]

    def untrained(self, regressions: bool = True) -> list[Trial]:
        """The closed form and, unless `regressions` is False, two logistic regressions and the product of both."""
        product = Trial("closed form times regressions", self._spec(PRODUCT))
        return [self.nothing_trained, *([self.rival, product] if regressions else [])]

    @property
    def trained(self) -> str:
        """What is trained on frozen features."""
        return "text prompts" if self.text_width else "heads"

    def prompts(self, limit: float | None = None) -> list[Trial]:
        """Recipes that train prompts or heads on frozen features, one per learning rate.

        limit: seconds of a whole fit, of which each may take `FROZEN_SHARE`.
        """
        trials = [Trial(f"{self.trained}, rate {rate:g}", self._spec(TRAINED, rate)) for rate in FROZEN_RATES]
        if limit is None:
            return trials
        limited = []
        for trial in trials:
            spec = replace(trial.spec, training=whole_cosine(trial.spec.training, FROZEN_EPOCHS))
            limited.append(replace(trial, spec=spec, seconds=FROZEN_SHARE * limit))
        return limited

    def finetuned(self, lineup: Lineup, limit: float | None = None, costs: SearchCosts | None = None) -> BlockRecipes:
        """Recipes with fine-tuned blocks beside prompts, which then train at their higher rate."""
        spec = self.prompts()[0].spec
        spec = replace(spec, training=replace(spec.training, threads=torch.get_num_threads()))
        return BlockRecipes(spec, lineup, limit=limit, costs=costs)

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


def search_block_counts(
    spec: MethodSpec, options: AutoFinetune, seed: int, trials: Trials, say: Callable[[str], None]
) -> TrainedMethod:
    """Train with several numbers of fine-tuned blocks and return the run that validation chooses."""

    def report(line: str) -> None:
        say(f"{trials.label}: {line}")

    first = Trial("0 blocks", spec, seed)
    depth = _cached_depth(first, trials)
    lineup = whole_lineup(depth)
    costs = None
    limit = None
    if options.minutes is None:
        report(f"fine-tuning of {lineup.describe()}")
    else:
        seconds = 60 * options.minutes  # of the blocks alone
        limit = seconds + trials.result(first).seconds
        path = trials.folder / f"lineup-{options.minutes:g}.json"
        lineup, costs = stored_lineup(path, lambda: _lineup_within(seconds, first, depth, trials))
        report(f"fine-tuning of {lineup.describe()}; in {duration(seconds)}")
    choice = search_recipes([first], BlockRecipes(spec, lineup, seed, limit, costs), trials.result, report)
    report(f"chosen: {choice.recipe.name}")
    run = trials.run(choice.recipe)
    rows = tuple(
        {key: float(value) for key, value in row.items() if isinstance(value, int | float)} for row in choice.table
    )
    return replace(run, record=replace(run.record, recipes=rows))


def _cached_depth(first: Trial, trials: Trials) -> int:
    depth = int(trials.read(first.spec.request).identity.get("block_inputs", 0))
    if not depth:
        raise UsageError(
            f"{first.spec.name} has `finetune: auto`, but the feature cache holds no block inputs; "
            "set the data set's encoder.block_inputs to the largest number of blocks to fine-tune, "
            "and run `duplex extract`"
        )
    return depth


def _lineup_within(seconds: float, first: Trial, depth: int, trials: Trials) -> tuple[Lineup, SearchCosts]:
    inputs = trials.read(first.spec.request)
    encoder = inputs.encoder
    tower = load_encoder(encoder["name"], encoder["tag"] or None, towers="image", device=str(trials.device))
    last_blocks(tower, depth)  # raises for an encoder that cannot be cut
    counts = ImageCounts(len(inputs.examples["train"]), len(inputs.examples["val"]), 0)
    depths = whole_lineup(depth).depths
    blocks = {
        each: block_cost(tower, each, depth, clock=trials.clock, precision=first.spec.training.precision)
        for each in depths
    }
    costs = SearchCosts(counts, blocks, epoch_cost(first.spec, inputs, trials.device, trials.clock))
    return lineup_within(seconds, costs), costs
