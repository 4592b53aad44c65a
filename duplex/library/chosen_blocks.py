"""Train a run with `finetune: auto`: validation chooses the number of fine-tuned blocks and their learning rate."""

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
    """Try training recipes and return the run of the chosen one; its record has the table of all recipes.

    spec: the method, without fine-tuned blocks.
    options: time limit.
    runs: the runs of the recipes; their files are needed until the returned run is saved.
    say: function that receives lines about the progress.
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
    """Return the plan of the recipes that fit into the time limit, from timed steps; `first` has no blocks."""
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
    """Read the finished run of a training recipe from its files."""
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
