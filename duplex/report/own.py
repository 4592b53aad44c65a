"""The page of one data set: a model's answers, and what more labelled images would bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from duplex.data.images import uncropped_path
from duplex.data.tables import complete_rows
from duplex.evaluation.answered import AnsweredImages
from duplex.features.tokens import Examples
from duplex.labels import SPLITS, LabelSpace
from duplex.report.answers import (
    SharedAccuracies,
    accuracy_parts,
    answers_of,
    confusion_parts,
    probability_part,
    wrong_answers_part,
)
from duplex.report.blocks import Chart, Figure, Mark, Note, Report, ReportPart, ReportSection, Series, draw, render_page
from duplex.report.costs import recipe_table
from duplex.report.images import thumbnail_reader
from duplex.system.files import write_text
from duplex.training.more_images import DRAWS, SampleSizeCurve


@dataclass(frozen=True)
class OwnData:
    """What the page about one data set shows."""

    name: str
    labels: LabelSpace
    manifest: pd.DataFrame  # image, state, object, split
    root: Path  # folder of the images
    answered: AnsweredImages  # test images
    examples: Mapping[str, Examples]  # split -> frozen features, on the CPU
    recipes: Sequence[Mapping[str, Any]] = ()  # compared recipes, from `RecipeChoice.table`
    facts: Sequence[tuple[str, str]] = ()  # further lines of the page's head, such as the encoder
    by_share: Mapping[str, SharedAccuracies] = field(default_factory=dict)  # what answered -> `GroupAnswers.by_share`

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
    thumbnails = thumbnail_reader(data.root) if present else None
    answers = answers_of(answered, data.manifest)
    train = complete_rows(data.readable[data.readable["split"] == "train"])
    compositions = labels.index(train["state"].tolist(), train["object"].tolist())
    training = pd.Series(labels.names(compositions), train["image"])
    curve = SampleSizeCurve.of(data.examples, labels, answered.new_share)
    sections: list[tuple[str, str, Sequence[ReportPart | None]]] = [
        ("accuracy", "Accuracy", accuracy_parts(answered, answers, training, data.by_share)),
        ("confusions", "Confusions", confusion_parts(answered, answers, training, thumbnails)),
        ("probabilities", "Probabilities", [probability_part(answered)]),
        ("more-images", "More images", [None if curve is None else curve_part(curve)]),
        ("wrong", "Wrong answers", [wrong_answers_part(answers, thumbnails)]),
    ]
    if data.recipes:
        table = recipe_table("Recipes compared on validation images", data.recipes, "recipe")
        sections.append(("recipes", "Training", [ReportPart("Recipes", [table])]))
    filled = []
    for ident, title, parts in sections:
        shown = [part for part in parts if part is not None]
        if shown:
            filled.append(ReportSection(ident, title, shown))
    lead = "Recognition of states and objects on this data set alone, measured on test images that chose nothing."
    return Report(data.name, lead, filled, _facts(data))


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
    images = list(curve.accuracies)
    drawn = curve.accuracies.values()
    means = [fmean(each) for each in drawn]
    low = [min(each) for each in drawn]
    high = [max(each) for each in drawn]
    marks = []
    for n, mean in zip(images, means, strict=True):
        marks.append(Mark(n, mean, f"{n:,} training images: {mean:.1f} %"))
    measured = Series("measured", images, means, low, high, marks, 0)
    twice = 2 * images[-1]
    tip = f"{twice:,} training images: {curve.doubled:.1f} %, extrapolated"
    ahead = [Mark(twice, curve.doubled, tip)]
    y = [means[-1], curve.doubled]
    guess = Series("extrapolated", [images[-1], twice], y, marks=ahead, tone=1)
    alt = f"accuracy by number of training images, from {means[0]:.1f} % with {images[0]} to {means[-1]:.1f} %"
    chart = Chart(alt, "training images", "accuracy, %", [measured, guess], from_zero=False)
    caption = (
        f"Closed form on the frozen features, on test images; means of {DRAWS} random draws of a "
        "quarter and of half of the training images of every pair, the band from the lowest to the "
        "highest draw. It has no text and nothing trained, so its accuracy differs from the "
        "model's; the shape is what counts."
    )
    slope = f"{curve.slope:.2f}".replace("-", "−")
    doubled = (
        f"Twice as many images per pair would give {curve.doubled:.1f} % instead of "
        f"{means[-1]:.1f} %. This is an extrapolation, by the line log error = α + β log images "
        f"with β = {slope}, and no measurement."
    )
    figure = Figure("learning-curve", draw(chart), caption)
    return ReportPart("More images of the same pairs", [figure, Note(doubled)])
