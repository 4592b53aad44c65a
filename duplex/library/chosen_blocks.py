"""Train with `finetune: auto`: validation chooses how many image-tower blocks to fine-tune and their learning rate."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from duplex.encoders import load_encoder
from duplex.encoders.image_blocks import last_blocks
from duplex.errors import UsageError
from duplex.library.finetuned_recipes import ImageCounts, SearchPlan, block_cost, finetuned_recipes, plan_search
from duplex.library.recipe_runs import RecipeRuns, report_damage
from duplex.library.recipe_search import Recipe, search_recipes
from duplex.library.run_training import MethodSpec, Run
from duplex.options import AutoFinetune
from duplex.training.loop import TrainingResult


def train_chosen_blocks(spec: MethodSpec, options: AutoFinetune, runs: RecipeRuns, say: Callable[[str], None]) -> Run:
    """Train with several numbers of fine-tuned blocks and return the run that validation chooses.

    The metadata of the returned run has a table of all training recipes tried (numbers of blocks and learning rates).

    spec: the method to train, without fine-tuned blocks.
    options: the method's `finetune` options, with the time limit in minutes.
    runs: store that trains the recipes; its files are needed until the returned run is saved.
    say: function that receives lines of text about the progress.
    """

    def report(line: str) -> None:
        say(f"{runs.label}: {line}")

    first = Recipe("0 blocks", spec)
    plan = runs.plan(options.minutes, lambda: _plan(first, options, runs))
    report(f"fine-tuning: {plan.reason}")
    choice = search_recipes([[first], *finetuned_recipes(spec, plan.depths, plan.rates)], runs.result, report)
    report(f"chosen: {choice.recipe.name}")
    run = _load(choice.recipe, runs)
    numbers = [
        {name: float(value) for name, value in row.items() if isinstance(value, (int, float))} for row in choice.table
    ]
    return replace(run, record=replace(run.record, recipes=tuple(numbers)))


def _plan(first: Recipe, options: AutoFinetune, runs: RecipeRuns) -> SearchPlan:
    """Time some training steps; return which numbers of fine-tuned blocks and learning rates fit into the time limit.

    Raises `UsageError` if the feature cache holds no block inputs (activations that enter the last blocks).

    first: the training without fine-tuned blocks, whose epochs are timed.
    """
    inputs = runs.read(first.spec.request)
    depth = int(inputs.identity.get("block_inputs", 0))
    if not depth:
        raise UsageError(
            f"{first.spec.name} has `finetune: auto` and the feature cache holds no block inputs; set the data "
            "set's encoder.block_inputs, or run `duplex data add` with --finetune auto"
        )
    name, tag = inputs.encoder["name"], inputs.encoder["tag"] or None
    tower = load_encoder(name, tag, towers="image", device=str(runs.device))
    last_blocks(tower, depth)  # raises for an encoder that cannot be cut
    counts = ImageCounts(len(inputs.examples["train"]), len(inputs.examples["val"]), 0)
    epoch = runs.result(first).seconds_per_epoch
    return plan_search(depth, lambda blocks: block_cost(tower, blocks, depth), counts, 60 * options.minutes, epoch)


def _load(recipe: Recipe, runs: RecipeRuns) -> Run:
    """Read the method, metadata, history and timing of a finished training recipe (one of the settings tried)."""
    record, method, _ = runs.load(recipe)
    files = runs.files(recipe)
    with report_damage(files.root):
        rows = pd.read_csv(files.history).to_dict("records")
        history = [
            {str(name): int(value) if name == "epoch" else float(value) for name, value in row.items()} for row in rows
        ]
        timing = json.loads(files.timing.read_text(encoding="utf-8"))
    result = TrainingResult(record.epoch, record.val_auc, history, timing, record.selected_by)
    return Run(recipe.spec.name, method, record, recipe.spec.training, result)
