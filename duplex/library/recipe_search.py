"""Choose by validation how much to train: nothing, prompts, then one, two, four … fine-tuned blocks of the image tower.

Training recipes are tried in order of cost, the cheapest first. A recipe replaces the best one so far if its validation
AUC is higher by more than the standard error of the difference,

    AUC' - AUC > SE(AUC' - AUC),    by DeLong's formula over the same validation images.

More fine-tuned blocks replace fewer ones if their AUC is higher at all: once they are trained, both recognise images
equally fast. The search ends when two numbers of blocks in a row bring no gain. Several learning rates are tried at the
smallest number of blocks, the lowest first; a higher rate is chosen by the rule above, and all larger numbers of blocks
use the chosen rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from duplex.errors import DuplexError
from duplex.evaluation.curve import Margins
from duplex.evaluation.uncertainty import Components
from duplex.library.run_training import MethodSpec

FAILURES = 2  # numbers of blocks in a row without a gain, after which the search ends


@dataclass(frozen=True)
class Recipe:
    """Training recipe, compared with others by validation AUC: a method, its options and its fine-tuned blocks."""

    name: str  # for messages, such as `2 blocks, rate 0.0003`
    spec: MethodSpec

    @property
    def blocks(self) -> int:
        """Number of the image tower's last blocks that are fine-tuned; 0: none."""
        return 0 if self.spec.finetune is None else self.spec.finetune.blocks


@dataclass(frozen=True)
class RecipeResult:
    """Validation result of one training recipe: margins, accuracy, best epoch and duration.

    Margins are the biases on unseen pairs at which images turn right or wrong; AUC is computed from them.
    """

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
        """Validation AUC, in percent, of the training that was tried."""
        return 100 * (self.components.auc or 0.0)


@dataclass(frozen=True)
class RecipeChoice:
    """Outcome of a search for training settings: the chosen recipe, its validation result, and a table of all tried."""

    recipe: Recipe
    attempt: RecipeResult
    table: tuple[dict[str, Any], ...]  # one row per attempt, in order: `recipe_row`


def search_recipes(
    levels: Iterable[Sequence[Recipe]], attempt: Callable[[Recipe], RecipeResult], report: Callable[[str], None]
) -> RecipeChoice:
    """Try training recipes (settings to compare), the cheapest first, and return the chosen one.

    levels: lists of recipes of equal cost, such as two learning rates. The first recipe of a list is chosen, unless
        another one has a higher validation AUC by more than the standard error of the difference. By the rules of this
        module, a later list replaces the choice so far.
    attempt: function that trains and validates a recipe.
    report: function that is called with one line of text per recipe.
    """
    best: tuple[Recipe, RecipeResult] | None = None
    table: list[dict[str, Any]] = []
    rates: set[float | None] | None = None  # those still tried; None: all
    failures = 0
    for level in levels:
        recipes = [recipe for recipe in level if rates is None or not recipe.blocks or _rate(recipe) in rates]
        tried = []
        for recipe in recipes:
            result = attempt(recipe)
            tried.append((recipe, result))
            table.append(recipe_row(recipe, result, None if best is None else best[1]))
            report(recipe_line(table[-1], result))
        top = tried[0]
        for other in tried[1:]:
            top = other if gain_exceeds_error(other[1], top[1]) else top
        adopted = best is None or _replaces(top, best)
        if adopted:
            best = top
            for row in table:
                row["chosen"] = row["recipe"] == top[0].name
        if top[0].blocks:
            rates = {_rate(top[0])}
            failures = 0 if adopted else failures + 1
            if failures == FAILURES:
                break
    if best is None:
        raise DuplexError("there is no recipe to try; expected at least one")
    return RecipeChoice(*best, tuple(table))


def _replaces(new: tuple[Recipe, RecipeResult], best: tuple[Recipe, RecipeResult]) -> bool:
    """Return whether a training recipe that costs more has enough validation AUC to replace the best one so far."""
    (recipe, result), (best_recipe, best_result) = new, best
    if recipe.blocks > best_recipe.blocks > 0:
        return result.auc > best_result.auc
    return gain_exceeds_error(result, best_result)


def gain_exceeds_error(dearer: RecipeResult, cheaper: RecipeResult) -> bool:
    """Return whether a costlier training gains more validation AUC than the standard error of the difference."""
    difference = dearer.components.minus(cheaper.components)
    gain, error = difference.auc, difference.standard_error
    return gain is not None and gain > (error or 0.0)


def recipe_row(recipe: Recipe, result: RecipeResult, best: RecipeResult | None) -> dict[str, Any]:
    """Return the table row of a training recipe: validation AUC in percent, gain over `best`, standard errors of both.

    best: result of the best training tried before; None for the first.
    """
    own = result.components
    row: dict[str, Any] = {"recipe": recipe.name, "blocks": recipe.blocks}
    row |= {"rate": _rate(recipe)} if recipe.blocks else {}
    row |= {"auc": result.auc, "error": _percent(own.standard_error)}
    if best is not None:
        difference = own.minus(best.components)
        row |= {"gain": result.auc - best.auc, "gain_error": _percent(difference.standard_error)}
    return row | {"accuracy": result.accuracy, "epoch": result.epoch, "chosen": False}


def recipe_line(row: Mapping[str, Any], result: RecipeResult) -> str:
    """Return one line of text about a training that was tried: validation AUC, accuracy, gain over best, seconds."""
    parts = [f"{row['recipe']:<24} validation AUC {row['auc']:5.1f}"]
    if row["accuracy"] is not None:
        parts.append(f"accuracy {row['accuracy']:5.1f} %")
    if "gain" in row:
        error = row["gain_error"]
        parts.append(f"{row['gain']:+.1f}" + ("" if error is None else f" ± {error:.1f}"))
    return ", ".join([*parts, f"{result.seconds:.0f} s"])


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _rate(recipe: Recipe) -> float | None:
    return None if recipe.spec.finetune is None else recipe.spec.finetune.learning_rate
