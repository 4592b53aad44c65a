"""The page of one data set: a model's answers, and what more labelled images would bring.

`duplex fit` and `duplex report --dataset` write it. To estimate what more images would bring, a closed-form classifier
on the frozen features is trained on random parts of each pair's training images; its test accuracy by number of images
is extrapolated to twice as many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from duplex.data.images import uncropped_path
from duplex.data.tables import complete_rows
from duplex.evaluation.accumulate import Floats
from duplex.evaluation.probabilities import NEW_SHARE, AnsweredImages, fit_probabilities, image_weights
from duplex.features.tokens import Examples
from duplex.labels import SPLITS, Ints, LabelSpace
from duplex.methods.gaussian import ClassStatistics, ClosedForm
from duplex.methods.layers import unit
from duplex.report.answers import accuracy_parts, answers_of, confusion_parts, probability_part, wrong_answers_part
from duplex.report.blocks import Chart, Figure, Mark, Note, Report, ReportPart, ReportSection, Series, draw, render_page
from duplex.report.images import thumbnails_under
from duplex.report.tables import recipe_table
from duplex.system.files import write_text

SHARES = (0.25, 0.5, 1.0)  # of the training images
DRAWS = 5  # of each share below 1
BLOCK_SCORES = 1 << 22  # scores in memory at once, and scores from which temperature and prior are fitted


@dataclass(frozen=True)
class SampleSizeCurve:
    """Test accuracy by number of training images, the power law of its error, and accuracy for twice as many."""

    accuracies: Mapping[int, Sequence[float]]  # number of training images -> accuracy in percent of each random draw
    slope: float  # exponent beta of the power law
    doubled: float  # accuracy in percent expected of twice as many images: an extrapolation

    @classmethod
    def of(cls, examples: Mapping[str, Examples], labels: LabelSpace) -> SampleSizeCurve | None:
        """Measure accuracy with a quarter, half and all training images; None if two of these numbers are equal."""
        train = examples["train"].compositions.numpy()
        known = np.flatnonzero(train >= 0)  # rows with both labels
        target = examples["test"].compositions.numpy()
        weights = image_weights(labels.is_seen(target), NEW_SHARE)  # images of unseen pairs together count `NEW_SHARE`
        accuracies = {}
        for share in SHARES:
            draws = [known[draw_share(train[known], share, seed)] for seed in range(DRAWS if share < 1 else 1)]
            right = [closed_form_answers(examples, labels, rows) == target for rows in draws]
            accuracies[len(draws[0])] = [100 * float(weights @ each) for each in right]
        if len(accuracies) < len(SHARES):
            return None
        means = [fmean(each) for each in accuracies.values()]
        return cls(accuracies, *extrapolate(list(accuracies), means, len(examples["test"])))


def draw_share(compositions: Ints, share: float, seed: int) -> Ints:
    """Draw a random share of each pair's images, at least one per pair; returns indices in ascending order."""
    generator = np.random.default_rng(seed)
    rows = []
    for pair in np.unique(compositions):
        members = np.flatnonzero(compositions == pair)
        rows.append(generator.permutation(members)[: max(1, int(share * len(members) + 0.5))])
    return np.sort(np.concatenate(rows))


def extrapolate(images: list[int], accuracies: list[float], measured: int) -> tuple[float, float]:
    """Fit a power law to error by number of images; returns its slope beta, and the accuracy for twice as many.

        log e(n) = alpha + beta log n,    e = 100 - accuracy, fitted by least squares

    measured: number of test images; an error below half a test image counts as half an image.
    """
    error = np.maximum(100 - np.array(accuracies), 50 / measured)
    beta, alpha = np.polyfit(np.log(images), np.log(error), 1)
    return float(beta), 100 - float(min(100.0, np.exp(alpha + beta * np.log(2 * images[-1]))))


def closed_form_answers(examples: Mapping[str, Examples], labels: LabelSpace, rows: Ints) -> Ints:
    """Answers for test images by a closed form, fitted to training images `rows`, calibrated on validation images."""
    train, val = examples["train"], examples["val"]
    chosen = torch.from_numpy(rows)
    shape = len(labels.states), len(labels.objects)
    statistics = ClassStatistics.of(unit(train.cls[chosen]), train.compositions[chosen], *shape)
    candidates = labels.candidates("closed", "train")
    seen = labels.is_seen(candidates)
    scorer = ClosedForm.fit(statistics).to(torch.float32).scorer(torch.from_numpy(candidates))

    def log_p(cls: Tensor) -> Tensor:
        return scorer(unit(cls).float()).log_softmax(1)

    step = max(1, BLOCK_SCORES // len(candidates))
    judged = torch.from_numpy(np.linspace(0, len(val) - 1, min(len(val), step)).astype(int))
    label = np.searchsorted(candidates, val.compositions[judged].numpy())
    confidence = fit_probabilities(log_p(val.cls[judged]).double(), label, seen)
    prior: Floats = confidence.log_prior(seen, np.ones_like(seen))
    shift = torch.from_numpy(prior * confidence.temperature).float()  # the argmax of log p / T + prior
    best = [(log_p(part) + shift).argmax(1).numpy() for part in examples["test"].cls.split(step)]
    return np.asarray(candidates[np.concatenate(best)])


@dataclass(frozen=True)
class OwnData:
    """What the page about one data set shows: its images and labels, and a model's answers for the test images."""

    name: str
    labels: LabelSpace
    manifest: pd.DataFrame  # image, state, object, split
    root: Path  # folder of the images
    answered: AnsweredImages  # test images
    examples: Mapping[str, Examples]  # split -> frozen features, on the CPU
    recipes: Sequence[Mapping[str, Any]] = ()  # compared recipes, from `RecipeChoice.table`
    facts: Sequence[tuple[str, str]] = ()  # further lines of the page's head, such as the encoder

    @property
    def readable(self) -> pd.DataFrame:
        """The manifest without the unreadable images."""
        return self.manifest.iloc[np.sort(np.concatenate([self.examples[split].rows for split in SPLITS]))]


def write_page(data: OwnData, path: Path) -> Path:
    write_text(path, render_page(own_report(data)))
    return path


def own_report(data: OwnData) -> Report:
    labels = data.labels
    answered = data.answered
    present = any((data.root / uncropped_path(image)).is_file() for image in data.manifest["image"])
    thumbnails = thumbnails_under(data.root) if present else None
    answers = answers_of(answered, data.manifest)
    train = complete_rows(data.readable[data.readable["split"] == "train"])
    training = pd.Series(labels.names(labels.index(train["state"].tolist(), train["object"].tolist())), train["image"])
    curve = SampleSizeCurve.of(data.examples, labels)
    sections: list[tuple[str, str, Sequence[ReportPart | None]]] = [
        ("accuracy", "Accuracy", accuracy_parts(answered, answers, training)),
        ("confusions", "Confusions", confusion_parts(answered, answers, training, thumbnails)),
        ("probabilities", "Probabilities", [probability_part(answered)]),
        ("more-images", "More images", [None if curve is None else curve_part(curve)]),
        ("wrong", "Wrong answers", [wrong_answers_part(answers, thumbnails)]),
    ]
    if data.recipes:
        table = recipe_table("Recipes compared on validation images", data.recipes, "recipe")
        sections.append(("recipes", "Training", [ReportPart("Recipes", [table])]))
    filled = [(ident, title, [part for part in parts if part is not None]) for ident, title, parts in sections]
    lead = "Recognition of states and objects on this data set alone, measured on test images that chose nothing."
    return Report(data.name, lead, [ReportSection(*each) for each in filled if each[2]], _facts(data))


def _facts(data: OwnData) -> list[tuple[str, str]]:
    counts = data.readable["split"].value_counts()
    pairs = len(complete_rows(data.readable)[["state", "object"]].drop_duplicates())
    facts = [
        ("images", f"{len(data.readable):,}"),
        ("train / val / test", " / ".join(f"{int(counts.get(split, 0)):,}" for split in SPLITS)),
        ("states", f"{len(data.labels.states):,}"),
        ("objects", f"{len(data.labels.objects):,}"),
        ("labelled pairs", f"{pairs:,}"),
        (f"accuracy, {100 * data.answered.new_share:g} % unseen", f"{data.answered.accuracy:.1f} %"),
    ]
    return [*facts, *data.facts]


def curve_part(curve: SampleSizeCurve) -> ReportPart:
    images, drawn = list(curve.accuracies), curve.accuracies.values()
    means = [fmean(each) for each in drawn]
    low = [min(each) for each in drawn]
    high = [max(each) for each in drawn]
    marks = [Mark(n, mean, f"{n:,} training images: {mean:.1f} %") for n, mean in zip(images, means, strict=True)]
    measured = Series("measured", images, means, low, high, marks, 0)
    twice = 2 * images[-1]
    ahead = Mark(twice, curve.doubled, f"{twice:,} training images: {curve.doubled:.1f} %, extrapolated")
    guess = Series("extrapolated", [images[-1], twice], [means[-1], curve.doubled], marks=[ahead], tone=1)
    alt = f"accuracy by number of training images, from {means[0]:.1f} % with {images[0]} to {means[-1]:.1f} %"
    drawing = draw(Chart(alt, "training images", "accuracy, %", [measured, guess], from_zero=False))
    caption = (
        f"Closed form on the frozen features, on test images; means of {DRAWS} random draws of a quarter and of half "
        "of the training images of every pair, the band from the lowest to the highest draw. It has "
        "no text and nothing trained, so its accuracy differs from the model's; the shape is what counts."
    )
    slope = f"{curve.slope:.2f}".replace("-", "−")
    doubled = (
        f"Twice as many images per pair would give {curve.doubled:.1f} % instead of {means[-1]:.1f} %. This is an "
        f"extrapolation, by the line log error = α + β log images with β = {slope}, and no measurement."
    )
    return ReportPart("More images of the same pairs", [Figure("learning-curve", drawing, caption), Note(doubled)])
