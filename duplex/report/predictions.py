"""Tables and galleries of one run's predictions: examples, confused pairs, worst and best pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from duplex.evaluation.retrieval import accuracy_by_label, confusions
from duplex.report import blocks
from duplex.report.blocks import Block, Line, Note, ReportPart, Table, TableCell, TableRow, Thumb, columns, text_cell
from duplex.report.prototype_retrieval import Texts
from duplex.report.thumbnails import Thumbnails

EACH, SHOWN = 4, 10
AT_BIAS = "At the bias on unseen pairs that was chosen on validation."
TextLines = Mapping[int, Sequence[Line]]  # nearest texts of test images, by row of the manifest
KINDS = (("seen", True), ("unseen", True), ("seen", False), ("unseen", False))


def predicted_parts(
    predictions: pd.DataFrame, source: str, thumbnails: Thumbnails, notes: Sequence[Block], texts: Texts
) -> list[ReportPart]:
    """Return the report parts on examples and on errors; tables cite the predictions file `source`."""
    return [
        ReportPart("Examples", [*notes, examples(predictions, thumbnails, texts.lines), *texts.blocks]),
        ReportPart("Errors", [confused_table(predictions, source), *accuracy_tables(predictions, source)]),
    ]


def examples(predictions: pd.DataFrame, thumbnails: Thumbnails, texts: TextLines, each: int = EACH) -> Block:
    """Return test images of seen and unseen pairs, right and wrong, with their best three predictions (closed world).

    `texts`: the nearest texts of images, shown below the predictions. `each`: images per group.
    """
    rows = predictions[predictions["world"] == "closed"]
    groups = []
    for kind, right in KINDS:
        chosen = _spread(rows[(rows["seen"] == (kind == "seen")) & (rows["right"] == right)], each)
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
    """Return up to `count` predictions of different labels, evenly spread over the table."""
    first = rows.drop_duplicates("label")
    places = np.unique(np.linspace(0, max(len(first) - 1, 0), count).astype(int))
    return first.iloc[places[: len(first)]]


def _example(row: pd.Series, thumbnails: Thumbnails, texts: Sequence[Line]) -> Thumb:
    best = [row[key] for key in ("top1", "top2", "top3") if isinstance(row.get(key), str) and row[key]]
    lines = [Line(name, name == row["label"]) for name in best]
    lines = [Line("all score terms:", head=True), *lines, Line("text alone:", head=True), *texts] if texts else lines
    return Thumb(thumbnails(row["image"]), row["label"], f"test image labelled {row['label']}", lines=lines)


def confused_table(predictions: pd.DataFrame, source: str, limit: int = SHOWN) -> Table:
    """Return a table of the most frequent wrong predictions (closed world)."""
    names, label, predicted, _ = _coded(predictions)
    pairs, counts = confusions(label, predicted)
    images = np.bincount(label, minlength=len(names))
    rows = [
        TableRow([text_cell(names[a]), text_cell(names[b]), _count(n, source), _count(int(images[a]), source)])
        for (a, b), n in zip(pairs[:limit].tolist(), counts[:limit].tolist(), strict=True)
    ]
    header = columns("label", "predicted", "images", "of", texts=2)
    return Table("Most confused pairs, closed world", header, rows, AT_BIAS)


def accuracy_tables(predictions: pd.DataFrame, source: str, limit: int = SHOWN) -> list[Table]:
    """Return tables of the pairs recognised worst and best (closed world)."""
    names, label, _, seen = _coded(predictions)
    rows = predictions[predictions["world"] == "closed"]
    labels, images, share = accuracy_by_label(label, rows["right"].to_numpy(dtype=bool))
    lines = []
    for c, n, percent in zip(labels.tolist(), images.tolist(), (100 * share).tolist(), strict=True):
        texts = [text_cell(names[c]), text_cell("seen" if c in seen else "unseen")]
        lines.append(TableRow([*texts, _count(n, source), TableCell(f"{percent:.1f}", percent, source)]))
    header = columns("pair", "trained on", "test images", "accuracy", texts=2)
    half = min(limit, len(lines) // 2)
    worst = [lines[i] for i in np.lexsort((-images, share))[:half]]
    return [
        Table("Recognised worst, closed world", header, worst, AT_BIAS),
        Table("Recognised best, closed world", header, lines[:half], AT_BIAS),
    ]


def _count(images: int, source: str) -> TableCell:
    return TableCell(f"{images}", images, source)


def _coded(predictions: pd.DataFrame) -> tuple[list[str], np.ndarray, np.ndarray, set[int]]:
    """Return pair names, labels and predictions as indices of names, and the set of seen labels (closed world)."""
    rows = predictions[predictions["world"] == "closed"]
    both = pd.concat([rows["label"], rows["top1"]])
    codes, names = pd.factorize(both, sort=True)
    label, predicted = np.split(codes.astype(np.int64), 2)
    return list(names), label, predicted, set(label[rows["seen"].to_numpy(dtype=bool)].tolist())
