"""Image to composition, the paper's figure of qualitative results: the texts nearest to test images.

An image's feature asks for the three semantic prototypes `t^c` of the closed world with the largest cosines. The other
terms of a score and the bias on unseen pairs have no say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from duplex.evaluation.accumulator import Floats
from duplex.evaluation.retrieval import nearest
from duplex.labels import Bools, Ints
from duplex.report.blocks import Block, Cell, Column, Line, Row, Table
from duplex.report.prototypes import Embedded
from duplex.report.retrieved import Viewing
from duplex.report.tables import pointer

TOP = 3


@dataclass(frozen=True)
class Texts:
    """All empty where a method has no semantic prototypes."""

    lines: Mapping[int, Sequence[Line]] = field(default_factory=dict)  # of a test image, by its row in the manifest
    blocks: Sequence[Block] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)  # what `blocks` cite


def nearest_texts(viewing: Viewing, embedded: Embedded) -> tuple[Ints, Floats] | None:
    """Compositions [n, 3] by falling cosine to each test image, and the cosines."""
    if viewing.method.semantic is None or embedded.spoken is None:
        return None
    columns = viewing.labels.target("closed", "test")
    places, cosines = nearest(embedded.spoken, viewing.method.semantic(columns).cpu().numpy(), TOP)
    return columns[places], cosines


def texts_of(viewing: Viewing, embedded: Embedded, file: str) -> Texts:
    """What is said below pictures, and how often it is right; the numbers will be in `file`."""
    answer = nearest_texts(viewing, embedded)
    if answer is None:
        return Texts()
    found, cosines = answer
    right: Bools = found == viewing.own[:, None]
    names = [viewing.labels.names(column) for column in found.T]
    lines = {
        row: [Line(f"{cosines[i, k]:.3f} {names[k][i]}", bool(right[i, k])) for k in range(len(names))]
        for i, row in enumerate(viewing.test.rows.tolist())
    }
    numbers = {"texts": _shares(right, viewing.labels.seen[viewing.own])}
    return Texts(lines, [_table(numbers, file)], numbers)


def _shares(right: Bools, seen: Bools) -> dict[str, dict[str, float]]:
    """Images [n, 3] whose label is the first text, and those where it is among the three, in percent."""
    kinds = {"seen": seen, "unseen": ~seen, "all": np.ones_like(seen)}
    hits = {"first": right[:, 0], "among_three": np.any(right, axis=1)}
    return {
        name: {kind: 100 * float(hit[mask].mean()) for kind, mask in kinds.items() if mask.any()}
        for name, hit in hits.items()
    }


def _table(numbers: Mapping[str, Any], file: str) -> Table:
    rows = []
    for name, title in (("first", "the nearest text"), ("among_three", "one of the nearest three")):
        shares = numbers["texts"][name]
        cells = [Cell(f"{share:.1f}", share, pointer(file, "texts", name, kind)) for kind, share in shares.items()]
        rows.append(Row([Cell(title, title), *cells]))
    note = "Share of test images whose label it is, by cosine of feature and semantic prototype, closed world, percent."
    header = [Column("label is", False), *map(Column, numbers["texts"]["first"])]
    return Table("Image to text", header, rows, note)
