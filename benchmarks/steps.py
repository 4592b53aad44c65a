"""Measure a training step of each published recipe at MIT-States' size: seconds and memory on one thread.

    python -m benchmarks.steps --csv docs/results/recipe_steps.csv [--methods csp,troika]

A step is forward, backward and the optimiser, for a batch of the recipe, from features in the cache: adapters in the
encoder are left out (`benchmarks.paper` measures them). Features, word vectors and the text tower of ViT-L/14 are
random. Methods that read patch tokens are measured with few images, because on a CPU memory ends before their batch.

Seconds are those of the processor, so other work on the machine hardly counts; memory is the peak above the tower,
with method and optimiser. Each recipe is measured in a process of its own: the second step, or a long first one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import apart, begin_peak, emit, memory, options, say, write_csv
from benchmarks.text import SIZES, made_up, random_tower
from docs.builder.results import markdown_table
from duplex.config.params import MethodEntry, published_recipes
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, MethodContext, PrimitiveVectors
from duplex.methods.registry import find_method, make_method, parse_options
from duplex.options import TrainingOptions
from duplex.training.loop import make_optimiser, optimiser_step

BENCHMARK = "mit-states"
DIM, WORDS = 768, 600  # width of features; of word vectors, two kinds side by side as published
PATCHES = (256, 1024)  # tokens of an image and their width, before the projection
LONG = 5.0  # seconds; of a step that takes longer, allocating memory is a small part, so the first is the only one
FEW = 2  # images of a batch with patch tokens
UNDECIDED = {"learning_rate": 1e-4, "batch_size": 64}  # of methods without published ones


def recipe_settings(name: str) -> tuple[MethodEntry, str, dict[str, Any], TrainingOptions]:
    """A recipe, the data set whose values it has, and its options and training, with frozen towers."""
    recipe = MethodEntry.model_validate(published_recipes()[name])
    dataset = BENCHMARK if BENCHMARK in recipe.per_dataset else next(iter(recipe.per_dataset))
    chosen = recipe.options_for(dataset)
    if recipe.finetune_for(dataset) and chosen.get("adapter") == "blocks":
        del chosen["adapter"]  # it is part of the blocks
    training = {**UNDECIDED, "epochs": 1, **recipe.training_for(dataset)}
    training |= {key: value for key, value in UNDECIDED.items() if training[key] == "?"}
    return recipe, dataset, chosen, TrainingOptions.from_dict(training)


def measure(name: str, few: int, **smaller: Any) -> dict[str, Any]:
    """Measure one recipe in this process. `smaller`: layers and width of a text tower for a quick trial."""
    recipe, dataset, chosen, training = recipe_settings(name)
    parsed = parse_options(recipe.kind, chosen)
    needs = find_method(recipe.kind).needs(parsed)
    states, objects, count, _ = SIZES[BENCHMARK]
    pairs = made_up(states, objects, count)
    labels = LabelSpace.from_pairs(dict.fromkeys(("train", "val", "test"), pairs))
    tower = random_tower("ViT-L-14-quickgelu", **smaller) if "text" in needs else None
    random = torch.Generator().manual_seed(0)
    words = PrimitiveVectors(*(torch.randn(len(n), WORDS, generator=random) for n in (labels.states, labels.objects)))
    images = min(few, training.batch_size) if "patch" in needs else training.batch_size
    shapes = {"cls": (DIM,), **({"patch": PATCHES} if "patch" in needs else {})}
    inputs = {key: torch.randn(images, *shape, generator=random) for key, shape in shapes.items()}
    inputs["cls"] = torch.nn.functional.normalize(inputs["cls"], dim=-1)
    compositions = torch.from_numpy(np.random.default_rng(0).choice(labels.pairs["train"], size=images))
    batch = Batch(inputs, compositions)
    before = begin_peak()
    torch.manual_seed(0)
    context = MethodContext(labels, shapes, tower, words, recipe.trained_for)
    method = make_method(recipe.kind, parsed, context)
    method.eval().start(batch)
    method.train()
    optimiser = make_optimiser(method, training)
    for _ in range(2):
        start = time.process_time()
        optimiser_step(method, batch, torch.arange(images), training, optimiser)
        seconds = time.process_time() - start
        if seconds > LONG:
            break
    trained = sum(p.numel() for group in method.groups() for p in group["params"])
    row = {"recipe": name, "settings of": dataset, "batch": training.batch_size, "images": images}
    row |= {"s a step": seconds, "GiB": (memory("VmHWM") - before) / 2**30, "trained, M": trained / 1e6}
    say("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()))
    return row


def parser() -> argparse.ArgumentParser:
    found = options(__doc__)
    found.add_argument("--methods", help="recipes; default: all that train something")
    found.add_argument("--few", type=int, default=FEW, help="images of a batch with patch tokens")
    found.add_argument("--csv", type=Path, help="write the table to this file too, as in docs/results")
    found.add_argument("--part", help=argparse.SUPPRESS)
    return found


def main() -> None:
    wanted = parser().parse_args()
    if wanted.part:
        torch.set_num_threads(1)
        name, few = wanted.part.split(":")
        emit(measure(name, int(few)))
        return
    trained = [name for name, recipe in published_recipes().items() if "training" in recipe]
    names = wanted.methods.split(",") if wanted.methods else trained
    rows = [apart("benchmarks.steps", f"{name}:{wanted.few}") for name in names]
    if wanted.json:
        emit(rows)
        return
    forms = {"s a step": ".2f", "GiB": ".2f", "trained, M": ".3g"}
    table = [{key: format(value, forms.get(key, "")) for key, value in row.items()} for row in rows]
    print(markdown_table(list(table[0]), table))
    write_csv(table, wanted.csv)


if __name__ == "__main__":
    main()
