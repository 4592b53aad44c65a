"""The command `duplex fit` and `duplex.fit_folder`: from labelled images to a model folder.

    SOURCE -> check, split -> features -> choice of a recipe -> final fit on all images -> MODEL

`MODEL.cache` holds each recipe tried and unfinished training. A killed fit resumes from there and
writes the same bytes; a second fit of the same data retrains nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duplex.artifacts import RunPaths, log_folder
from duplex.config.params import EncoderParams, EvaluationParams
from duplex.data.download import local_source
from duplex.data.tables import count_dataset, labels_of
from duplex.encoders.base import (
    PACKAGED,
    RESIZES,
    Encoder,
    encoder_identity,
    is_random,
    is_reachable,
    load_encoder,
    missing_weights,
    resolve_device,
    unknown_words,
)
from duplex.errors import DuplexError, UsageError, require
from duplex.evaluation.answered import GroupAnswers
from duplex.features.shared import encode_shared, user_cache
from duplex.features.tokens import Examples
from duplex.labels import LabelSpace, World, prompt_name
from duplex.methods.base import Method
from duplex.methods.gaussian import HasStatistics
from duplex.methods.registry import method_entry_point
from duplex.recognition.answers import answers_with_labels
from duplex.recognition.export import (
    RunFacts,
    export,
    refuse_existing_model,
    refuse_lost_updates,
    remark,
    sole_model_writer,
    write_fit,
    write_statistics,
)
from duplex.recognition.labelled_folder import (
    LabelledFolder,
    describe,
    load_pixel_digests,
    read_labelled_folder,
    save_pixel_digests,
)
from duplex.recognition.trained import TrainedRun
from duplex.recognition.worlds import evaluate_world
from duplex.report.own import OwnData, write_page
from duplex.system.code import code_hash
from duplex.system.files import expanded_path, json_digest, named_path, refuse_existing, sole_writer, write_json
from duplex.training.checkpoint import TrainingRecord
from duplex.training.inputs import Data, RunInputs, long_prompts
from duplex.training.logs import TrainingHooks, open_log
from duplex.training.loop import ResumePoint
from duplex.training.recipes import (
    BlockCost,
    BlockRoom,
    ImageCounts,
    Lineup,
    RecipeChoice,
    SearchSpace,
    block_cost,
    choose_lineup,
    finetunable_blocks,
    search_recipes,
    stored_lineup,
)
from duplex.training.run import TrainedMethod, reproducible, train_on_all_images
from duplex.training.scoring import Calibration, measure_unseen_mass
from duplex.training.trials import Trial, Trials

LONGEST = 1800.0  # seconds that encoding may take on a CPU
# Encoders, the most accurate first -> published weights, seconds per image on one CPU core
OFFERS = {
    "ViT-L-14-quickgelu": ("openai", 1.4),
    "ViT-B-16-quickgelu": ("openai", 0.3),
    "ViT-B-32-quickgelu": ("openai", 0.08),
}


def choose_encoder(labels: LabelSpace, images: int, *, gpu: bool, cores: int) -> tuple[EncoderParams, str]:
    """The most accurate encoder that needs at most half an hour (with a GPU: any time), and why."""
    in_time = [name for name, (_, seconds) in OFFERS.items() if gpu or seconds * images / cores <= LONGEST]
    machine = "a GPU" if gpu else f"{cores} cores and no GPU"
    why = f"{machine}, {images:,} images"
    absent = {}
    for name in in_time or list(OFFERS)[-1:]:
        entry = EncoderParams(name=name, weights=OFFERS[name][0])
        missing = missing_weights(name, entry.weights)
        if missing is None:
            return entry, f"{why}, weights on disk"
        absent[name] = entry, missing
    if not unknown_words(PACKAGED, prompt_words(labels)):
        return EncoderParams(name=PACKAGED), "the packaged encoder knows all words"
    for entry, missing in absent.values():
        if is_reachable(missing.address):
            return entry, f"{why}, {(missing.size or 0) / 1e9:.1f} GB to download"
    raise UsageError(
        f"the weights of {', '.join(absent)} are not on this computer, and none can be downloaded; connect to "
        "the network and run the same command again, or give --encoder local-dir:FOLDER, where FOLDER holds an "
        "open_clip model"
    )


def checked_encoder(name: str, weights: str | None, labels: LabelSpace) -> tuple[EncoderParams, str]:
    """Settings of the encoder `name`, and why it is used; `UsageError` if it cannot be used."""
    if weights is None and name.startswith("ViT-"):
        weights = "openai"
    kind, _, place = name.partition(":")  # paths become absolute: a model is used from other folders
    if kind == "local-dir" or (kind == "blip" and Path(place).expanduser().is_dir()):
        name = f"{kind}:{Path(place).expanduser().resolve()}"
    if weights is not None and Path(weights).expanduser().is_file():
        weights = str(Path(weights).expanduser().resolve())
    try:
        encoder_identity(name, weights)
    except DuplexError as error:
        raise UsageError(f"--encoder {name}: {error}") from None
    if is_random(weights):
        raise UsageError(
            f"the weights {weights} are random, and no model can be fitted with them; give pretrained weights"
        )
    require_known_words(name, prompt_words(labels))
    return EncoderParams(name=name, weights=weights), "named"


def require_known_words(name: str, texts: Sequence[str], advice: str = "choose another --encoder") -> None:
    """Raise `UsageError` with `advice` if an encoder's fixed vocabulary lacks a word of `texts`."""
    unknown = unknown_words(name, texts)
    if unknown:
        listed = ", ".join(map(repr, unknown[:5]))
        raise UsageError(f"the encoder {name!r} does not know the words {listed}; {advice}")


def prompt_words(labels: LabelSpace) -> Sequence[str]:
    """The names of all states and objects, as prompts write them."""
    return [prompt_name(name) for name in (*labels.states, *labels.objects)]


SOURCE = "source.json"  # in MODEL.cache: where the labelled images are
LARGEST_RIVAL = 10**9  # training images x features x words; above, regressions take many minutes
LARGEST_OPEN = 1 << 15  # pairs of states and objects up to which all of them are candidates
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
    minutes: float
    say: Say
    log: str = "none"  # as `training.log`, of each training

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

    @cached_property
    def encoded(self) -> EncodedFolder:
        """The data set with features; images that are not in the user's cache are encoded."""
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

    def with_readable_images(self) -> FolderFit:
        """Encode all images; returns the fit without unreadable images and pairs that only they show."""
        if not self.encoded.bad:
            return self
        kept = ~np.isin(np.arange(len(self.data.manifest)), list(self.encoded.bad))
        manifest = self.data.manifest[kept].reset_index(drop=True)
        digests = list(compress(self.data.digests, kept))
        data = replace(self.data, manifest=manifest, labels=labels_of(manifest), digests=digests)
        return replace(self, data=data)

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
        return Trials(folder, read, self.device, settings, accuracy=self._accuracy, hooks=self._hooks)

    def _hooks(self, trial: Trial) -> TrainingHooks:
        place = log_folder(self.log, self.cache.stem, trial.slug, trial.seed)
        return TrainingHooks(log=open_log(self.log, place))

    def _accuracy(self, run: TrainedMethod, val: Examples) -> float | None:
        confidence = run.record.confidence
        answers = answers_with_labels(run.method, val, self.data.labels, confidence, self.world)
        return answers.at(answers.stored).accuracy

    def search(self, began: float) -> RecipeChoice:
        """Try the recipes, and choose one by validation; `began`: `time.monotonic()` of the start."""
        frozen = [[self.space.nothing_trained], self.space.prompts]
        return search_recipes(frozen, self._finetuned(began), self.trials.result, self.say)

    def _finetuned(self, began: float) -> Iterator[list[Trial]]:
        lineup = stored_lineup(self.trials.folder, self.minutes, lambda: self._lineup(began))
        self.say(f"fine-tuning: {lineup.reason}")
        yield from self.space.finetuned(lineup)

    def _lineup(self, began: float) -> Lineup:
        splits = self.data.manifest["split"].value_counts()
        counts = ImageCounts(int(splits["train"]), int(splits["val"]), len(self.data.manifest))
        left = 60 * self.minutes - (time.monotonic() - began)
        epoch = self.trials.result(self.space.prompts[0]).epoch_seconds
        return choose_lineup(self.encoded.block_inputs, self._block_cost, counts, left, epoch)

    def _block_cost(self, blocks: int) -> BlockCost:
        cost = block_cost(self.tower, blocks, blocks)
        cached = block_cost(self.tower, blocks, self.encoded.block_inputs)
        return replace(cost, inputs=max(0.0, cached.forward - cost.forward))

    def final_files(self, recipe: Trial) -> RunPaths:
        """Paths of the final training's files, which repeats `recipe` on all labelled images."""
        return RunPaths(self.trials.files(recipe).root / "all")


def load_recipe(fit: FolderFit, recipe: Trial) -> tuple[TrainingRecord, Method[Any], RunInputs]:
    """Load a trained recipe, whose record has what an estimate of the share of new pairs needs."""
    record, method, inputs = fit.trials.load(recipe)
    val = inputs.examples["val"].to(fit.device)
    confidence = measure_unseen_mass(method, val, inputs.labels, record.confidence, fit.world)
    return replace(record, confidence=confidence), method, inputs


def fit_on_all_images(fit: FolderFit, recipe: Trial) -> TrainedMethod:
    """Train the chosen recipe on all labelled images, or continue an interrupted training."""
    record, method, _ = load_recipe(fit, recipe)
    files = fit.final_files(recipe)
    resume = ResumePoint("all images", files.unfinished_training, fit.trials.files(recipe).root.name)
    manifest = fit.data.manifest.assign(split="train")
    data = replace(fit.encoded.data, manifest=manifest, labels=labels_of(manifest))
    inputs = data.read(recipe.spec.request)
    options = method.chosen_options()
    run = train_on_all_images(recipe.spec, record, options, inputs, fit.device, resume)
    run.write(files)
    return run


MINUTES = 30.0


def fit_folder(
    source: str | Path,
    out: str | Path,
    *,
    images: str | Path | None = None,
    encoder: str | None = None,
    weights: str | None = None,
    resize: str | None = None,
    minutes: float = MINUTES,
    say: Say = print,
    log: str = "none",
    force: bool = False,
) -> Path:
    """Fit a model to labelled images, as `duplex fit` does; write it to a folder and return that.

    `Recognizer.load` reads the folder. Features are kept in the user's cache, unfinished training
    in `OUT.cache`.

    source: a folder `state/object/*.jpg`, a table with the columns image, state, object and
        optionally split, the folder of a published benchmark, or `hf-datasets:OWNER/NAME` on the
        Hugging Face hub.
    out: folder to write.
    images: folder that a table's image paths start from; by default the table's folder.
    encoder: name of the frozen encoder; None: the best that encodes the images in half an hour, or
        on a GPU the best.
    weights: the encoder's weights, a published tag or a file.
    resize: how images become square: "crop", "squash" (distort) or "pad"; None: as the weights' own
        preprocessing.
    minutes: time limit of training, after the images are encoded; timed steps decide which recipes
        are tried.
    say: function that is called with each line of text on the data, the recipes tried, and the
        result.
    log: log of each recipe's training, with the values of `training.log` in params.yaml: dvclive,
        tensorboard, wandb, mlflow, a plug-in's log or none.
    force: replace a model at `out` and its page, unless it was updated with further images.
    """
    if not minutes > 0:
        raise UsageError(f"--minutes is {minutes:g}; expected a number greater than 0")
    if weights is not None and encoder is None:
        raise UsageError(f"--weights {weights!r} is given without --encoder; add --encoder, or leave --weights out")
    place = local_source(source, user_cache())
    image_folder = None if images is None else expanded_path(images, "images").resolve()
    out = named_path(expanded_path(out, "out"))
    refuse_existing_model(out, force=force)
    refuse_existing(page_file(out), force=force)
    cache = fit_cache_folder(out)
    data = read_labelled_folder(place, image_folder, known_pixels=load_pixel_digests(cache))
    refuse_lost_updates(out, data.contents)
    describe(data, say)
    if encoder is None:
        gpu = resolve_device("auto") != "cpu"
        cores = os.cpu_count() or 1
        entry, reason = choose_encoder(data.labels, len(data.manifest), gpu=gpu, cores=cores)
    else:
        entry, reason = checked_encoder(encoder, weights, data.labels)
    if resize is not None:
        entry = entry.model_copy(update={"resize": require(resize, RESIZES, "resize")})
    say(f"encoder: {entry.name} ({reason})")
    if long := long_prompts(entry.name, entry.weights, data.labels):
        raise UsageError(
            f"some pairs ({len(long):,}) have prompts that are too long for {entry.name}; shorten the names of "
            f"their states or objects, such as those of {long[0]!r}"
        )
    with reproducible(), sole_writer(cache / "fit", "fit", "or choose another --out"):
        write_json(cache / SOURCE, [str(place), image_folder and str(image_folder)])
        return _fit(FolderFit(data, entry, cache, minutes, say, log), out, force)


def fit_cache_folder(out: Path) -> Path:
    """The folder `MODEL.cache` beside the model's folder `out`; it stores what a fit has trained."""
    return out.with_name(f"{out.name}.cache")


def page_file(out: Path) -> Path:
    """Path of the HTML page about the data set, beside the model's folder."""
    return out.with_name(f"{out.name}-page.html")


def _fit(fit: FolderFit, out: Path, force: bool) -> Path:
    say = fit.say
    save_pixel_digests(fit.cache, fit.data.pixels)
    room = fit.room
    limit = f"fine-tuning: up to {room.depth} blocks; " if room.depth else "no fine-tuning: "
    say(limit + room.reason)
    fit = fit.with_readable_images()
    began = time.monotonic()
    rival, regressions = _rival(fit)  # first, so that the time limit includes it
    choice = fit.search(began)
    say(f"chosen: {choice.recipe.name}")
    fit.trials.delete_paused()
    measured, answers = _measure(fit, choice.recipe)
    measured["regressions"] = regressions
    say(f"on {measured['images']:,} test images, which had no part in training: {_summary(measured)}")
    say(rival)
    say(f"fitting the model to all {len(fit.data.manifest):,} labelled images")
    run = fit_on_all_images(fit, choice.recipe)
    with sole_model_writer(out, "then run the same command again"):
        refuse_lost_updates(out, fit.data.contents)  # an update may have ended during the fit
        _write_model(out, fit, run, choice, measured, force)
    for other in fit.cache.glob("recipes-*"):
        if other != fit.trials.folder and re.fullmatch("recipes-[0-9a-f]+", other.name):  # of other labels
            shutil.rmtree(other, ignore_errors=True)
    data = fit.data
    examples = fit.encoded.data.read().examples
    facts = [("encoder", fit.encoder.name), ("recipe", choice.recipe.name)]
    by_share = {"model": measured["at_shares"]}
    if regressions is not None:
        by_share["two logistic regressions"] = regressions["at_shares"]
    answered = answers.at(answers.stored)
    own = OwnData(out.name, data.labels, data.manifest, data.root, answered, examples, choice.table, facts, by_share)
    page = write_page(own, page_file(out))
    what = "where the model is right and wrong, and estimates its accuracy with twice as many images"
    say(f"{page} shows {what}")
    return out


def _measure(fit: FolderFit, recipe: Trial) -> tuple[dict[str, Any], GroupAnswers]:
    # on the test images, which had no part in training or any choice
    record, method, inputs = load_recipe(fit, recipe)
    test = inputs.examples["test"].to(fit.device)
    inputs = replace(inputs, examples={**inputs.examples, "test": test})
    answers = answers_with_labels(method, test, inputs.labels, record.confidence, fit.world)
    bias = (record.calibration or {})["closed"].bias
    metrics = {
        world: evaluate_world(method, inputs, EvaluationParams(), world, Calibration(bias)).metrics
        for world in dict.fromkeys(("closed", fit.world))
    }
    numbers = {
        "images": len(test),
        "at_shares": answers.by_share(),
        "calibration_error": 100 * answers.at(answers.stored).reliability.calibration_error,
        "metrics": metrics,
    }
    return numbers, answers


def _summary(measured: Mapping[str, Any]) -> str:
    closed = measured["metrics"]["closed"]
    parts = [f"AUC {closed['auc']:.1f} (closed world), calibration error {measured['calibration_error']:.1f} %"]
    wordings = {
        "assumed": "if {:.0f} % of images are of new pairs",
        "estimated": "over these images, with {:.0f} ± {:.0f} % estimated from them",
        "true": "if {:.0f} % are, as among these images",
    }
    for name, at in measured["at_shares"].items():
        shares = wordings[name].format(100 * at["new_share"], 100 * at.get("error", 0.0))
        parts.append(
            f"accuracy {at['accuracy']:.1f} % {shares} "
            f"({at['accuracy_seen']:.1f} % for pairs with training images, {at['accuracy_unseen']:.1f} % for new pairs)"
        )
    return "; ".join(parts)


def _rival(fit: FolderFit) -> tuple[str, dict[str, Any] | None]:
    # a line on how the plain rival does on the same test images, and its numbers
    about = "two logistic regressions, for comparison"
    labels = fit.data.labels
    images = int((fit.data.manifest["split"] == "train").sum())
    if images * fit.tower.dim * (len(labels.states) + len(labels.objects)) > LARGEST_RIVAL:
        return f"{about}, are left out: these images would take many minutes", None
    if not all(known.all() for known in labels.trained_words):
        return f"{about}, are left out: some words have no training images", None
    fit.trials.result(fit.space.rival)  # trains it
    rival, _ = _measure(fit, fit.space.rival)
    return f"{about}: {_summary(rival)}", rival


def _write_model(
    out: Path, fit: FolderFit, run: TrainedMethod, choice: RecipeChoice, measured: dict[str, Any], force: bool
) -> None:
    trained = TrainedRun(fit.final_files(choice.recipe).checkpoint, fit.device)
    data = fit.data
    counts = count_dataset(data.labels, data.manifest).to_dict()
    fitted = run.method.fitted_statistics() if isinstance(run.method, HasStatistics) else None
    images = data.manifest["split"].value_counts()
    record = {  # without dates or durations, so that equal fits have equal files
        "encoder": fit.encoder.model_dump(exclude_defaults=True),
        "counts": counts,
        "images": {split: int(count) for split, count in sorted(images.items())},
        "recipes": list(choice.table),
        "chosen": choice.recipe.name,
        "measured": measured,
        "contents": data.contents,  # which an update does not count twice
    }
    facts = RunFacts(out.name, metrics=measured["metrics"], counts=counts, remark=remark(record))

    def add_files(folder: Path, tensors: dict[str, Tensor]) -> None:
        write_fit(folder, record, tensors)
        if fitted is not None:
            write_statistics(folder, fitted, tensors)

    export(trained, fit.world, out, facts, add_files, force=force)
