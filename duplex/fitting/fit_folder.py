"""The command `duplex fit`: train a model on a folder of labelled images, and write it as a model folder.

    SOURCE -> check, split -> features -> choice of training settings by validation -> final fit on all images -> MODEL

Beside MODEL, `MODEL.cache` holds the features, each training recipe tried and unfinished training. A killed
fit continues from there and ends in the same bytes; a second fit of the same data trains nothing again.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from duplex.config.params import EvaluationParams
from duplex.data.stats import count_dataset
from duplex.encoders import resolve_device
from duplex.errors import UsageError
from duplex.evaluation.answered_images import AnsweredImages
from duplex.fitting.encoder_choice import choose_encoder, named_encoder
from duplex.fitting.final_fit import fit_chosen
from duplex.fitting.folder_recipes import FolderRecipes, Say
from duplex.fitting.labelled_folder import describe, load_pixel_digests, read_labelled_folder, save_pixel_digests
from duplex.library.fit import deterministic
from duplex.library.inputs import InputRequest
from duplex.library.prompt_lengths import long_prompts
from duplex.library.recipe_search import Recipe, RecipeChoice, search_recipes
from duplex.library.run_evaluation import evaluate_world
from duplex.library.run_training import Run
from duplex.recognition.card import RunFacts
from duplex.recognition.export_folder import export, refuse_existing_model
from duplex.recognition.fitted_files import refuse_lost_updates, sole_model_writer, write_fit, write_statistics
from duplex.recognition.listed_answers import listed_answers
from duplex.recognition.sources import TENSORS
from duplex.recognition.trained import TrainedRun
from duplex.report.own_page import OwnData, write_page
from duplex.system.files import refuse_existing, sole_writer, with_own_name
from duplex.training.calibration import Calibration

MINUTES = 30.0
REMARK = "The numbers were measured before the model was fitted once more, on all labelled images."


def fit_folder(
    source: Path,
    out: Path,
    *,
    images: Path | None = None,
    encoder: str | None = None,
    weights: str | None = None,
    minutes: float = MINUTES,
    say: Say = print,
    force: bool = False,
) -> Path:
    """Fit a model to labelled images and write it to the folder `out`, as `duplex export` does.

    source: a folder `state/object/*.jpg`, a table with the columns image, state, object and optionally split, or the
        folder of a published benchmark.
    images: folder that a table's image paths start from; by default the table's folder.
    encoder: name of the frozen encoder; None: see `choose_encoder`.
    weights: the encoder's weights, a published tag or a file.
    minutes: time limit of training, after the images are encoded; timed steps decide which training settings are tried.
    say: function that receives lines of text about the progress.
    force: replace a model at `out` and its page, unless it was updated with further images.
    """
    if not minutes > 0:
        raise UsageError(f"minutes is {minutes:g}; expected more than 0")
    if weights is not None and encoder is None:
        raise UsageError(f"--weights is {weights!r} without --encoder; name the encoder, or leave --weights out")
    out = with_own_name(out)
    refuse_existing_model(out, force=force)
    refuse_existing(page_file(out), force=force)
    data = read_labelled_folder(source, images, known_pixels=load_pixel_digests(cache_folder(out)))
    refuse_lost_updates(out, data.contents)
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
        return _fit(FolderRecipes(data, choice, cache_folder(out), minutes, say), out, force)


def cache_folder(out: Path) -> Path:
    """Return `MODEL.cache`, the folder beside a model's folder for cached features and unfinished training."""
    return out.with_name(f"{out.name}.cache")


def page_file(out: Path) -> Path:
    """Return the path of the HTML page about the data set, beside the model's folder."""
    return out.with_name(f"{out.name}-page.html")


def _fit(recipes: FolderRecipes, out: Path, force: bool) -> Path:
    """Choose a training recipe by validation, fit it to all images, write the model folder `out` and return its path.

    A recipe says what is trained: nothing, prompts, or prompts and blocks of the image tower.
    """
    say = recipes.say
    save_pixel_digests(recipes.cache, recipes.data.pixels)
    recipes.inputs  # noqa: B018 encodes what is missing, before the time for training begins
    choice = search_recipes(recipes.levels(time.monotonic()), recipes.runs.result, say)
    say(f"chosen: {choice.recipe.name}")
    measured, answers = _measure(recipes, choice.recipe)
    say(_summary(measured))
    say(f"fitting all {len(recipes.readable.manifest):,} labelled images")
    run = fit_chosen(recipes, choice.recipe)
    with sole_model_writer(out, "then run the same command again"):
        refuse_lost_updates(out, recipes.data.contents)  # an update may have ended during the fit
        _write_model(out, recipes, run, choice, measured, force)
    for other in recipes.cache.glob("recipes-*"):
        if other != recipes.runs.folder and re.fullmatch("recipes-[0-9a-f]+", other.name):  # of other labels
            shutil.rmtree(other, ignore_errors=True)
    page = _write_page(out, recipes, choice, answers)
    say(f"{page} shows where the model is right and wrong, and which further images would help")
    return out


def _measure(recipes: FolderRecipes, recipe: Recipe) -> tuple[dict[str, Any], AnsweredImages]:
    """Return metrics and answers on the test images, with the training settings that validation chose.

    The measured run was trained on the training split alone; test images had no part in any choice.
    """
    record, method, inputs = recipes.runs.load(recipe)
    test = inputs.examples["test"].to(recipes.device)
    inputs = replace(inputs, examples={**inputs.examples, "test": test})
    answers = listed_answers(method, test, inputs.labels, record.confidence, recipes.world)
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


def _summary(measured: dict[str, Any]) -> str:
    """Return test metrics as one line of text: accuracy, calibration error and AUC."""
    share = 100 * measured["new_share"]
    return (
        f"on {measured['images']:,} test images, which had no part in training: accuracy {measured['accuracy']:.1f} % "
        f"if {share:g} % of images are of new pairs ({measured['accuracy_seen']:.1f} % for pairs with training images, "
        f"{measured['accuracy_unseen']:.1f} % for new pairs), calibration error "
        f"{measured['calibration_error']:.1f} %, AUC {measured['metrics']['closed']['auc']:.1f} (closed world)"
    )


def _write_model(
    out: Path, recipes: FolderRecipes, run: Run, choice: RecipeChoice, measured: dict[str, Any], force: bool
) -> None:
    """Export the trained model to the folder `out`, with the files that `duplex update` reads to add images.

    These are fit.json, on the training settings tried and the test metrics, and statistics of the features.
    """
    trained = TrainedRun(recipes.final_files(choice.recipe).checkpoint, recipes.device)
    counts = count_dataset(recipes.readable.labels, recipes.readable.manifest).to_dict()
    facts = RunFacts(out.name, metrics=measured["metrics"], counts=counts, remark=REMARK)
    fitted = run.method.fitted_statistics()

    def add_files(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        write_fit(folder, _fit_record(recipes, choice, measured, counts), tensors)
        if fitted is not None:
            write_statistics(folder, fitted, tensors)

    export(trained, recipes.world, out, facts, add_files, force=force)


def _fit_record(
    recipes: FolderRecipes, choice: RecipeChoice, measured: dict[str, Any], counts: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of fit.json: encoder, image and label counts, settings tried, test metrics, image digests.

    It has no dates or durations, so that equal fits have equal files.
    """
    images = recipes.readable.manifest["split"].value_counts()
    return {
        "encoder": recipes.choice.entry.model_dump(exclude_defaults=True),
        "counts": counts,
        "images": {split: int(count) for split, count in sorted(images.items())},
        "recipes": list(choice.table),
        "chosen": choice.recipe.name,
        "measured": measured,
        "contents": recipes.readable.contents,  # which an update does not count twice
    }


def _write_page(out: Path, recipes: FolderRecipes, choice: RecipeChoice, answers: AnsweredImages) -> Path:
    """Write the HTML page about the data set beside the model folder `out`, and return its path."""
    data, examples = recipes.data, recipes.inputs.read(InputRequest()).examples
    facts = [("encoder", recipes.choice.entry.name), ("recipe", choice.recipe.name)]
    own = OwnData(out.name, data.labels, data.manifest, data.root, answers, examples, choice.table, facts)
    return write_page(own, page_file(out))
