"""Write the page of one data set from a run's inputs and its answers for test images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duplex.library.inputs import RunInputs
from duplex.recognition.listed_answers import ListedAnswers
from duplex.report.answered_images import AnsweredImages
from duplex.report.own_page import OwnData, write_page


def write_dataset_page(
    out: Path,
    name: str,
    inputs: RunInputs,
    answers: ListedAnswers,
    root: Path,
    *,
    recipes: Sequence[Mapping[str, Any]] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write the page of a data set to the file `out`, and return it.

    name: title of the page.
    inputs: manifest, labels and features, on the CPU, of the split that the model was trained and measured on.
    answers: of the readable test images, in the order of `inputs.examples["test"]`.
    root: folder of the images.
    recipes: rows of `duplex.library.climb`, for the table of what was tried.
    facts: further names and values in the head of the page.
    """
    rows = inputs.examples["test"].rows
    columns = answers.target, answers.answer, answers.probability, answers.new_share
    answered = AnsweredImages(inputs.labels, rows, *columns)
    data = OwnData(name, inputs.labels, inputs.manifest, root, answered, inputs.examples, recipes, facts)
    return write_page(data, out)
