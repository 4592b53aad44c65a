"""The command `duplex fit` and `duplex.fit_folder`: from labelled images to a model folder.

    SOURCE -> check, split -> features -> choice of a recipe -> final fit on all images -> MODEL

`MODEL.cache` holds each recipe tried and unfinished training. A killed fit resumes from there and
writes the same bytes; a second fit of the same data retrains nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duplex.config.params import EncoderParams, EvaluationParams
from duplex.data.download import local_source
from duplex.data.tables import count_dataset, labels_of
from duplex.encoders.base import (
    PACKAGED,
    RESIZES,
    encoder_identity,
    is_random,
    joined_name,
    resolve_device,
    split_name,
    split_weights,
    unknown_words,
)
from duplex.errors import DuplexError, UsageError, require
from duplex.evaluation.answered import GroupAnswers
from duplex.features.shared import user_cache
from duplex.labels import LabelSpace
from duplex.methods.base import Method
from duplex.methods.gaussian import HasStatistics
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
from duplex.recognition.folder_fit import FolderFit, Say, search_encoders
from duplex.recognition.labelled_folder import (
    describe,
    load_pixel_digests,
    read_labelled_folder,
    save_pixel_digests,
)
from duplex.recognition.offers import choose_encoder, other_offers, prompt_words
from duplex.recognition.resize_choice import choose_resize
from duplex.recognition.trained import TrainedRun
from duplex.recognition.worlds import evaluate_world
from duplex.report.own import OwnData, write_page
from duplex.system.files import expanded_path, named_path, refuse_existing, sole_writer, write_json
from duplex.system.threads import cpu_cores
from duplex.training.checkpoint import TrainingRecord
from duplex.training.inputs import RunInputs, long_prompts
from duplex.training.loop import ResumePoint
from duplex.training.recipes import RecipeChoice
from duplex.training.run import TrainedMethod, reproducible, train_on_all_images
from duplex.training.scoring import Calibration, answer_groups, fit_new_share
from duplex.training.trials import Trial


def checked_encoders(names: Sequence[str], weights: str | None, labels: LabelSpace) -> list[EncoderParams]:
    """Settings of the encoders `names`, each perhaps with its weights, as in `NAME @ WEIGHTS`."""
    listed = []
    for name in names:
        listed += [split_weights(part) for part in split_name(name)]
    if weights is not None and len(listed) > 1:
        raise UsageError(
            f"--weights {weights!r} could belong to any of {len(listed)} encoders; leave it out and give each its own, "
            "as in --encoder 'NAME @ WEIGHTS'"
        )
    if repeated := [name for place, (name, _) in enumerate(listed) if name in dict(listed[:place])]:
        raise UsageError(f"--encoder {repeated[0]!r} is given twice; leave one out")
    return [checked_encoder(name, own or weights, labels)[0] for name, own in listed]


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


SOURCE = "source.json"  # in MODEL.cache: where the labelled images are


def load_recipe(fit: FolderFit, recipe: Trial) -> tuple[TrainingRecord, Method[Any], RunInputs]:
    """Load a trained recipe, whose record has what an estimate of the share of new pairs needs."""
    record, method, inputs = fit.trials.load(recipe)
    val = inputs.examples["val"].to(fit.device)
    confidence = fit_new_share(method, val, inputs.labels, record.confidence, fit.world)
    return replace(record, confidence=confidence), method, inputs


def fit_on_all_images(fit: FolderFit, choice: RecipeChoice) -> TrainedMethod:
    """Train the chosen recipe on all labelled images, or continue an interrupted training."""
    recipe = choice.recipe
    record, method, _ = load_recipe(fit, recipe)
    files = fit.final_files(recipe)
    key = fit.trials.files(recipe).root.name
    resume = ResumePoint("all images", files.unfinished_training, key, fit.final_seconds(choice), fit.clock)
    manifest = fit.data.manifest.assign(split="train")
    data = replace(fit.encoded.data, manifest=manifest, labels=labels_of(manifest))
    inputs = data.read(recipe.spec.request)
    options = method.chosen_options()
    run = train_on_all_images(recipe.spec, record, options, inputs, fit.device, resume)
    run.write(files)
    return run


def fit_folder(
    source: str | Path,
    out: str | Path,
    *,
    images: str | Path | None = None,
    encoder: str | Sequence[str] | None = None,
    weights: str | None = None,
    resize: str | None = None,
    minutes: float | None = None,
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
        on a GPU the best. Of several, validation chooses one or all at once; their weights then
        follow their names, as in "timm:resnet18 @ FILE".
    weights: the encoder's weights, a published tag or a file.
    resize: how images become square: "crop", "squash" (distort) or "pad"; None: as the weights' own
        preprocessing or, with one encoder and long images, what validation chooses on a sample.
    minutes: time limit of training, after the images are encoded, which is used to its end; None:
        what is tried depends on images and encoder alone, however long it takes.
    say: function that is called with each line of text on the data, the recipes tried, and the
        result.
    log: log of each recipe's training, with the values of `training.log` in params.yaml: dvclive,
        tensorboard, wandb, mlflow, a plug-in's log or none.
    force: replace a model at `out` and its page, unless it was updated with further images.
    """
    if minutes is not None and not minutes > 0:
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
    parts: list[EncoderParams] = []
    others = None
    if encoder is None:
        machine: Any = {"gpu": resolve_device("auto") != "cpu", "cores": cpu_cores()}
        entry, reason = choose_encoder(data.labels, len(data.manifest), **machine)
        if entry.name != PACKAGED:
            others = other_offers(entry, len(data.manifest), **machine)
    else:
        parts = checked_encoders([encoder] if isinstance(encoder, str) else encoder, weights, data.labels)
        entry = parts[0]
        reason = "named"
    if len(parts) > 1:
        entry = EncoderParams(name=joined_name([(part.name, part.weights) for part in parts]))
    if resize is not None:
        changed = {"resize": require(resize, RESIZES, "resize")}
        entry = entry.model_copy(update=changed)
        parts = [part.model_copy(update=changed) for part in parts]
    say(f"encoder: {entry.name} ({reason})")
    if others is not None:
        say(others)
    _refuse_long_prompts(parts or [entry], data.labels)
    with reproducible(), sole_writer(cache / "fit", "fit", "or choose another --out"):
        write_json(cache / SOURCE, [str(place), image_folder and str(image_folder)])
        if resize is None and len(parts) < 2:  # one setting would be for all encoders
            entry = choose_resize(data, entry, torch.device(resolve_device("auto")), say)
        fit = FolderFit(data, entry, cache, minutes, say, log)
        if len(parts) > 1:
            fit = replace(fit, parts=tuple(replace(fit, encoder=part) for part in parts))
        return _fit(fit, out, force)


def _refuse_long_prompts(entries: Sequence[EncoderParams], labels: LabelSpace) -> None:
    for entry in entries:
        if long := long_prompts(entry.name, entry.weights, labels):
            raise UsageError(
                f"some pairs ({len(long):,}) have prompts that are too long for {entry.name}; shorten the names of "
                f"their states or objects, such as those of {long[0]!r}"
            )


def fit_cache_folder(out: Path) -> Path:
    """The folder `MODEL.cache` beside the model's folder `out`: what a fit has trained."""
    return out.with_name(f"{out.name}.cache")


def page_file(out: Path) -> Path:
    """Path of the HTML page about the data set, beside the model's folder."""
    return out.with_name(f"{out.name}-page.html")


def _fit(fit: FolderFit, out: Path, force: bool) -> Path:
    say = fit.say
    save_pixel_digests(fit.cache, fit.data.pixels)
    say("encoding images that are not in the cache, then timing a step of each training")
    if fit.parts:
        fit = fit.with_readable_images()
        kept = {each.trials.folder for each in (*fit.parts, fit)}
        fit, choice = search_encoders(fit)
    else:
        say(fit.room_line())
        fit = fit.with_readable_images()
        kept = {fit.trials.folder}
        say(fit.outlook())
        choice = fit.search()
    say(f"chosen: {choice.recipe.name}")
    regressions = _measured_rival(fit)
    measured, answers = _measure(fit, choice.recipe)
    measured["regressions"] = regressions
    _say_measured(say, f"on {measured['images']:,} test images, which had no part in training", measured)
    rival = "two logistic regressions, for comparison"
    if regressions is None:
        say(f"{rival}, are left out: {fit.no_regressions}")
    else:
        _say_measured(say, rival, regressions)
    say(f"fitting the model to all {len(fit.data.manifest):,} labelled images")
    run = fit_on_all_images(fit, choice)
    with sole_model_writer(out, "then run the same command again"):
        refuse_lost_updates(out, fit.data.contents)  # an update may have ended during the fit
        _write_model(out, fit, run, choice, measured, force)
    for other in fit.cache.glob("recipes-*"):
        if other not in kept and re.fullmatch("recipes-[0-9a-f]+", other.name):  # of other labels
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
    answers = answer_groups(method, test, inputs.labels, record.confidence, fit.world)
    bias = (record.calibration or {})["closed"].bias
    metrics = {
        world: evaluate_world(method, inputs, EvaluationParams(), world, Calibration(bias)).metrics
        for world in dict.fromkeys(("closed", fit.world))
    }
    numbers = {
        "images": len(test),
        "at_shares": answers.by_share(),
        "calibration_error": round(100 * answers.at(answers.stored).reliability.calibration_error, 6),
        "metrics": metrics,
    }
    return numbers, answers


def _say_measured(say: Say, about: str, measured: Mapping[str, Any]) -> None:
    auc = measured["metrics"]["closed"]["auc"]
    say(f"{about}: AUC {auc:.1f} (closed world), calibration error {measured['calibration_error']:.1f} %")
    say(f"{'right answers, %':<38}known pairs  new pairs")
    wordings = {
        "stored": "few images: {:.0f} % new expected",
        "estimated": "many: {:.0f} ± {:.0f} % new estimated",
        "true": "if told that {:.0f} % are new",
    }
    for name, at in measured["at_shares"].items():
        share = wordings[name].format(100 * at["new_share"], 100 * at.get("error", 0.0))
        say(f"  {share:<36}{at['accuracy_seen']:>11.1f}  {at['accuracy_unseen']:>9.1f}")


def _measured_rival(fit: FolderFit) -> dict[str, Any] | None:
    # the plain rival on the same test images
    if fit.no_regressions is not None:
        return None
    fit.trials.result(fit.space.rival)  # trains it, unless the search did
    return _measure(fit, fit.space.rival)[0]


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
