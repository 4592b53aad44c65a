"""A fit under way: a data set and an encoder, its features and the store of its trained recipes.

`duplex/recognition/fit.py` chooses both, runs this, and writes the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path

import numpy as np
import torch

from duplex.artifacts import RunPaths, log_folder
from duplex.config.params import EncoderParams, EvaluationParams
from duplex.data.tables import labels_of
from duplex.encoders.base import Encoder, load_encoder, resolve_device
from duplex.encoders.joined import join_features
from duplex.features.shared import encode_shared, user_cache
from duplex.features.tokens import Examples
from duplex.labels import World
from duplex.methods.registry import method_entry_point
from duplex.recognition.labelled_folder import LabelledFolder
from duplex.system.code import code_hash
from duplex.system.files import json_digest
from duplex.training.inputs import Data
from duplex.training.lineup import (
    BlockCost,
    BlockRoom,
    Clock,
    ImageCounts,
    Lineup,
    SearchCosts,
    block_cost,
    duration,
    epoch_cost,
    finetunable_blocks,
    lineup_within,
    stored_lineup,
    time_range,
    whole_lineup,
)
from duplex.training.logs import TrainingHooks, open_log
from duplex.training.recipes import (
    FROZEN_EPOCHS,
    FROZEN_RATES,
    FROZEN_SHARE,
    Attempt,
    RecipeChoice,
    SearchSpace,
    choose,
    search_recipes,
)
from duplex.training.run import TrainedMethod
from duplex.training.scoring import answer_groups
from duplex.training.trials import Trial, TrialResult, Trials

LARGEST_RIVAL = 10**9  # training images x features x words; above, regressions take many minutes
LARGEST_OPEN = 1 << 15  # pairs of states and objects up to which all of them are candidates
ALL = "all encoders"  # label of recipes that read the features of all encoders at once
Say = Callable[[str], None]


@dataclass(frozen=True)
class EncodedFolder:
    """Labelled images and their features; a few images may have none."""

    data: Data
    identity: Mapping[str, str]  # the settings that the features depend on
    block_inputs: int  # number of the image tower's last blocks whose inputs are cached
    bad: frozenset[int]  # rows of images without features


@dataclass(frozen=True)
class FolderFit:
    """A fit's data set and encoder; its features and trained recipes are made when asked for."""

    data: LabelledFolder
    encoder: EncoderParams
    cache: Path  # `MODEL.cache`
    minutes: float | None  # of search and final fit; None: however long they take
    say: Say
    log: str = "none"  # as `training.log`, of each training
    clock: Clock = time.perf_counter
    parts: tuple[FolderFit, ...] = ()  # fits with each of joined encoders, whose features these read

    @cached_property
    def device(self) -> torch.device:
        return torch.device(resolve_device("auto"))

    @cached_property
    def tower(self) -> Encoder:
        entry = self.encoder
        return load_encoder(entry.name, entry.weights, towers="image", device=str(self.device), resize=entry.resize)

    @cached_property
    def space(self) -> SearchSpace:
        """The recipes to try, which depend on the encoder's text tower."""
        entry = self.encoder
        text = load_encoder(entry.name, entry.weights, towers="text", device=str(self.device)).text
        return SearchSpace(0 if text is None else text.width)

    @property
    def world(self) -> World:
        """The world of the model's answers: open with up to 32,768 state-object pairs, else closed."""
        return "open" if self.data.labels.size <= LARGEST_OPEN else "closed"

    @cached_property
    def room(self) -> BlockRoom:
        """How many of the encoder's blocks can be fine-tuned."""
        return finetunable_blocks(self.tower, len(self.data.manifest), user_cache())

    def room_line(self) -> str:
        """One line on how many blocks can be fine-tuned, and why."""
        limit = f"fine-tuning: up to {self.room.depth} blocks; " if self.room.depth else "no fine-tuning: "
        return limit + self.room.reason

    @cached_property
    def encoded(self) -> EncodedFolder:
        """The data set with features; images that are not in the user's cache are encoded."""
        if self.parts:
            return self._joined()
        data = self.data
        depth = self.room.depth
        images = data.manifest["image"].tolist()
        features, bad = encode_shared(user_cache(), self.tower, data.root, images, data.digests, block_inputs=depth)
        if bad:
            listed = [f"{each.image} ({each.reason})" for each in bad[:3]] + ["..."] * (len(bad) > 3)
            self.say(f"images that cannot be used are left out ({len(bad):,}): {', '.join(listed)}")
        device = str(self.device)
        inputs = Data(data.manifest, data.labels, features, self.encoder, device, skip_frozen_blocks=True)
        return EncodedFolder(inputs, features.identity, depth, frozenset(each.row for each in bad))

    def _joined(self) -> EncodedFolder:
        # the cached features of all encoders; no image is encoded again
        each = [part.encoded for part in self.parts]
        cls = [torch.from_numpy(encoded.data.open().cls) for encoded in each]
        features = join_features(cls).half().float().numpy()  # rounded like those of a cache
        inputs = Data(self.data.manifest, self.data.labels, features, self.encoder, str(self.device))
        identity = {f"encoder {place}": json_digest(encoded.identity) for place, encoded in enumerate(each, 1)}
        return EncodedFolder(inputs, identity, 0, frozenset().union(*(encoded.bad for encoded in each)))

    def with_readable_images(self) -> FolderFit:
        """Encode all images; returns the fit without unreadable images and pairs that only they show."""
        if not self.encoded.bad:
            return self
        kept = ~np.isin(np.arange(len(self.data.manifest)), list(self.encoded.bad))
        manifest = self.data.manifest[kept].reset_index(drop=True)
        digests = list(compress(self.data.digests, kept))
        data = replace(self.data, manifest=manifest, labels=labels_of(manifest), digests=digests)
        return replace(self, data=data, parts=tuple(replace(part, data=data) for part in self.parts))

    @cached_property
    def trials(self) -> Trials:
        """Store of the trained recipes, in a folder named by labels, features, code and device."""
        is_gpu = self.device.type == "cuda"
        modules = [method_entry_point(kind).module for kind in self.space.kinds]
        key = {
            "contents": self.data.digests,
            "rows": self.data.manifest[["state", "object", "split"]].to_numpy().tolist(),
            "features": self.encoded.identity,
            "torch": torch.__version__,
            "code": code_hash("duplex.training.recipes", "duplex.recognition.answers", *modules),
            "device": torch.cuda.get_device_name(self.device) if is_gpu else torch.get_num_threads(),
        }
        folder = self.cache / f"recipes-{json_digest(key)[:16]}"
        read = self.encoded.data.read
        settings = EvaluationParams()
        return Trials(
            folder,
            read,
            self.device,
            settings,
            accuracies=self._accuracies,
            hooks=self._hooks,
            clock=self.clock,
        )

    def _hooks(self, trial: Trial) -> TrainingHooks:
        place = log_folder(self.log, self.cache.stem, trial.slug, trial.seed)
        return TrainingHooks(log=open_log(self.log, place))

    def _accuracies(self, run: TrainedMethod, val: Examples) -> dict[str, float]:
        # at the share of unseen pairs that the model would store
        found = answer_groups(run.method, val, self.data.labels, run.record.confidence, self.world)
        answered = found.at(found.balanced_share)
        return {
            "accuracy": answered.accuracy,
            "accuracy_seen": answered.seen_accuracy,
            "accuracy_unseen": answered.unseen_accuracy,
        }

    @property
    def limit(self) -> float | None:
        """Seconds that all trainings may take; None: however long they take."""
        return None if self.minutes is None else 60 * self.minutes

    @cached_property
    def lineup(self) -> tuple[Lineup, SearchCosts]:
        """The numbers of blocks to fine-tune, with times that were measured here.

        Only in limited time do they depend on these times, and are stored for an interrupted fit.
        """
        if self.limit is None:
            return whole_lineup(self.encoded.block_inputs), self._costs()
        left = (1 - len(FROZEN_RATES) * FROZEN_SHARE) * self.limit

        def make() -> tuple[Lineup, SearchCosts]:
            costs = self._costs()
            return lineup_within(left, costs), costs

        return stored_lineup(self.trials.folder / f"lineup-{self.minutes:g}.json", make)

    def _costs(self) -> SearchCosts:
        splits = self.data.manifest["split"].value_counts()
        counts = ImageCounts(int(splits["train"]), int(splits["val"]), len(self.data.manifest))
        spec = self.space.prompts()[0].spec
        epoch = epoch_cost(spec, self.encoded.data.read(spec.request), self.device, self.clock)
        blocks = {each: self._block_cost(each) for each in whole_lineup(self.encoded.block_inputs).depths}
        return SearchCosts(counts, blocks, epoch)

    def _block_cost(self, blocks: int) -> BlockCost:
        cost = block_cost(self.tower, blocks, blocks, clock=self.clock)
        cached = block_cost(self.tower, blocks, self.encoded.block_inputs, clock=self.clock)
        return replace(cost, inputs=max(0.0, cached.forward - cost.forward))

    def outlook(self) -> str:
        """One line on the recipes that will be tried, and the time that this takes."""
        lineup, costs = self.lineup
        trained = f"training: {self.space.trained}, then fine-tuning of {lineup.describe()}"
        if self.limit is not None:
            return f"{trained}; in {duration(self.limit)}"
        frozen = len(FROZEN_RATES) * FROZEN_EPOCHS * costs.epoch
        least, most = time_range(lineup, costs)
        return f"{trained}; {duration(frozen + least)} to {duration(frozen + most)} on this machine"

    def search(self) -> RecipeChoice:
        """Try the recipes, and choose one by validation."""
        lineup, costs = self.lineup
        tuned = self.space.finetuned(lineup, self.limit, costs)
        frozen = self.space.frozen(self.limit, regressions=self.no_regressions is None)
        return search_recipes(frozen, tuned, self.trials.result, self.say)

    @cached_property
    def no_regressions(self) -> str | None:
        """Why regressions of states and objects are left out; None: they are tried."""
        labels = self.data.labels
        images = int((self.data.manifest["split"] == "train").sum())
        if images * self.tower.dim * (len(labels.states) + len(labels.objects)) > LARGEST_RIVAL:
            return "these images would take many minutes"
        if not all(known.all() for known in labels.trained_words):
            return "some words have no training images"
        return None

    def final_seconds(self, choice: RecipeChoice) -> float | None:
        """Seconds for the steps of the final fit: what is left, or at least half of the chosen recipe's."""
        if self.limit is None:
            return None
        recipe = choice.recipe
        left = self.limit - choice.seconds
        if recipe.blocks:
            costs = self.lineup[1]
            left *= costs.steps_share(recipe.blocks, recipe.spec.training.epochs)
        return max(left, self.trials.result(recipe).seconds / 2)

    def final_files(self, recipe: Trial) -> RunPaths:
        """Paths of the final training's files, which repeats `recipe` on all labelled images."""
        return RunPaths(self.trials.files(recipe).root / "all")


def search_encoders(joined: FolderFit) -> tuple[FolderFit, RecipeChoice]:
    """Search recipes for several encoders, each alone and all at once; returns the chosen one's fit.

    Closed forms and regressions are compared for each. Prompts or heads are trained for the best
    of all, blocks for the best alone, since only one image tower can be fine-tuned.
    """
    say = joined.say
    fits = {f"encoder {place}": part for place, part in enumerate(joined.parts, 1)}
    listed = ", ".join(f"{label} {fit.encoder.name}" for label, fit in fits.items())
    say(f"{listed}: compared on frozen features, each alone and all at once")
    owners: dict[str, tuple[str, FolderFit]] = {}  # name of a trial -> label and fit

    def labelled(label: str, fit: FolderFit, trials: Iterable[Trial]) -> list[Trial]:
        named = [replace(trial, name=f"{trial.name}, {label}") for trial in trials]
        owners.update((trial.name, (label, fit)) for trial in named)
        return named

    untrained = []
    for label, fit in {**fits, ALL: joined}.items():
        untrained += labelled(label, fit, fit.space.untrained(fit.no_regressions is None))
    attempts = [Attempt(trial, owners[trial.name][1].trials.result(trial)) for trial in untrained]
    best_label, best = owners[choose(attempts).recipe.name]
    alone = [each for each in attempts if owners[each.recipe.name][0] != ALL]
    single_label, single = owners[choose(alone).recipe.name]

    def result(trial: Trial) -> TrialResult:
        fit = owners[trial.name][1] if trial.name in owners else single
        return fit.trials.result(trial)

    say(f"best: {best_label}; {best.space.trained} are trained for it, blocks of {single_label} are fine-tuned")
    say(single.room_line())
    say(single.outlook())
    lineup, costs = single.lineup
    tuned = single.space.finetuned(lineup, single.limit, costs)
    frozen = [*untrained, *labelled(best_label, best, best.space.prompts(best.limit))]
    choice = search_recipes(frozen, tuned, result, say)
    _, chosen = owners.get(choice.recipe.name, (single_label, single))
    return chosen, choice
