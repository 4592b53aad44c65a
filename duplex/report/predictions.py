"""Report tables and galleries of one run's predictions: examples, confused pairs, worst and best pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from duplex.report import blocks
from duplex.report.blocks import Block, Line, Note, ReportPart, Table, TableCell, TableRow, Thumb, columns, text_cell
from duplex.report.prototype_retrieval import RetrievedTexts
from duplex.report.thumbnails import Thumbnails

EACH, SHOWN = 4, 10  # images per group of examples, rows per table
AT_BIAS = "At the bias on unseen pairs that was chosen on validation."
TextLines = Mapping[int, Sequence[Line]]  # nearest texts of test images, by row of the manifest
KINDS = (("seen", True), ("unseen", True), ("seen", False), ("unseen", False))


def predicted_parts(
    predictions: pd.DataFrame, source: str, thumbnails: Thumbnails, notes: Sequence[Block], texts: RetrievedTexts
) -> list[ReportPart]:
    """Return the report parts `Examples` and `Errors` on the predictions of one run (a trained method).

    predictions: table of the run's predictions on test images.
    source: path of the predictions file, which tables cite.
    notes: blocks shown above the examples.
    texts: the texts (semantic prototypes) nearest to each test image.
    """
    return [
        ReportPart("Examples", [*notes, example_predictions(predictions, thumbnails, texts.lines), *texts.blocks]),
        ReportPart("Errors", [confused_table(predictions, source), *accuracy_tables(predictions, source)]),
    ]


def example_predictions(predictions: pd.DataFrame, thumbnails: Thumbnails, texts: TextLines) -> Block:
    """Return a gallery of test images with their best three predictions (closed world), or a note if there are none.

    It shows seen and unseen pairs, right and wrong predictions.

    texts: the nearest texts of each image, shown below the predictions.
    """
    rows = predictions[predictions["world"] == "closed"]
    groups = []
    for kind, right in KINDS:
        chosen = _spread(rows[(rows["seen"] == (kind == "seen")) & (rows["right"] == right)], EACH)
        thumbs = [_example(row, thumbnails, texts.get(row["row"], ())) for _, row in chosen.iterrows()]
        if thumbs:
            groups.append(
                blocks.Group(f"{kind.capitalize()} pairs, {'right' if right else 'wrong'}", [blocks.Strip("", thumbs)])
            )
    if not groups:
        if len(predictions):
            return Note("Examples need the closed world, which evaluation.worlds in params.yaml omits.")
        return Note("No closed-world predictions exist.", "dvc repro")
    caption = "Below each test image: its label and the three best predictions, at the bias chosen on validation"
    more = "; then the three closed-world pairs whose semantic prototypes are nearest, with their cosines"
    return blocks.Gallery(groups, f"{caption}{more if texts else ''}.")


def _spread(rows: pd.DataFrame, count: int) -> pd.DataFrame:
    """Return at most `count` rows of a table of predictions, evenly spaced, each with a different label."""
    first = rows.drop_duplicates("label")
    places = np.unique(np.linspace(0, max(len(first) - 1, 0), count).astype(int))
    return first.iloc[places[: len(first)]]


def _example(row: pd.Series, thumbnails: Thumbnails, texts: Sequence[Line]) -> Thumb:
    best = [row[key] for key in ("top1", "top2", "top3") if isinstance(row.get(key), str) and row[key]]
    lines = [Line(name, name == row["label"]) for name in best]
    lines = [Line("all score terms:", head=True), *lines, Line("text alone:", head=True), *texts] if texts else lines
    return Thumb(thumbnails(row["image"]), row["label"], f"test image labelled {row['label']}", lines=lines)


def confused_table(predictions: pd.DataFrame, source: str) -> Table:
    """Return a table of the pairs that are most often confused: label, wrong prediction and count (closed world).

    source: path of the predictions file, which the table cites.
    """
    closed = predictions[predictions["world"] == "closed"]
    images = closed["label"].value_counts()
    wrong = closed[closed["label"] != closed["top1"]].groupby(["label", "top1"]).size().reset_index(name="count")
    wrong = wrong.sort_values("count", ascending=False, kind="stable").head(SHOWN)
    rows = [
        TableRow([text_cell(label), text_cell(predicted), _count(count, source), _count(images[label], source)])
        for label, predicted, count in wrong.itertuples(index=False)
    ]
    header = columns("label", "predicted", "images", "of", texts=2)
    return Table("Most confused pairs, closed world", header, rows, AT_BIAS)


def accuracy_tables(predictions: pd.DataFrame, source: str) -> list[Table]:
    """Return two tables: the pairs with the lowest and those with the highest accuracy (closed world).

    Of pairs with equal accuracy, those with the most images come first. `source`: path that the tables cite.
    """
    by_label = predictions[predictions["world"] == "closed"].groupby("label")
    pairs = by_label.agg(seen=("seen", "first"), images=("right", "size"), share=("right", "mean"))
    tables = []
    for title, ascending in (("worst", True), ("best", False)):
        shown = pairs.sort_values(["share", "images"], ascending=[ascending, False], kind="stable")
        rows = []
        for label, seen, images, share in shown.head(min(SHOWN, len(pairs) // 2)).itertuples():
            accuracy = TableCell(f"{100 * share:.1f}", 100 * share, source)
            texts = [text_cell(label), text_cell("seen" if seen else "unseen")]
            rows.append(TableRow([*texts, _count(images, source), accuracy]))
        header = columns("pair", "trained on", "test images", "accuracy", texts=2)
        tables.append(Table(f"Recognised {title}, closed world", header, rows, AT_BIAS))
    return tables


def _count(images: int, source: str) -> TableCell:
    return TableCell(f"{images}", int(images), source)
