"""The command `duplex fit`: train a model on a folder of labelled images, and write it as a model folder.

    SOURCE -> check, split -> features -> choice of a training recipe by validation -> final fit on all images -> MODEL

Beside MODEL, `MODEL.cache` holds the features, each training recipe tried (a rung) and unfinished training. A killed
fit continues from there and ends in the same bytes; a second fit of the same data trains nothing again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from duplex.artifacts import RunPaths
from duplex.config.code_hash import code_hash
from duplex.config.params import EvaluationParams, load_params, shipped_project
from duplex.data.dataset import labels_of
from duplex.data.stats import statistics
from duplex.encoders import Encoder, load_encoder, resolve_device
from duplex.errors import UsageError
from duplex.evaluation.answered_images import AnsweredImages
from duplex.fitting.content_cache import ContentCache, ContentInputs
from duplex.fitting.encoder_choice import EncoderChoice, choose_encoder, named_encoder
from duplex.fitting.final_fit import fit_all_images
from duplex.fitting.labelled_folder import LabelledFolder, describe, read_labelled_folder
from duplex.labels import World
from duplex.library.climb import (
    Attempt,
    BlockCost,
    Choice,
    Plan,
    Rung,
    Sizes,
    block_cost,
    block_room,
    climb,
    finetuned_rungs,
    load_margins,
    plan,
    report_damage,
    save_margins,
)
from duplex.library.fit import deterministic
from duplex.library.inputs import InputRequest, RunInputs
from duplex.library.prompt_lengths import long_prompts
from duplex.library.run_evaluation import evaluate_world
from duplex.library.run_training import MethodSpec, Run, train_method
from duplex.methods.registry import method_source, parse_options
from duplex.options import TrainingOptions
from duplex.recognition.card import RunFacts
from duplex.recognition.export_folder import export, refuse_other_files
from duplex.recognition.fitted_files import write_fit, write_statistics
from duplex.recognition.listed_answers import listed_answers
from duplex.recognition.sources import TENSORS
from duplex.recognition.trained import TrainedRun
from duplex.report.own_page import OwnData, write_page
from duplex.system.files import refuse_unwritable, with_own_name, write_text
from duplex.system.lock import sole_writer
from duplex.training.calibration import Calibration
from duplex.training.checkpoint import load_checkpoint, read_checkpoint, read_known_images
from duplex.training.loop import ResumePoint
from duplex.training.scoring import validation_margins

NOTHING_TRAINED, PROMPTS = "closed_form", "dual"  # methods of the package's params.yaml
WITHOUT_TEXT = {"inference": ["gaussian_factors", "gaussian"], "interactions": 0.0}  # of encoders without a text tower
PROMPT_RATES = (1e-3, 1e-4)  # learning rates of prompts
PROMPT_EPOCHS = 8  # along half a cosine
BATCH = 64
TRAINING_CODE = "duplex.library.run_training"  # module whose code, with all that it imports, decides a rung's result
WIDE_TEXT = 512  # width of a text tower from which on several threads train its prompts faster than one
MINUTES = 10.0
LARGEST_OPEN = 1 << 15  # pairs of states and objects up to which all of them are candidates
SEED = 0
Say = Callable[[str], None]


def fit_folder(
    source: Path,
    out: Path,
    *,
    images: Path | None = None,
    encoder: str | None = None,
    weights: str | None = None,
    minutes: float = MINUTES,
    say: Say = print,
) -> Path:
    """Fit a model to labelled images and write it to the folder `out`, as `duplex export` does.

    source: a folder `state/object/*.jpg`, a table with the columns image, state, object and optionally split, or a
        benchmark's folder.
    images: folder that a table's image paths start from; by default the table's own.
    encoder: name of the frozen encoder; None: see `choose_encoder`.
    weights: the encoder's weights, a published tag or a file.
    minutes: time limit of training, after the images are encoded; timed steps decide which training recipes are tried.
    say: function that receives lines about the progress.
    """
    if not minutes > 0:
        raise UsageError(f"minutes is {minutes:g}; expected more than 0")
    out = with_own_name(out)
    refuse_other_files(out)
    refuse_unwritable(page_file(out))
    data = read_labelled_folder(source, images)
    describe(data, say)
    if encoder is None:
        gpu = resolve_device("auto") != "cpu"
        choice = choose_encoder(data.labels, len(data.manifest), gpu=gpu, cores=os.cpu_count() or 1)
    else:
        choice = named_encoder(encoder, weights, data.labels)
    say(f"encoder: {choice.entry.name} ({choice.reason})")
    if long := long_prompts(choice.entry.name, choice.entry.weights, data.labels):
        raise UsageError(
            f"{len(long):,} pairs have a longer prompt than {choice.entry.name} reads, the first {long[0]!r}; shorten "
            "the names of their states or objects"
        )
    with deterministic(), sole_writer(cache_folder(out) / "fit", "fit", "or give this one another --out"):
        return FolderFit(data, choice, out, minutes, say).run()


def cache_folder(out: Path) -> Path:
    """Return the folder beside a model's folder that holds cached features and the training recipes tried."""
    return out.with_name(f"{out.name}.cache")


def page_file(out: Path) -> Path:
    """Return the path of the HTML page about the data set, beside the model's folder."""
    return out.with_name(f"{out.name}-page.html")


@dataclass(frozen=True)
class FolderFit:
    """Execution of `duplex fit`: chooses how to train by validation, trains on all images, writes the model folder."""

    data: LabelledFolder
    choice: EncoderChoice
    out: Path
    minutes: float
    say: Say

    def run(self) -> Path:
        """Choose a training recipe by validation, fit it to all images, write the model folder and return it."""
        self.inputs  # noqa: B018 encodes what is missing, before the time for training begins
        began = time.monotonic()
        choice = climb(self.levels(began), self.attempt, self.say)
        self.say(f"chosen: {choice.rung.name}")
        measured, answers = self.measured(choice.rung)
        self.say(_summary(measured))
        self.say(f"fitting all {len(self.data.manifest):,} labelled images")
        self.write(self.final_run(choice.rung), choice, measured)
        for other in self.cache.glob("rungs-*"):
            if other != self.work:  # of other labels
                shutil.rmtree(other, ignore_errors=True)
        self.say(
            f"{self.write_page(choice, answers)} shows where the model is right and wrong, "
            "and which further images would help"
        )
        return self.out

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
        """Width of the encoder's text tower; 0 if it has none."""
        entry = self.choice.entry
        text = load_encoder(entry.name, entry.weights, towers="text", device=str(self.device)).text
        return 0 if text is None else int(text.embedding([text.start]).shape[1])

    @property
    def cache(self) -> Path:
        return cache_folder(self.out)

    @property
    def world(self) -> World:
        """The world of the model: open (all pairs) with up to 32,768 pairs of states and objects, closed with more."""
        return "open" if self.data.labels.size <= LARGEST_OPEN else "closed"

    @cached_property
    def inputs(self) -> ContentInputs:
        """The data set with its split, and the features of its images; encodes what is not in the cache."""
        data, entry = self.data, self.choice.entry
        room = block_room(self.tower, len(data.manifest), self.cache)
        self.say(
            f"fine-tuning: up to {room.depth} blocks; {room.reason}" if room.depth else f"no fine-tuning: {room.reason}"
        )
        cache = ContentCache(self.cache, entry, self.tower, room.depth)
        features = cache.fill(data.root, dict(zip(data.digests, data.manifest["image"], strict=True)))
        rows = features.at(data.digests)
        bad = data.manifest["image"][features.stored.bad[rows]].tolist()
        if bad:
            self.say(f"{len(bad):,} images cannot be read and are left out: {', '.join(bad[:3])}")
        return ContentInputs(data.manifest, data.labels, rows, features, entry, str(self.device))

    @cached_property
    def work(self) -> Path:
        """The folder of the training recipes tried, named by a digest of labels, split, features and code."""
        key = {
            "contents": self.data.digests,
            "rows": self.data.manifest[["state", "object", "split"]].to_numpy().tolist(),
            "features": self.inputs.features.stored.identity,
            "torch": torch.__version__,
            "code": [code_hash(TRAINING_CODE, method_source(name).module) for name in self._kinds()],
            "device": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else torch.get_num_threads(),
        }
        return self.cache / f"rungs-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}"

    # -- rungs ----------------------------------------------------------------------------------------------------

    def levels(self, began: float) -> Iterator[list[Rung]]:
        """Yield lists of training recipes of equal cost: nothing trained, prompts, fine-tuned blocks as time allows.

        began: `time.monotonic()` at which the time for training began.
        """
        yield [Rung("nothing trained", self._spec(NOTHING_TRAINED))]
        if not self.text_width:
            self.say("the encoder has no text tower, so neither prompts nor blocks are trained")
            return
        prompts = [Rung(f"prompts, rate {rate:g}", self._spec(PROMPTS, rate)) for rate in PROMPT_RATES]
        yield prompts
        beside_blocks = prompts[0]  # with blocks that train, prompts may train fast
        planned = self.plan(beside_blocks, began)
        self.say(f"fine-tuning: {planned.reason}")
        training = replace(beside_blocks.spec.training, threads=torch.get_num_threads())
        yield from finetuned_rungs(replace(beside_blocks.spec, training=training), planned.depths, planned.rates)

    def _kinds(self) -> list[str]:
        """Return the kinds of the methods that the training recipes use."""
        methods = load_params(shipped_project() / "params.yaml").methods
        return [methods[name].kind for name in (NOTHING_TRAINED, PROMPTS)]

    def _spec(self, name: str, rate: float = PROMPT_RATES[0]) -> MethodSpec:
        entry = load_params(shipped_project() / "params.yaml").methods[name]
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

    def attempt(self, rung: Rung) -> Attempt:
        """Train and validate a rung, or read the result if the rung was tried before."""
        files = self.files(rung)
        result, margins = files.root / "attempt.json", files.root / "margins.npz"
        if not result.is_file():
            self._train(rung, files, result, margins)
        with report_damage(files.root):
            return Attempt(rung.name, load_margins(margins), **json.loads(result.read_text(encoding="utf-8")))

    def files(self, rung: Rung) -> RunPaths:
        """Return the paths of a rung's files."""
        spec = rung.spec
        tuned = None if spec.finetune is None else spec.finetune.to_dict()
        key = [spec.kind, spec.options.to_dict(), spec.training.to_dict(), tuned]
        return RunPaths(self.work / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12])

    def _train(self, rung: Rung, files: RunPaths, result: Path, margins: Path) -> None:
        start = time.monotonic()
        inputs = self.inputs.read(rung.spec.request)
        resume = ResumePoint(rung.name, files.unfinished_training, files.root.name)
        run = train_method(rung.spec, inputs, SEED, self.device, EvaluationParams(), resume)
        val = inputs.examples["val"].to(self.device)
        answers = listed_answers(run.method, val, inputs.labels, run.record.confidence, self.world)
        run.save(files.root)
        save_margins(margins, validation_margins(run.method, val, inputs.labels))
        record = {
            "epoch": run.record.epoch,
            "accuracy": answers.accuracy,
            "seconds": time.monotonic() - start,
            "seconds_per_epoch": run.result.timing["seconds_per_epoch"],
        }
        write_text(result, json.dumps(record) + "\n")
        files.unfinished_training.unlink(missing_ok=True)

    def plan(self, prompts: Rung, began: float) -> Plan:
        """Return the plan of fine-tuned rungs that fit into the time; made once per time limit from timed steps.

        prompts: the rung without fine-tuned blocks, whose epochs are timed.
        began: `time.monotonic()` at which the time for training began.
        """
        place = self.work / f"plan-{self.minutes:g}.json"
        if not place.is_file():
            counts = self.data.manifest["split"].value_counts()
            sizes = Sizes(int(counts["train"]), int(counts["val"]), len(self.data.manifest))
            left = 60 * self.minutes - (time.monotonic() - began)
            epoch = self.attempt(prompts).seconds_per_epoch
            depth = self.inputs.block_inputs
            made = plan(depth, self._block_cost, sizes, left, epoch)
            write_text(place, json.dumps(made.to_dict()) + "\n")
        with report_damage(self.work):
            return Plan.from_dict(json.loads(place.read_text(encoding="utf-8")))

    def _block_cost(self, blocks: int) -> BlockCost:
        """Return the seconds per image of the last `blocks` blocks, and of computing their inputs from cached ones."""
        cost, cached = (block_cost(self.tower, blocks, of) for of in (blocks, self.inputs.block_inputs))
        return replace(cost, inputs=max(0.0, cached.forward - cost.forward))

    # -- the chosen rung ------------------------------------------------------------------------------------------

    def measured(self, rung: Rung) -> tuple[dict[str, Any], AnsweredImages]:
        """Return metrics and answers on the test images, of a rung trained on the training split; test images had no
        part in any choice."""
        files, inputs = self.files(rung), self.inputs.read(rung.spec.request)
        with report_damage(files.root):
            record = read_checkpoint(files.checkpoint).record
            method = load_checkpoint(files.checkpoint, inputs.task(), inputs.encoder).to(self.device)
        test = inputs.examples["test"].to(self.device)
        inputs = replace(inputs, examples={**inputs.examples, "test": test})
        answers = listed_answers(method, test, inputs.labels, record.confidence, self.world)
        bias = (record.calibration or {})["closed"].bias
        metrics = {
            world: evaluate_world(method, inputs, EvaluationParams(), world, Calibration(bias)).metrics
            for world in dict.fromkeys(("closed", self.world))
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

    def final_run(self, rung: Rung) -> Run:
        """Train the recipe of a rung on all labelled images; return the run."""
        files = self.files(rung)
        final = RunPaths(files.root / "all")
        inputs = self.inputs.read(rung.spec.request)
        with report_damage(files.root):
            header = read_checkpoint(files.checkpoint)
            method = load_checkpoint(header, inputs.task(), inputs.encoder)
        record = replace(header.record, known_images=read_known_images(header, self.device))
        resume = ResumePoint("all images", final.unfinished_training, files.root.name)
        run = fit_all_images(rung.spec, record, method.tuned_options(), self.all_images(rung), self.device, resume)
        run.save(final.root)
        return run

    def all_images(self, rung: Rung) -> RunInputs:
        """Return the inputs of a rung with every labelled image as a training image."""
        manifest = self.data.manifest.assign(split="train")
        return self.inputs.with_manifest(manifest, labels_of(manifest)).read(rung.spec.request)

    def write(self, run: Run, choice: Choice, measured: dict[str, Any]) -> None:
        """Export the final run to the model folder, with the record of the fit and the statistics for updates."""
        final = RunPaths(self.files(choice.rung).root / "all")
        trained = TrainedRun(final.checkpoint, self.device)
        counts = statistics(self.data.labels, self.data.manifest).to_dict()
        facts = RunFacts(self.out.name, metrics=measured["metrics"], counts=counts, remark=REMARK)
        fitted = run.method.fitted_statistics()

        def add_files(folder: Path) -> None:
            write_fit(folder, self.record(choice, measured))
            if fitted is not None:
                write_statistics(folder, fitted, load_file(folder / TENSORS))

        export(trained, self.world, self.out, facts, add_files)

    def write_page(self, choice: Choice, answers: AnsweredImages) -> Path:
        """Write the HTML page about the data set beside the model folder, and return its path."""
        facts = [("encoder", self.choice.entry.name), ("recipe", choice.rung.name)]
        inputs, page = self.inputs.read(InputRequest()), page_file(self.out)
        data, name = self.data, self.out.name
        own = OwnData(name, data.labels, data.manifest, data.root, answers, inputs.examples, choice.table, facts)
        return write_page(own, page)

    def record(self, choice: Choice, measured: dict[str, Any]) -> dict[str, Any]:
        """Return the content of fit.json, without times, so that equal fits have equal files."""
        counts = self.data.manifest["split"].value_counts()
        return {
            "encoder": self.choice.entry.model_dump(exclude_defaults=True),
            "counts": statistics(self.data.labels, self.data.manifest).to_dict(),
            "images": {split: int(count) for split, count in sorted(counts.items())},
            "rungs": list(choice.table),
            "chosen": choice.rung.name,
            "measured": measured,
            "contents": sorted(self.data.digests),  # which an update does not count twice
        }


REMARK = "The numbers were measured before the model was fitted once more, on all labelled images."


def _summary(measured: dict[str, Any]) -> str:
    """Return the test metrics that `FolderFit.measured` returned as one line of text."""
    share = 100 * measured["new_share"]
    return (
        f"on {measured['images']:,} test images, which had no part in training: accuracy {measured['accuracy']:.1f} % "
        f"({measured['accuracy_seen']:.1f} % of pairs with training images, {measured['accuracy_unseen']:.1f} % of new "
        f"pairs, {share:g} % new expected), calibration error {measured['calibration_error']:.1f} %, "
        f"AUC {measured['metrics']['closed']['auc']:.1f}"
    )
