"""What the prototypes hold: images nearest to a semantic and to a visual prototype, and to swapped factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duplex.errors import UsageError
from duplex.evaluation.accumulator import Floats
from duplex.evaluation.retrieval import nearest, precision
from duplex.features.examples import Examples
from duplex.labels import Ints, LabelSpace
from duplex.methods.inspectable import Exhibits
from duplex.report.blocks import Block, Cell, Column, Gallery, Group, Line, Note, Row, Strip, Table, Thumb
from duplex.report.prototypes import Embedded, prototypes_of
from duplex.report.tables import pointer

TOP, SHOWN = 4, 4
Look = Callable[[str], str | None]


@dataclass(frozen=True)
class Viewing:
    """What a method lets people look at, the test images, and how to show them."""

    method: Exhibits
    labels: LabelSpace
    test: Examples
    images: Sequence[str]  # names of the test images
    look: Look

    @property
    def own(self) -> Ints:
        return self.test.compositions.cpu().numpy()


def prototype_blocks(viewing: Viewing, embedded: Embedded, file: str) -> tuple[list[Block], dict[str, Any]]:
    """Tables and galleries of retrieval by prototypes, and the numbers that will be in `file`."""
    if embedded.z is None or not (viewing.method.semantic or viewing.method.visual):
        return [Note("The method has no prototypes to look at.")], {}
    present = np.unique(viewing.own)
    numbers: dict[str, Any] = {"precision_at_4": _precisions(viewing, embedded, present)}
    return [_precision_table(numbers, file), _prototype_gallery(viewing, embedded, present)], numbers


@dataclass(frozen=True)
class Hit:
    """A test image that was found."""

    row: int  # among the test images
    image: str
    label: str
    cosine: float
    right: bool


def prototype_hits(viewing: Viewing, embedded: Embedded, composition: int, top: int) -> dict[str, list[Hit]]:
    """The test images nearest to each kind of prototype of a composition."""
    if embedded.z is None or not (viewing.method.semantic or viewing.method.visual):
        raise UsageError("this method has no prototypes to look at; choose another one with --method")
    found = {}
    for kind, prototype in prototypes_of(viewing.method, np.array([composition])).items():
        rows, cosines = nearest(prototype, embedded.beside(kind), top)
        found[kind] = hits(viewing, rows[0], cosines[0], composition)
    return found


def hits(viewing: Viewing, rows: Ints, cosines: Floats, wanted: int) -> list[Hit]:
    own = viewing.own
    return [
        Hit(row, viewing.images[row], viewing.labels.name(int(own[row])), cosine, bool(own[row] == wanted))
        for row, cosine in zip(rows.tolist(), cosines.tolist(), strict=True)
    ]


def _precisions(viewing: Viewing, embedded: Embedded, present: Ints) -> dict[str, dict[str, float]]:
    """Share of the four nearest images that have the prototype's label, in percent, over test compositions."""
    found: dict[str, dict[str, float]] = {}
    for kind, prototypes in prototypes_of(viewing.method, present).items():
        rows, _ = nearest(prototypes, embedded.beside(kind), TOP)
        seen = viewing.labels.seen[present]
        found[kind] = {
            name: 100 * precision(rows[mask], viewing.own, present[mask])
            for name, mask in (("seen", seen), ("unseen", ~seen), ("all", np.ones_like(seen)))
            if mask.any()
        }
    return found


def _precision_table(numbers: dict[str, Any], file: str) -> Table:
    rows = []
    for kind, values in numbers["precision_at_4"].items():
        cells = [Cell(f"{v:.1f}", v, pointer(file, "precision_at_4", kind, name)) for name, v in values.items()]
        rows.append(Row([Cell(f"{kind} prototypes", kind), *cells]))
    groups = next(iter(numbers["precision_at_4"].values()))
    note = "Share of the four nearest test images that have the prototype's label, mean over the test pairs, percent."
    return Table("Precision among the nearest four", [Column("of", False), *map(Column, groups)], rows, note)


def _prototype_gallery(viewing: Viewing, embedded: Embedded, present: Ints) -> Gallery:
    groups = []
    for composition in _most_pictured(viewing, present):
        found = prototype_hits(viewing, embedded, composition, TOP)
        strips = [
            Strip(f"nearest to the {kind} prototype", [thumb(viewing, hit) for hit in some])
            for kind, some in found.items()
        ]
        kind = "seen" if viewing.labels.seen[composition] else "unseen"
        groups.append(Group(f"{viewing.labels.name(composition)} ({kind})", strips))
    return Gallery(groups, "Test images nearest to a pair's prototypes, with their labels and cosines.")


def _most_pictured(viewing: Viewing, present: Ints) -> list[int]:
    """Test compositions with the most images: half of them seen, half unseen where there are any."""
    counts = np.bincount(viewing.own, minlength=viewing.labels.size)[present]
    order = present[np.argsort(-counts, kind="stable")]
    seen = viewing.labels.seen[order]
    half = SHOWN // 2
    return [*order[seen][:half].tolist(), *order[~seen][:half].tolist()]


def thumb(viewing: Viewing, hit: Hit) -> Thumb:
    said = [Line(f"cosine {hit.cosine:.3f}")]
    return Thumb(viewing.look(hit.image), hit.label, f"test image labelled {hit.label}", hit.right, said)
