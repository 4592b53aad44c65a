"""Write a self-contained HTML page on a model's answers for one data set: `duplex fit`, `duplex report --dataset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from duplex.evaluation.answered_images import AnsweredImages
from duplex.features.examples import Examples
from duplex.labels import SPLITS, LabelSpace
from duplex.report.answers import (
    accuracy_parts,
    answers_of,
    confusion_parts,
    probability_part,
    wrong_answers_part,
)
from duplex.report.blocks import (
    Block,
    Figure,
    Note,
    Report,
    ReportPart,
    ReportSection,
    Table,
    TableCell,
    TableRow,
    columns,
    count_cell,
    number_cell,
    text_cell,
)
from duplex.report.charts import Chart, Mark, Series, draw
from duplex.report.images import thumbnails_under
from duplex.report.more_images import DRAWS, LearningCurve, NextImages
from duplex.report.page import render_page
from duplex.report.tables import recipe_table
from duplex.system.files import write_text

NEXT = 12  # pairs whose next images would help
FORMULA = (
    "Gain = e V / (1 + V). V = 1/(n+k) + (k/(n+k))² u′H⁻¹u is the variance of the pair's mean in the closed form, in "
    "coordinates where images spread by 1 about it: n labelled images; k = {k:.2g} images, the worth of the prediction "
    "from state and object; H the normal equations of their effects. One more image takes away the share V/(1 + V) "
    "of V. e is the share of the pair's validation images that the closed form gets wrong, shrunk by one image to that "
    "of all pairs. The order is a heuristic."
)


@dataclass(frozen=True)
class OwnData:
    """A data set to write a page about, with features and a trained model's answers for its test images."""

    name: str
    labels: LabelSpace
    manifest: pd.DataFrame  # image, state, object, split
    root: Path  # folder of the images
    answered: AnsweredImages | None = None  # test images; None if the model was not evaluated
    examples: Mapping[str, Examples] = field(default_factory=dict)  # split -> frozen features, on the CPU
    recipes: Sequence[Mapping[str, Any]] = ()  # `RecipeChoice.table`
    facts: Sequence[tuple[str, str]] = ()  # further lines of the head, such as the encoder

    @property
    def has_features(self) -> bool:
        """Whether every split has features, from which the page's closed-form classifier is fitted and measured."""
        return all(split in self.examples and len(self.examples[split]) for split in SPLITS)

    @property
    def readable(self) -> pd.DataFrame:
        """The manifest without unreadable images; the whole manifest if there are no features."""
        if not self.has_features:
            return self.manifest
        return self.manifest.iloc[np.sort(np.concatenate([self.examples[split].rows for split in SPLITS]))]


def write_page(data: OwnData, path: Path) -> Path:
    """Write a data set's HTML page to the file `path`, with thumbnails embedded, and return `path`."""
    write_text(path, render_page(own_report(data)))
    return path


def own_report(data: OwnData) -> Report:
    """Build the report of one data set and its model's answers; sections without data are left out."""
    labels, answered = data.labels, data.answered
    present = any((data.root / image).is_file() for image in data.manifest["image"])
    thumbnails = thumbnails_under(data.root) if present else None
    sections: list[tuple[str, str, Sequence[ReportPart | None]]] = []
    if answered is not None and len(answered):
        answers = answers_of(answered, data.manifest)
        train = data.readable[data.readable["split"] == "train"]
        names = labels.names(labels.index(train["state"].tolist(), train["object"].tolist()))
        training = pd.Series(names, train["image"])
        sections += [
            ("accuracy", "Accuracy", accuracy_parts(answered, answers, training)),
            ("confusions", "Confusions", confusion_parts(answered, answers, training, thumbnails)),
            ("probabilities", "Probabilities", [probability_part(answered)]),
        ]
    if data.has_features:
        curve = LearningCurve.of(data.examples, labels)
        advice = labelling_advice_part(NextImages.of(data.examples, labels), labels)
        sections.append(("more-images", "More images", [None if curve is None else curve_part(curve), advice]))
    if answered is not None and len(answered):
        sections.append(("wrong", "Wrong answers", [wrong_answers_part(answers, thumbnails)]))
    if data.recipes:
        table = recipe_table("Recipes compared on validation images", data.recipes, "recipe")
        sections.append(("recipes", "Training", [ReportPart("Recipes", [table])]))
    filled = [(ident, title, [part for part in parts if part is not None]) for ident, title, parts in sections]
    lead = "Recognition of states and objects on this data set alone, measured on test images that chose nothing."
    return Report(data.name, lead, [ReportSection(*each) for each in filled if each[2]], _facts(data))


def _facts(data: OwnData) -> list[tuple[str, str]]:
    counts = data.readable["split"].value_counts()
    pairs = len(data.readable[["state", "object"]].drop_duplicates())
    facts = [
        ("images", f"{len(data.readable):,}"),
        ("train / val / test", " / ".join(f"{int(counts.get(split, 0)):,}" for split in SPLITS)),
        ("states", f"{len(data.labels.states):,}"),
        ("objects", f"{len(data.labels.objects):,}"),
        ("labelled pairs", f"{pairs:,}"),
    ]
    if data.answered is not None and len(data.answered):
        facts.append((f"accuracy, {100 * data.answered.new_share:g} % unseen", f"{data.answered.accuracy:.1f} %"))
    return [*facts, *data.facts]


def curve_part(curve: LearningCurve) -> ReportPart:
    """The learning curve, and its extrapolation to twice as many training images."""
    images = [point.images for point in curve.points]
    means = [point.mean for point in curve.points]
    low = [min(point.accuracies) for point in curve.points]
    high = [max(point.accuracies) for point in curve.points]
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
        "no text and nothing trained, so its accuracy is another than the model's; the shape is what counts."
    )
    slope = f"{curve.slope:.2f}".replace("-", "−")
    doubled = (
        f"Twice as many images per pair would give {curve.doubled:.1f} % instead of {means[-1]:.1f} %. This is an "
        f"extrapolation, by the line log error = α + β log images with β = {slope}, and no measurement."
    )
    return ReportPart("More images of the same pairs", [Figure("learning-curve", drawing, caption), Note(doubled)])


def labelling_advice_part(advice: NextImages, labels: LabelSpace) -> ReportPart:
    """The labelled pairs for which one more labelled image would help most, as a table."""
    rows = []
    for i, pair in enumerate(advice.pairs[:NEXT].tolist()):
        wrong, validated = int(advice.wrong[i]), int(advice.validated[i])
        share = number_cell(None)
        if validated:
            share = TableCell(f"{wrong} of {validated}", wrong / validated)
        variance = number_cell(float(advice.variance[i]), "{:.3f}")
        gain = number_cell(float(advice.gain[i]), "{:.3f}")
        rows.append(TableRow([text_cell(labels.name(pair)), count_cell(advice.images[i]), share, variance, gain]))
    header = columns("pair", "labelled images", "wrong in validation", "variance V", "gain")
    note = FORMULA.format(k=advice.shrinkage)
    blocks: list[Block] = [Table("Pairs whose next images would help most", header, rows, note)]
    if advice.errors is not None:
        larger, smaller = advice.errors
        text = (
            f"On validation images, the closed form is wrong for {larger:.1f} % of those whose pair has a variance "
            f"above the median, and for {smaller:.1f} % of the others."
        )
        blocks.append(Note(text))
    return ReportPart("Next images", blocks)
