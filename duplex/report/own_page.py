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
from duplex.report.blocks import Report, ReportPart, ReportSection
from duplex.report.learning_curve import LearningCurve
from duplex.report.next_images import NextImages
from duplex.report.own_sections import (
    accuracy_parts,
    confusion_parts,
    curve_part,
    next_part,
    probability_part,
    recipe_part,
    wrong_answers_part,
)
from duplex.report.page import render_page
from duplex.report.thumbnails import Thumbnails, thumbnails_under
from duplex.system.files import write_text


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
        """The manifest (table of images) without unreadable images; the whole manifest if there are no features."""
        if not self.has_features:
            return self.manifest
        return self.manifest.iloc[np.sort(np.concatenate([self.examples[split].rows for split in SPLITS]))]


def write_page(data: OwnData, path: Path) -> Path:
    """Write a data set's HTML page to the file `path`, with thumbnails embedded, and return `path`."""
    write_text(path, render_page(own_report(data)))
    return path


def own_report(data: OwnData) -> Report:
    """Build the report of one data set and its model's answers; sections without data are left out."""
    labels, manifest, answered = data.labels, data.manifest, data.answered
    thumbnails = _thumbnails(data)
    train = data.readable[data.readable["split"] == "train"]
    sections: list[tuple[str, str, Sequence[ReportPart | None]]] = []
    if answered is not None and len(answered):
        codes = labels.index(train["state"].tolist(), train["object"].tolist())
        sections += [
            ("accuracy", "Accuracy", accuracy_parts(answered, codes)),
            ("confusions", "Confusions", confusion_parts(answered, manifest, thumbnails)),
            ("probabilities", "Probabilities", [probability_part(answered)]),
        ]
    if data.has_features:
        curve = LearningCurve.of(data.examples, labels)
        parts = [None if curve is None else curve_part(curve), next_part(NextImages.of(data.examples, labels), labels)]
        sections.append(("more-images", "More images", parts))
    if answered is not None and len(answered):
        sections.append(("wrong", "Wrong answers", [wrong_answers_part(answered, manifest, thumbnails)]))
    if data.recipes:
        sections.append(("recipes", "Training", [recipe_part(data.recipes)]))
    filled = [(ident, title, [part for part in parts if part is not None]) for ident, title, parts in sections]
    lead = "Recognition of states and objects on this data set alone, measured on test images that chose nothing."
    return Report(data.name, lead, [ReportSection(*each) for each in filled if each[2]], _facts(data))


def _thumbnails(data: OwnData) -> Thumbnails | None:
    """Return a function that reads an image's thumbnail, given its name; None if no image is on this machine."""
    present = any((data.root / image).is_file() for image in data.manifest["image"])
    return thumbnails_under(data.root) if present else None


def _facts(data: OwnData) -> list[tuple[str, str]]:
    """Return the numbers at the top of a data set's page as (name, text): counts of the data, and accuracy."""
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
        facts.append((f"accuracy, {100 * data.answered.new_share:g} % new", f"{data.answered.accuracy:.1f} %"))
    return [*facts, *data.facts]
