"""The training recipes that `duplex fit` tries: nothing trained, prompts, or prompts and blocks of the image tower."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path

import numpy as np
import torch

from duplex.artifacts import RunPaths
from duplex.config.method_entries import MethodEntry
from duplex.config.params import EvaluationParams, load_params, shipped_project
from duplex.data.dataset import labels_of
from duplex.encoders import Encoder, load_encoder, resolve_device
from duplex.features.examples import Examples
from duplex.features.layout import status_reason
from duplex.fitting.content_cache import ContentCache, ContentInputs
from duplex.fitting.encoder_choice import EncoderChoice
from duplex.fitting.labelled_folder import LabelledFolder
from duplex.labels import World
from duplex.library.finetuned_recipes import (
    BlockCost,
    ImageCounts,
    SearchPlan,
    block_cost,
    finetunable_blocks,
    finetuned_recipes,
    plan_search,
)
from duplex.library.inputs import RunInputs
from duplex.library.recipe_runs import RecipeRuns
from duplex.library.recipe_search import Recipe
from duplex.library.run_training import MethodSpec, Run
from duplex.methods.registry import method_source, parse_options
from duplex.options import TrainingOptions
from duplex.recognition.listed_answers import listed_answers
from duplex.system.code_hash import code_hash
from duplex.system.files import json_digest

NOTHING_TRAINED, PROMPTS = "closed_form", "dual"  # methods of the package's params.yaml
WITHOUT_TEXT = {"inference": ["gaussian_factors", "gaussian"], "interactions": 0.0}  # of encoders without a text tower
PROMPT_RATES = (1e-3, 1e-4)  # learning rates of prompts
PROMPT_EPOCHS = 8  # along half a cosine
BATCH = 64
WIDE_TEXT = 512  # width of a text tower from which on several threads train its prompts faster than one
LARGEST_OPEN = 1 << 15  # pairs of states and objects up to which all of them are candidates
SEED = 0
Say = Callable[[str], None]


@dataclass(frozen=True)
class FolderRecipes:
    """Training recipes that `duplex fit` tries on a folder of labelled images, with features and training runs."""

    data: LabelledFolder
    choice: EncoderChoice
    cache: Path  # folder of features and runs
    minutes: float
    say: Say

    @cached_property
    def device(self) -> torch.device:
        return torch.device(resolve_device("auto"))

    @cached_property
    def tower(self) -> Encoder:
        """The encoder's image tower."""
        entry = self.choice.entry
        return load_encoder(entry.name, entry.weights, towers="image", device=str(self.device))

    @cached_property
    def text_width(self) -> int:
        """Width of the text tower's token embeddings; 0 if the encoder has no text tower."""
        entry = self.choice.entry
        text = load_encoder(entry.name, entry.weights, towers="text", device=str(self.device)).text
        return 0 if text is None else int(text.embedding([text.start]).shape[1])

    @property
    def world(self) -> World:
        """World that the model answers in: open (all state-object pairs) with up to 32,768 pairs, else closed."""
        return "open" if self.data.labels.size <= LARGEST_OPEN else "closed"

    @cached_property
    def inputs(self) -> ContentInputs:
        """The data set, split into train, val and test, with features; reading this encodes images not in the cache."""
        data, entry = self.data, self.choice.entry
        room = finetunable_blocks(self.tower, len(data.manifest), self.cache)
        self.say(
            f"fine-tuning: up to {room.depth} blocks; {room.reason}" if room.depth else f"no fine-tuning: {room.reason}"
        )
        cache = ContentCache(self.cache, entry, self.tower, room.depth)
        features = cache.fill(data.root, dict(zip(data.digests, data.manifest["image"], strict=True)))
        rows = features.at(data.digests)
        inputs = ContentInputs(data.manifest, data.labels, rows, features, entry, str(self.device))
        statuses = features.stored.statuses[rows]
        if bad := np.flatnonzero(inputs.bad).tolist():
            listed = [f"{data.manifest['image'].iloc[row]} ({status_reason(statuses[row])})" for row in bad[:3]]
            self.say(f"{len(bad):,} images cannot be used and are left out: {', '.join(listed)}")
        return inputs

    @cached_property
    def readable(self) -> LabelledFolder:
        """The data set without unreadable images; to find these, images that are not in the cache are encoded first."""
        kept = ~self.inputs.bad
        return replace(self.data, manifest=self.data.manifest[kept], digests=list(compress(self.data.digests, kept)))

    @cached_property
    def runs(self) -> RecipeRuns:
        """Store of the trainings to choose from, in a folder named by a digest of labels, features, code and device."""
        is_gpu, methods = self.device.type == "cuda", map(self._entry, (NOTHING_TRAINED, PROMPTS))
        key = {
            "contents": self.data.digests,
            "rows": self.data.manifest[["state", "object", "split"]].to_numpy().tolist(),
            "features": self.inputs.features.stored.identity,
            "torch": torch.__version__,
            "code": code_hash("recipe", modules=[method_source(method.kind).module for method in methods]),
            "device": torch.cuda.get_device_name(self.device) if is_gpu else torch.get_num_threads(),
        }
        folder = self.cache / f"recipes-{json_digest(key)[:16]}"
        read, settings = self.inputs.read, EvaluationParams()
        return RecipeRuns(folder, read, SEED, self.device, settings, accuracy=self._accuracy)

    def _accuracy(self, run: Run, val: Examples) -> float | None:
        return listed_answers(run.method, val, self.data.labels, run.record.confidence, self.world).accuracy

    def levels(self, began: float) -> Iterator[list[Recipe]]:
        """Yield lists of training recipes (settings to try) of equal cost, the cheapest first.

        The first recipe trains nothing, the next ones prompts, the last ones as many blocks of the image tower as the
        time limit allows.

        began: `time.monotonic()` at which the time for training began.
        """
        yield [Recipe("nothing trained", self._spec(NOTHING_TRAINED))]
        if not self.text_width:
            self.say("the encoder has no text tower, so neither prompts nor blocks are trained")
            return
        prompts = [Recipe(f"prompts, rate {rate:g}", self._spec(PROMPTS, rate)) for rate in PROMPT_RATES]
        yield prompts
        beside_blocks = prompts[0]  # with blocks that train, prompts may train fast
        plan = self.runs.plan(self.minutes, lambda: self._plan(beside_blocks, began))
        self.say(f"fine-tuning: {plan.reason}")
        training = replace(beside_blocks.spec.training, threads=torch.get_num_threads())
        yield from finetuned_recipes(replace(beside_blocks.spec, training=training), plan.depths, plan.rates)

    def _entry(self, name: str) -> MethodEntry:
        return load_params(shipped_project() / "params.yaml").methods[name]

    def _spec(self, name: str, rate: float = PROMPT_RATES[0]) -> MethodSpec:
        entry = self._entry(name)
        training = TrainingOptions(
            learning_rate=rate,
            batch_size=BATCH,
            epochs=PROMPT_EPOCHS,
            schedule="cosine",
            patience=PROMPT_EPOCHS // 2,
            threads=1 if self.text_width < WIDE_TEXT else torch.get_num_threads(),
        )
        options = entry.options_for(None) | ({} if self.text_width else WITHOUT_TEXT)
        return MethodSpec(name, entry.kind, parse_options(entry.kind, options), training, ("closed",), "closed")

    def _plan(self, prompts: Recipe, began: float) -> SearchPlan:
        """Time some training steps and return the numbers of fine-tuned blocks to try in the time that is left.

        prompts: the training of prompts without fine-tuned blocks, whose epochs are timed.
        began: `time.monotonic()` at which the time for training began.
        """
        splits = self.data.manifest["split"].value_counts()
        counts = ImageCounts(int(splits["train"]), int(splits["val"]), len(self.data.manifest))
        left = 60 * self.minutes - (time.monotonic() - began)
        epoch = self.runs.result(prompts).seconds_per_epoch
        return plan_search(self.inputs.block_inputs, self._block_cost, counts, left, epoch)

    def _block_cost(self, blocks: int) -> BlockCost:
        """Measure the seconds per image of training and running the image tower's last `blocks` blocks.

        The result also has the seconds to compute these blocks' inputs from the cached inputs of an earlier block.
        """
        cost, cached = (block_cost(self.tower, blocks, of) for of in (blocks, self.inputs.block_inputs))
        return replace(cost, inputs=max(0.0, cached.forward - cost.forward))

    def final_files(self, recipe: Recipe) -> RunPaths:
        """Return the paths of the files of the final training, on all labelled images, with the settings `recipe`."""
        return RunPaths(self.runs.files(recipe).root / "all")

    def all_images(self, recipe: Recipe) -> RunInputs:
        """Return the data of the final training: features and labels, with every image in the training split."""
        manifest = self.data.manifest.assign(split="train")
        return self.inputs.with_manifest(manifest, labels_of(manifest)).read(recipe.spec.request)
