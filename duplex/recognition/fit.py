"""The command `duplex fit`: train a model on a folder or table of labelled images, and write it as a model folder.

    SOURCE -> check, split -> features -> choice of training settings by validation -> final fit on all images -> MODEL

Features are kept in the user's cache. Beside MODEL, `MODEL.cache` holds each training recipe tried (nothing trained,
prompts, or blocks of the image tower, with prompts if the encoder has a text tower) and unfinished training. A killed
fit resumes from there and writes the same bytes; a second fit of the same data retrains nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import PIL
import torch
from torch import Tensor

from duplex.artifacts import RunPaths, log_folder
from duplex.config.params import EncoderParams, EvaluationParams, MethodEntry, load_params, shipped_project
from duplex.data.check import DataIssue, alike_labels, check_labels_of
from duplex.data.contents import join_copies, looks_from_texts, near_copies, read_digests
from duplex.data.download import local_source
from duplex.data.sources import detect_source, load_source, read_folder
from duplex.data.tables import LabelledImages, complete_rows, count_dataset, from_rows, labels_of, read_table
from duplex.encoders.base import (
    PACKAGED,
    Encoder,
    encoder_identity,
    is_random,
    is_reachable,
    load_encoder,
    missing_weights,
    resolve_device,
    unknown_words,
)
from duplex.errors import DuplexError, UsageError, as_usage_error
from duplex.evaluation.probabilities import AnsweredImages
from duplex.features.shared import encode_shared, user_cache
from duplex.features.tokens import Examples
from duplex.labels import Ints, LabelSpace, World, prompt_name
from duplex.methods.registry import method_entry_point, parse_options
from duplex.options import SourceOptions, TrainingOptions
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
from duplex.recognition.trained import TrainedRun
from duplex.report.own import OwnData, write_page
from duplex.system.code import code_hash
from duplex.system.files import expanded_path, json_digest, named_path, refuse_existing, sole_writer, write_json
from duplex.training.checkpoint import with_checksum
from duplex.training.inputs import Data, RunInputs, long_prompts
from duplex.training.logs import TrainingHooks, open_log
from duplex.training.loop import ResumePoint
from duplex.training.run import MethodSpec, Run, evaluate_world, reproducible, train_on_all_images
from duplex.training.scoring import Calibration
from duplex.training.trials import (
    BlockCost,
    BlockRoom,
    ImageCounts,
    RecipeChoice,
    Schedule,
    Trial,
    Trials,
    block_cost,
    choose_depths,
    finetunable_blocks,
    finetuned_recipes,
    search_recipes,
    stored_schedule,
)

LONGEST = 1800.0  # seconds that encoding may take on a CPU


OFFERS = {  # encoders with published weights, the most accurate first -> weights, seconds per image on one CPU core
    "ViT-L-14-quickgelu": ("openai", 1.4),
    "ViT-B-16-quickgelu": ("openai", 0.3),
    "ViT-B-32-quickgelu": ("openai", 0.08),
}


def choose_encoder(labels: LabelSpace, images: int, *, gpu: bool, cores: int) -> tuple[EncoderParams, str]:
    """Choose the most accurate encoder that takes at most half an hour for the images (with a GPU: any time).

    If none is fast enough, takes the fastest. Prefers weights on disk; without any, takes the small encoder that ships
    with the package if its vocabulary has all words of the labels, and otherwise the best whose weights can be
    downloaded. Raises `UsageError` if there is none. Also returns the reason for the choice.
    """
    in_time = [name for name, (_, seconds) in OFFERS.items() if gpu or seconds * images / cores <= LONGEST]
    why = f"{'a GPU' if gpu else f'{cores} cores and no GPU'}, {images:,} images"
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
        f"the weights of {', '.join(absent)} are not on this computer, and none can be downloaded; connect to the "
        "network and run the same command again, or give --encoder local-dir:FOLDER, where FOLDER holds an open_clip "
        "model"
    )


def checked_encoder(name: str, weights: str | None, labels: LabelSpace) -> tuple[EncoderParams, str]:
    """Settings of the encoder `name`, and why it is used; UsageError if it is unknown or cannot read a label's word."""
    if weights is None and name.startswith("ViT-"):
        weights = "openai"
    kind, _, place = name.partition(":")  # paths are made absolute, because a model is used from other folders
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
    """Raise `UsageError` if an encoder with a fixed vocabulary lacks a word of `texts`; `advice` ends the message."""
    if unknown := unknown_words(name, texts):
        raise UsageError(f"the encoder {name!r} does not know the words {', '.join(map(repr, unknown[:5]))}; {advice}")


def prompt_words(labels: LabelSpace) -> Sequence[str]:
    """The names of all states and objects, as prompts write them."""
    return [prompt_name(name) for name in (*labels.states, *labels.objects)]


MOST_CONTRADICTED = 0.01  # share of images with copies of another label that are left out; more is an error
PIXELS = "pixels.json"  # in MODEL.cache: digest of the pixels of each image, by the sha256 of its file
DECODER = {"format": "duplex-pixels-3", "decoder": f"Pillow {PIL.__version__}"}  # others may decode other pixels


@dataclass(frozen=True)
class LabelledFolder:
    """A data set to fit a model to: labelled images without copies, with their split and digests."""

    root: Path  # folder that image paths start from
    manifest: pd.DataFrame  # image, state, object, split
    labels: LabelSpace
    digests: list[str]  # sha256 of each row's file
    pixels: Mapping[str, str]  # digests of pixels, also of copies left out, by the sha256 of the file (`read_digests`)
    notes: tuple[str, ...] = ()  # what was left out

    @property
    def contents(self) -> dict[str, str]:
        """Sorted dict from the sha256 of each image file to a digest of its pixels; it identifies the images."""
        return {digest: self.pixels[digest].partition(" ")[0] for digest in sorted(self.digests)}


@dataclass(frozen=True)
class DistinctImages:
    """Labelled images of which no two have the same content, and notes on the images left out."""

    rows: pd.DataFrame  # image, state, object and further columns
    digests: list[str]  # sha256 of each row's file
    notes: list[str]  # images that are missing or have the content of another
    pixels: dict[str, str]  # digests of pixels, also of copies left out, by the sha256 of the file (`read_digests`)


@as_usage_error()
def read_labelled_folder(
    source: Path, images: Path | None = None, known_pixels: Mapping[str, str] = MappingProxyType({})
) -> LabelledFolder:
    """Read labelled images from a folder `state/object/*.jpg`, a table, or a benchmark's folder, and split them.

    Copies of an image with the same label are used once; images with two labels are left out. Raises `UsageError` if
    more than one image in a hundred has two labels, and for data that cannot be split into seen and unseen pairs.

    images: folder that a table's image paths start from; by default the table's folder.
    known_pixels: digests of pixels that were computed before, by the sha256 of the file.
    """
    description = detect_source(source, None, images)
    notes: list[str] = []
    if description.kind == "standard":
        data = load_source(description)
        digests, pixels = read_digests(description.root, data.manifest["image"].tolist(), known_pixels)
    else:
        distinct = distinct_images(description, source, known_pixels)
        digests = distinct.digests
        pixels = distinct.pixels
        notes = distinct.notes
        for kind in ("state", "object"):
            names = distinct.rows[kind].unique()
            if len(names) < 2:
                raise UsageError(f"{source} has only one {kind}, {names[0]!r}; add images of at least one other {kind}")
        listed = distinct.rows["image"].tolist()
        copies = near_copies(looks_from_texts(pixels[file] for file in digests))
        keys = dict(zip(listed, join_copies(digests, copies), strict=True))
        data = from_rows(distinct.rows, description.split, source, lambda images: [keys[image] for image in images])
        notes += near_copy_notes(data, listed, copies)
    if missing := [text for issue in check_labels_of(data) if issue.fatal for text in issue.examples]:
        own = "give both val and test images of train's pairs and of others, or leave out the column split"
        remedy = "add images of each pair, or add pairs" if data.made_split else own
        raise UsageError(f"{source} cannot be fitted, as {' and '.join(missing)}; {remedy}")
    notes += [f"{text}: {count:,}" for text, count in data.notes.items()] + alike_labels(data)
    manifest = data.manifest.reset_index(drop=True)
    return LabelledFolder(description.root, manifest, data.labels, digests, pixels, tuple(notes))


def near_copy_notes(data: LabelledImages, images: Sequence[str], copies: Ints) -> list[str]:
    """A list with one note that counts near-copies (`copies`: pairs of rows), in all and in two splits; [] if none."""
    split = data.manifest.set_index("image")["split"]
    across = sum(split[images[a]] != split[images[b]] for a, b in copies)
    where = f"{across:,} in two splits, which flatter the measured numbers" if across else "each in one split"
    pairs = tuple(f"{images[a]} = {images[b]}" for a, b in copies)
    issue = DataIssue(f"pairs of images are near-copies, saved or scaled again, {where}", len(pairs), pairs, True)
    return [str(issue)] if pairs else []


SOURCE = "source.json"  # in MODEL.cache: where the labelled images are


def load_pixel_digests(cache: Path) -> dict[str, str]:
    """Read cached digests of pixels, by the image file's sha256; empty if damaged or from another version of Pillow."""
    try:
        record = json.loads((cache / PIXELS).read_text(encoding="utf-8"))
        pixels: dict[str, str] = record["pixels"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return pixels if record == with_checksum({**DECODER, "pixels": pixels}) else {}


def save_pixel_digests(cache: Path, pixels: Mapping[str, str]) -> None:
    """Write digests of pixels, by the sha256 of the image file; unreadable images are left out."""
    decoded = {file: digest for file, digest in sorted(pixels.items()) if digest != file}
    write_json(cache / PIXELS, with_checksum({**DECODER, "pixels": decoded}))


def distinct_images(
    description: SourceOptions, source: Path, known_pixels: Mapping[str, str] = MappingProxyType({})
) -> DistinctImages:
    """Read the labelled images of a folder or table, each only once; also returns notes on copies left out.

    Files with equal bytes or pixels are copies (`known_pixels`: known digests of pixels, by sha256 of the file). Copies
    with different labels are all left out; if they are more than 1 % of all images, this raises `UsageError`.
    """
    root = description.root
    if description.kind == "standard":
        frame, skipped = load_source(description).manifest, dict[str, int]()
    elif description.table is None:
        frame, skipped = read_folder(root)
    elif root.is_dir():
        frame, skipped = read_table(description.table).drop_duplicates(ignore_index=True), {}
    else:
        problem = "is not a folder" if root.exists() else "does not exist"
        raise UsageError(f"--images: {root} {problem}; give the folder that the table's image paths start from")
    if partial := len(frame) - len(complete_rows(frame)):
        raise UsageError(f"some rows of {source} ({partial:,}) have only a state or an object; complete or remove them")
    images = frame["image"]
    files, pixels = read_digests(root, images.tolist(), known_pixels)
    digests = pd.Series(files, index=frame.index, dtype=object)
    missing = digests == ""
    if missing.all():
        raise UsageError(
            f"{source}: none of its {len(frame):,} images, such as {images.iloc[0]!r}, exists below {root}; "
            "correct the paths or give --images FOLDER"
        )
    frame, digests = frame[~missing], digests[~missing]
    contents = digests.map(pixels)
    contradicted = _contradicted(frame, contents, source)
    frame, digests = frame[~contradicted], digests[~contradicted]
    repeated = contents[~contradicted].duplicated()
    notes = [
        str(DataIssue(text, int(mask.sum()), tuple(images[mask.index[mask]]), True))
        for text, mask in (
            ("images left out because they are missing", missing),
            ("images left out because copies have another label", contradicted),
            ("images left out because another has the same content", repeated),
        )
        if mask.any()
    ]
    notes += [f"{text}: {count:,}" for text, count in skipped.items()]
    return DistinctImages(frame[~repeated].reset_index(drop=True), digests[~repeated].tolist(), notes, pixels)


def _contradicted(frame: pd.DataFrame, contents: pd.Series, source: Path) -> pd.Series:
    kinds = frame.assign(content=contents).drop_duplicates(["content", "state", "object"])
    twice = kinds.loc[kinds["content"].duplicated(keep=False), "content"]
    mask = contents.isin(twice)
    if mask.sum() > MOST_CONTRADICTED * len(frame):
        copies = kinds[kinds["content"] == twice.iloc[0]].head(2).itertuples()
        named = " and ".join(f"{row.image} ({row.state} {row.object})" for row in copies)
        raise UsageError(
            f"{source}: some images ({twice.nunique():,}) occur with two labels; for example, {named} "
            "have equal pixels; keep only the correctly labelled copy of each image"
        )
    return mask


def describe(data: LabelledFolder, say: Callable[[str], None]) -> None:
    """Describe a data set to the user: call `say` with lines of text on its counts and notes."""
    labels = data.labels
    pairs = data.manifest[["state", "object"]].drop_duplicates()
    counts = data.manifest["split"].value_counts()
    say(
        f"{len(data.manifest):,} images, {len(labels.states)} states, {len(labels.objects)} objects, "
        f"{len(pairs)} pairs; train {counts['train']:,}, validation {counts['val']:,}, test {counts['test']:,}"
    )
    for note in data.notes:
        say(f"note: {note}")


NOTHING_TRAINED, TRAINED = "closed_form", "dual"  # methods of the package's params.yaml
WITHOUT_TEXT = {NOTHING_TRAINED: "closed_form_visual", TRAINED: "dual_visual"}  # for encoders without a text tower
RIVAL = "linear"  # two logistic regressions, measured beside the model
LARGEST_RIVAL = 10**9  # training images x features x words; above, regressions take many minutes
FROZEN_RATES = (1e-3, 1e-4)  # learning rates of prompts or linear heads on frozen features
FROZEN_EPOCHS = 8  # of these, along half a cosine
BATCH = 64
WIDE_TEXT = 512  # width of a text tower from which on several threads train its prompts faster than one
LARGEST_OPEN = 1 << 15  # pairs of states and objects up to which all of them are candidates
SEED = 0
Say = Callable[[str], None]


@dataclass(frozen=True)
class EncodedFolder:
    """Labelled images and their features; a few images may have none."""

    data: Data
    identity: Mapping[str, str]  # the settings that the features depend on
    block_inputs: int  # number of the image tower's last blocks whose inputs are cached
    bad: frozenset[int]  # rows of images without features


@dataclass(frozen=True)
class FolderRecipes:
    """The training recipes that `duplex fit` tries on a data set."""

    data: LabelledFolder
    encoder: EncoderParams
    cache: Path  # folder of runs
    minutes: float
    say: Say
    log: str = "none"  # as `training.log`, of each training

    @cached_property
    def device(self) -> torch.device:
        return torch.device(resolve_device("auto"))

    @cached_property
    def tower(self) -> Encoder:
        return load_encoder(self.encoder.name, self.encoder.weights, towers="image", device=str(self.device))

    @cached_property
    def text_width(self) -> int:
        """Width of the text tower's token embeddings; 0 if the encoder has no text tower."""
        entry = self.encoder
        text = load_encoder(entry.name, entry.weights, towers="text", device=str(self.device)).text
        return 0 if text is None else int(text.embedding([text.start]).shape[1])

    @property
    def world(self) -> World:
        """The world that the model answers in: open with up to 32,768 state-object pairs, else closed."""
        return "open" if self.data.labels.size <= LARGEST_OPEN else "closed"

    @cached_property
    def room(self) -> BlockRoom:
        """How many of the encoder's blocks can be fine-tuned."""
        return finetunable_blocks(self.tower, len(self.data.manifest), user_cache())

    @cached_property
    def encoded(self) -> EncodedFolder:
        """The data set with features, split into train, val and test; images that are not in the cache are encoded."""
        data, depth = self.data, self.room.depth
        images = data.manifest["image"].tolist()
        features, bad = encode_shared(user_cache(), self.tower, data.root, images, data.digests, block_inputs=depth)
        if bad:
            listed = ", ".join(f"{each.image} ({each.reason})" for each in bad[:3]) + ", ..." * (len(bad) > 3)
            self.say(f"images that cannot be used are left out ({len(bad):,}): {listed}")
        inputs = Data(data.manifest, data.labels, features, self.encoder, str(self.device), skip_frozen_blocks=True)
        return EncodedFolder(inputs, features.identity, depth, frozenset(each.row for each in bad))

    def with_readable_images(self) -> FolderRecipes:
        """Encode all images; returns these recipes without unreadable images and without pairs that only they show."""
        if not self.encoded.bad:
            return self
        kept = ~np.isin(np.arange(len(self.data.manifest)), list(self.encoded.bad))
        manifest, digests = self.data.manifest[kept].reset_index(drop=True), list(compress(self.data.digests, kept))
        return replace(self, data=replace(self.data, manifest=manifest, labels=labels_of(manifest), digests=digests))

    @cached_property
    def trials(self) -> Trials:
        """Store of the trained recipes, in a folder named by a digest of labels, features, code and device."""
        kinds = [self._entry(name).kind for name in (NOTHING_TRAINED, TRAINED, RIVAL)]
        is_gpu = self.device.type == "cuda"
        key = {
            "contents": self.data.digests,
            "rows": self.data.manifest[["state", "object", "split"]].to_numpy().tolist(),
            "features": self.encoded.identity,
            "torch": torch.__version__,
            "code": code_hash("train", modules=[method_entry_point(kind).module for kind in kinds]),
            "device": torch.cuda.get_device_name(self.device) if is_gpu else torch.get_num_threads(),
        }
        folder = self.cache / f"recipes-{json_digest(key)[:16]}"
        return Trials(
            folder, self.encoded.data.read, self.device, EvaluationParams(), accuracy=self._accuracy, hooks=self._hooks
        )

    def _hooks(self, trial: Trial) -> TrainingHooks:
        return TrainingHooks(log=open_log(self.log, log_folder(self.log, self.cache.stem, trial.slug, trial.seed)))

    def _accuracy(self, run: Run, val: Examples) -> float | None:
        return answers_with_labels(run.method, val, self.data.labels, run.record.confidence, self.world).accuracy

    def levels(self, began: float) -> Iterator[list[Trial]]:
        """Yield lists of recipes of equal cost: nothing trained, prompts, then blocks as far as the time limit allows.

        Without a text tower, linear heads take the place of prompts.

        began: `time.monotonic()` at which the time for training began.
        """
        yield [Trial("nothing trained", self._spec(NOTHING_TRAINED))]
        trained = "prompts" if self.text_width else "heads"
        frozen = [Trial(f"{trained}, rate {rate:g}", self._spec(TRAINED, rate)) for rate in FROZEN_RATES]
        yield frozen
        beside_blocks = frozen[0]  # with blocks that train, prompts may train fast
        schedule = stored_schedule(self.trials.folder, self.minutes, lambda: self._schedule(beside_blocks, began))
        self.say(f"fine-tuning: {schedule.reason}")
        training = replace(beside_blocks.spec.training, threads=torch.get_num_threads())
        spec = replace(beside_blocks.spec, training=training)
        yield from finetuned_recipes(spec, schedule.depths, schedule.rates, schedule.epochs)

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

    def _schedule(self, beside_blocks: Trial, began: float) -> Schedule:
        splits = self.data.manifest["split"].value_counts()
        counts = ImageCounts(int(splits["train"]), int(splits["val"]), len(self.data.manifest))
        left = 60 * self.minutes - (time.monotonic() - began)
        epoch = self.trials.result(beside_blocks).epoch_seconds
        return choose_depths(self.encoded.block_inputs, self._block_cost, counts, left, epoch)

    def _block_cost(self, blocks: int) -> BlockCost:
        cost = block_cost(self.tower, blocks, blocks)
        cached = block_cost(self.tower, blocks, self.encoded.block_inputs)
        return replace(cost, inputs=max(0.0, cached.forward - cost.forward))

    def final_files(self, recipe: Trial) -> RunPaths:
        """Paths of the files of the final training, which repeats `recipe` on all labelled images."""
        return RunPaths(self.trials.files(recipe).root / "all")

    def all_images(self, recipe: Trial) -> RunInputs:
        """The data of the final training, in which every image is a training image."""
        manifest = self.data.manifest.assign(split="train")
        return replace(self.encoded.data, manifest=manifest, labels=labels_of(manifest)).read(recipe.spec.request)


def fit_on_all_images(recipes: FolderRecipes, recipe: Trial) -> Run:
    """Train the final model: repeat the chosen recipe on all labelled images, with the settings that validation chose.

    The run is saved in the folder `all` beside the recipe's; an interrupted training continues from there.
    """
    record, method, _ = recipes.trials.load(recipe)
    files = recipes.final_files(recipe)
    resume = ResumePoint("all images", files.unfinished_training, recipes.trials.files(recipe).root.name)
    inputs = recipes.all_images(recipe)
    run = train_on_all_images(recipe.spec, record, method.chosen_options(), inputs, recipes.device, resume)
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
    minutes: float = MINUTES,
    say: Say = print,
    log: str = "none",
    force: bool = False,
) -> Path:
    """Fit a model to labelled images, as `duplex fit` does, and write it to a folder; return the folder.

    `Recognizer.load` reads the folder. Features are kept in the user's cache, unfinished training in `OUT.cache`.

    source: a folder `state/object/*.jpg`, a table with the columns image, state, object and optionally split, the
        folder of a published benchmark, or `hf-datasets:OWNER/NAME` on the Hugging Face hub.
    out: folder to write.
    images: folder that a table's image paths start from; by default the table's folder.
    encoder: name of the frozen encoder; None: the best that encodes the images in half an hour, or on a GPU the best.
    weights: the encoder's weights, a published tag or a file.
    minutes: time limit of training, after the images are encoded; timed steps decide which training settings are tried.
    say: function that is called with each line of text on the data, the training settings tried, and the result.
    log: log of each recipe's training, with the values of `training.log` in params.yaml: dvclive, tensorboard, wandb,
        mlflow, a plug-in's log or none.
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
    data = read_labelled_folder(place, image_folder, known_pixels=load_pixel_digests(fit_cache_folder(out)))
    refuse_lost_updates(out, data.contents)
    describe(data, say)
    if encoder is None:
        gpu = resolve_device("auto") != "cpu"
        entry, reason = choose_encoder(data.labels, len(data.manifest), gpu=gpu, cores=os.cpu_count() or 1)
    else:
        entry, reason = checked_encoder(encoder, weights, data.labels)
    say(f"encoder: {entry.name} ({reason})")
    if long := long_prompts(entry.name, entry.weights, data.labels):
        raise UsageError(
            f"some pairs ({len(long):,}) have prompts that are too long for {entry.name}; shorten the names of their "
            f"states or objects, such as those of {long[0]!r}"
        )
    with reproducible(), sole_writer(fit_cache_folder(out) / "fit", "fit", "or choose another --out"):
        write_json(fit_cache_folder(out) / SOURCE, [str(place), image_folder and str(image_folder)])
        return _fit(FolderRecipes(data, entry, fit_cache_folder(out), minutes, say, log), out, force)


def fit_cache_folder(out: Path) -> Path:
    """The folder `MODEL.cache` beside the model's folder `out`; it stores what a fit has trained."""
    return out.with_name(f"{out.name}.cache")


def page_file(out: Path) -> Path:
    """Path of the HTML page about the data set, beside the model's folder."""
    return out.with_name(f"{out.name}-page.html")


def _fit(recipes: FolderRecipes, out: Path, force: bool) -> Path:
    say = recipes.say
    save_pixel_digests(recipes.cache, recipes.data.pixels)
    room = recipes.room
    say(f"fine-tuning: up to {room.depth} blocks; {room.reason}" if room.depth else f"no fine-tuning: {room.reason}")
    recipes = recipes.with_readable_images()
    began = time.monotonic()
    rival = _rival(recipes)  # first, so that the time limit includes it
    choice = search_recipes(recipes.levels(began), recipes.trials.result, say)
    say(f"chosen: {choice.recipe.name}")
    recipes.trials.delete_paused()
    measured, answers = _measure(recipes, choice.recipe)
    say(
        f"on {measured['images']:,} test images, which had no part in training: accuracy {measured['accuracy']:.1f} % "
        f"if {100 * measured['new_share']:g} % of images are of new pairs ({measured['accuracy_seen']:.1f} % for pairs "
        f"with training images, {measured['accuracy_unseen']:.1f} % for new pairs), calibration error "
        f"{measured['calibration_error']:.1f} %, AUC {measured['metrics']['closed']['auc']:.1f} (closed world)"
    )
    say(rival)
    say(f"fitting the model to all {len(recipes.data.manifest):,} labelled images")
    run = fit_on_all_images(recipes, choice.recipe)
    with sole_model_writer(out, "then run the same command again"):
        refuse_lost_updates(out, recipes.data.contents)  # an update may have ended during the fit
        _write_model(out, recipes, run, choice, measured, force)
    for other in recipes.cache.glob("recipes-*"):
        if other != recipes.trials.folder and re.fullmatch("recipes-[0-9a-f]+", other.name):  # of other labels
            shutil.rmtree(other, ignore_errors=True)
    data = recipes.data
    examples = recipes.encoded.data.read().examples
    facts = [("encoder", recipes.encoder.name), ("recipe", choice.recipe.name)]
    own = OwnData(out.name, data.labels, data.manifest, data.root, answers, examples, choice.table, facts)
    page = write_page(own, page_file(out))
    say(f"{page} shows where the model is right and wrong, and estimates its accuracy with twice as many images")
    return out


def _measure(recipes: FolderRecipes, recipe: Trial) -> tuple[dict[str, Any], AnsweredImages]:
    # on the test images, which had no part in training or any choice
    record, method, inputs = recipes.trials.load(recipe)
    test = inputs.examples["test"].to(recipes.device)
    inputs = replace(inputs, examples={**inputs.examples, "test": test})
    answers = answers_with_labels(method, test, inputs.labels, record.confidence, recipes.world)
    bias = (record.calibration or {})["closed"].bias
    metrics = {
        world: evaluate_world(method, inputs, EvaluationParams(), world, Calibration(bias)).metrics
        for world in dict.fromkeys(("closed", recipes.world))
    }
    numbers = {
        "images": len(test),
        "accuracy": answers.accuracy,
        "accuracy_seen": answers.seen_accuracy,
        "accuracy_unseen": answers.unseen_accuracy,
        "calibration_error": 100 * answers.reliability.calibration_error,
        "new_share": answers.new_share,
        "metrics": metrics,
    }
    return numbers, answers


def _rival(recipes: FolderRecipes) -> str:
    # a line on how the plain rival does on the same test images
    labels, images = recipes.data.labels, int((recipes.data.manifest["split"] == "train").sum())
    if images * recipes.tower.dim * (len(labels.states) + len(labels.objects)) > LARGEST_RIVAL:
        return "two logistic regressions, for comparison, are left out: these images would take many minutes"
    if not all(known.all() for known in labels.trained_words):
        return "two logistic regressions, for comparison, are left out: some words have no training images"
    trial = Trial("two logistic regressions", recipes._spec(RIVAL))
    recipes.trials.result(trial)  # trains it
    rival, _ = _measure(recipes, trial)
    return (
        f"two logistic regressions, for comparison: accuracy {rival['accuracy']:.1f} % ({rival['accuracy_seen']:.1f} % "
        f"for pairs with training images, {rival['accuracy_unseen']:.1f} % for new pairs), "
        f"AUC {rival['metrics']['closed']['auc']:.1f}"
    )


def _write_model(
    out: Path, recipes: FolderRecipes, run: Run, choice: RecipeChoice, measured: dict[str, Any], force: bool
) -> None:
    trained = TrainedRun(recipes.final_files(choice.recipe).checkpoint, recipes.device)
    data = recipes.data
    counts = count_dataset(data.labels, data.manifest).to_dict()
    fitted = run.method.fitted_statistics()
    images = data.manifest["split"].value_counts()
    record = {  # without dates or durations, so that equal fits have equal files
        "encoder": recipes.encoder.model_dump(exclude_defaults=True),
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

    export(trained, recipes.world, out, facts, add_files, force=force)
