"""The parts of the report that show pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from duplex.report.blocks import Block, Note, Part
from duplex.report.predicted import Look, accuracy_tables, confused_table, examples
from duplex.report.texts import Texts
from duplex.report.thumbnails import any_there, thumbnail


def look_under(root: Path) -> Look:
    """Thumbnails of a data set's pictures, by their names in its manifest."""
    return partial(_look, root)


def _look(root: Path, image: str) -> str | None:
    return thumbnail(root / image)


def absence(root: Path, images: Sequence[str], data: str) -> list[Block]:
    """A note where none of the pictures is on this machine."""
    if any_there(root, images):
        return []
    return [Note(f"The pictures of {data} are not on this machine (looked under {root}); only their labels are shown.")]


def predicted_parts(
    predictions: pd.DataFrame, source: str, look: Look, missing: Sequence[Block], texts: Texts
) -> list[Part]:
    return [
        Part("Examples", [*missing, examples(predictions, look, texts.lines), *texts.blocks]),
        Part("Where it errs", [confused_table(predictions, source), *accuracy_tables(predictions, source)]),
    ]
