"""What the predictions of one run look like: examples with their best three, confused pairs, worst and best pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from duplex.evaluation.retrieval import accuracy_by_label, confusions
from duplex.report.blocks import Block, Cell, Column, Gallery, Group, Line, Note, Row, Strip, Table, Thumb

EACH, SHOWN = 4, 10
CHOSEN = "At the bias on unseen pairs that validation chose."
Look = Callable[[str], str | None]  # an image's thumbnail, by its name in the manifest
Texts = Mapping[int, Sequence[Line]]  # the nearest texts of test images, by their rows in the manifest
KINDS = (("seen", True), ("unseen", True), ("seen", False), ("unseen", False))


def examples(predictions: pd.DataFrame, look: Look, texts: Texts, each: int = EACH) -> Block:
    """Test images with their best three compositions in the closed world: of seen and unseen pairs, right and wrong.
    Below them the nearest texts, where the method has any."""
    rows = predictions[predictions["world"] == "closed"]
    groups = []
    for kind, right in KINDS:
        chosen = _spread(rows[(rows["seen"] == (kind == "seen")) & (rows["right"] == right)], each)
        thumbs = [_example(row, look, texts.get(row["row"], ())) for _, row in chosen.iterrows()]
        if thumbs:
            groups.append(Group(f"{kind.capitalize()} pairs, {'right' if right else 'wrong'}", [Strip("", thumbs)]))
    if not groups:
        if len(predictions):
            return Note("Examples are the closed world's, which evaluation.worlds in params.yaml leaves out.")
        return Note("There are no closed-world predictions to show.", "dvc repro")
    said = "Below each test image its label, then the best three compositions at the bias that validation chose"
    read = "; below these the three of the closed world whose semantic prototypes are nearest to it, with their cosines"
    return Gallery(groups, f"{said}{read if texts else ''}.")


def _spread(rows: pd.DataFrame, count: int) -> pd.DataFrame:
    """A few rows from all over the table, of different labels."""
    first = rows.drop_duplicates("label")
    places = np.unique(np.linspace(0, max(len(first) - 1, 0), count).astype(int))
    return first.iloc[places[: len(first)]]


def _example(row: pd.Series, look: Look, texts: Sequence[Line]) -> Thumb:
    best = [row[key] for key in ("top1", "top2", "top3") if isinstance(row.get(key), str) and row[key]]
    lines = [Line(name, name == row["label"]) for name in best]
    lines = [Line("all of the score:", head=True), *lines, Line("text alone:", head=True), *texts] if texts else lines
    return Thumb(look(row["image"]), row["label"], f"test image labelled {row['label']}", lines=lines)


def confused_table(predictions: pd.DataFrame, source: str, limit: int = SHOWN) -> Table:
    """The wrong answers given most often, closed world, at the bias that validation chose."""
    names, label, predicted, _ = _coded(predictions)
    pairs, counts = confusions(label, predicted)
    images = np.bincount(label, minlength=len(names))
    rows = [
        Row(
            [
                Cell(names[own], names[own]),
                Cell(names[other], names[other]),
                Cell(f"{count}", int(count), source),
                Cell(f"{images[own]}", int(images[own]), source),
            ]
        )
        for (own, other), count in zip(pairs[:limit].tolist(), counts[:limit].tolist(), strict=True)
    ]
    header = [Column("label", False), Column("taken for", False), Column("images"), Column("of")]
    return Table("Most confused pairs, closed world", header, rows, CHOSEN)


def accuracy_tables(predictions: pd.DataFrame, source: str, limit: int = SHOWN) -> list[Table]:
    """The compositions recognised worst and best, closed world, at the bias that validation chose."""
    names, label, _, seen = _coded(predictions)
    rows = predictions[predictions["world"] == "closed"]
    found, images, share = accuracy_by_label(label, rows["right"].to_numpy(dtype=bool))
    lines = [
        Row(
            [
                Cell(names[c], names[c]),
                Cell("seen" if c in seen else "unseen", "seen" if c in seen else "unseen"),
                Cell(f"{n}", int(n), source),
                Cell(f"{100 * a:.1f}", 100 * float(a), source),
            ]
        )
        for c, n, a in zip(found.tolist(), images.tolist(), share.tolist(), strict=True)
    ]
    header = [Column("pair", False), Column("trained on", False), Column("test images"), Column("accuracy")]
    half = min(limit, len(lines) // 2)
    worst = [lines[i] for i in np.lexsort((-images, share))[:half]]
    return [
        Table("Recognised worst, closed world", header, worst, CHOSEN),
        Table("Recognised best, closed world", header, lines[:half], CHOSEN),
    ]


def _coded(predictions: pd.DataFrame) -> tuple[list[str], np.ndarray, np.ndarray, set[int]]:
    """Distinct names, labels and first answers as their indices, and which labels are seen; closed world."""
    rows = predictions[predictions["world"] == "closed"]
    both = pd.concat([rows["label"], rows["top1"]])
    codes, names = pd.factorize(both, sort=True)
    label, predicted = np.split(codes.astype(np.int64), 2)
    return list(names), label, predicted, set(label[rows["seen"].to_numpy(dtype=bool)].tolist())
