"""Final training of `duplex fit`: on all labelled images, with the settings, epochs and bias that validation chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from duplex.features.examples import Examples
from duplex.fitting.folder_recipes import FolderRecipes
from duplex.labels import WORLDS
from duplex.library.inputs import RunInputs
from duplex.library.recipe_search import Recipe
from duplex.library.run_training import MethodSpec, Run, initialised_method
from duplex.methods.base import Method
from duplex.methods.registry import method_source
from duplex.system.plugins import provider
from duplex.training.calibration import Calibration
from duplex.training.checkpoint import Record
from duplex.training.known_images import KnownImages
from duplex.training.loop import ResumePoint, TrainingResult, train
from duplex.training.resume import saved_epoch


@dataclass
class LastEpochValidation:
    """Replacement for validation when no image is left for it: every epoch counts as better than the one before.

    auc: validation AUC of an earlier run, to be displayed.
    epoch: number of the last finished epoch.
    """

    auc: float
    epoch: int

    def __call__(self, method: Method[Any]) -> dict[str, float]:
        self.epoch += 1
        return {"auc": self.auc, "epoch": float(self.epoch)}


def fit_chosen(recipes: FolderRecipes, recipe: Recipe) -> Run:
    """Train the final model of `duplex fit` on all labelled images and return it as a run.

    Each training recipe that the search tried was trained on the training split alone and measured on the validation
    split. Here the chosen recipe is trained once more, on the images of all splits together, with what validation
    chose: number of epochs, values of tuned options, bias and thresholds. The run is saved in the folder `all` beside
    the files of that earlier training; an interrupted training continues from there.
    """
    record, method, _ = recipes.runs.load(recipe)
    files = recipes.final_files(recipe)
    resume = ResumePoint("all images", files.unfinished_training, recipes.runs.files(recipe).root.name)
    inputs = recipes.all_images(recipe)
    run = fit_all_images(recipe.spec, record, method.tuned_options(), inputs, recipes.device, resume)
    run.write(files)
    return run


def fit_all_images(
    spec: MethodSpec,
    chosen: Record,
    tuned: Mapping[str, Any],
    inputs: RunInputs,
    device: torch.device,
    resume: ResumePoint,
) -> Run:
    """Train a method on all labelled images, without validation, for the number of epochs that an earlier run chose.

    spec: the method and its options.
    chosen: checkpoint metadata of the earlier run; its number of epochs, bias and thresholds are used.
    tuned: values of options that the earlier run chose on validation images (`Method.tuned_options`).
    inputs: data set with every image in the training split.
    resume: file from which an interrupted training continues.
    """
    options = replace(spec.options, **tuned)
    training = replace(spec.training, epochs=max(1, chosen.epoch), patience=None, warm_up=0)
    method = initialised_method(spec.kind, options, inputs.context(spec.trained_for), inputs, chosen.seed, device)
    images = inputs.examples["train"].to(device)
    if chosen.epoch:
        begun = saved_epoch(resume.path) if resume.path is not None else 0
        result = train(method, images, training, chosen.seed, LastEpochValidation(chosen.val_auc, begun), resume)
    else:  # the untrained method was the best
        result = TrainingResult(0, chosen.val_auc, [], {})
    bias = next(iter((chosen.calibration or {}).values())).bias
    record = replace(
        chosen,
        options=options,
        provider=provider(method_source(spec.kind)),
        labels=inputs.labels,
        encoder=inputs.encoder,
        calibration={world: Calibration(bias) for world in WORLDS},
        known_images=None if chosen.known_images is None else _known_images(images, inputs, chosen.known_images),
    )
    return Run(spec.name, method.eval(), record, training, result)


def _known_images(images: Examples, inputs: RunInputs, chosen: KnownImages) -> KnownImages:
    """Return the final model's detector of images unlike the training images.

    Its pair means and covariance are of all images, its distance threshold is that of `chosen`, the detector of the run
    that validation chose.
    """
    return replace(KnownImages.fit(images, images, inputs.labels), threshold=chosen.threshold)
