"""Feature swapping: the state of one image joined with the object of another, looked up among the test images."""

from __future__ import annotations

from typing import Any

import numpy as np

from duplex.errors import UsageError
from duplex.evaluation.retrieval import nearest
from duplex.labels import Ints
from duplex.report.blocks import Block, Cell, Column, Gallery, Group, Line, Note, Row, Strip, Table, Thumb
from duplex.report.prototypes import Array, Embedded, joined
from duplex.report.retrieved import Hit, Viewing, hits, thumb
from duplex.report.tables import pointer

TOP, SHOWN = 5, 3


def swap_blocks(viewing: Viewing, embedded: Embedded, file: str) -> tuple[list[Block], dict[str, Any]]:
    """How often a swap finds what it should, and some swaps to look at; the numbers will be in `file`."""
    if embedded.states is None or embedded.objects is None:
        return [Note("The method has no state and object factors to swap.")], {}
    numbers, gallery = _ask(viewing, embedded.states, embedded.objects, np.unique(viewing.own))
    return [_swap_table({"swap": numbers}, file), gallery], {"swap": numbers}


def swap_hits(viewing: Viewing, embedded: Embedded, states: Array, objects: Array, top: int) -> list[Hit]:
    """The test images nearest to `phi(z^s, z^o)` of one state and one object factor [1, d], among their own."""
    if embedded.states is None or embedded.objects is None:
        raise UsageError("this method has no state and object factors to swap; choose another one with --method")
    gallery = joined(viewing.method, embedded.states, embedded.objects)
    rows, cosines = nearest(joined(viewing.method, states, objects), gallery, top)
    return hits(viewing, rows[0], cosines[0], -1)


def _ask(viewing: Viewing, states: Array, objects: Array, present: Ints) -> tuple[dict[str, float], Gallery]:
    """For every test composition one question: the state of an image A and the object of an image B, neither of them
    that composition, looked up among the test images' own joined factors."""
    asked = [swap for swap in (_sources_of_swap(viewing, int(c)) for c in present) if swap is not None]
    if not asked:
        return {"questions": 0}, Gallery([], "No two test images have a state and an object of another test pair.")
    wanted, a, b = (np.array(column) for column in zip(*asked, strict=True))
    gallery = joined(viewing.method, states, objects)
    rows, cosines = nearest(joined(viewing.method, states[a], objects[b]), gallery, TOP + 2)
    groups, firsts = [], []
    unseen_first = np.argsort(viewing.labels.seen[wanted], kind="stable")[:SHOWN]
    for q in range(len(asked)):
        kept = [place for place, row in enumerate(rows[q]) if row not in (a[q], b[q])][:TOP]
        firsts.append(bool(kept) and viewing.own[rows[q, kept[0]]] == wanted[q])
        if q in unseen_first:
            thumbs = [thumb(viewing, hit) for hit in hits(viewing, rows[q, kept], cosines[q, kept], int(wanted[q]))]
            groups.append(_swap_group(viewing, int(a[q]), int(b[q]), int(wanted[q]), thumbs))
    caption = "The state of A joined with the object of B, and the test images nearest to it (A and B left out)."
    return {"questions": len(asked), "first_right": 100 * float(np.mean(firsts))}, Gallery(groups, caption)


def _sources_of_swap(viewing: Viewing, wanted: int) -> tuple[int, int, int] | None:
    """The first test image with the wanted state and another object, the first with the object and another state."""
    own, labels = viewing.own, viewing.labels
    state, object_ = wanted // len(labels.objects), wanted % len(labels.objects)
    has_state, has_object = labels.state_of(own) == state, labels.object_of(own) == object_
    a, b = np.flatnonzero(has_state & ~has_object), np.flatnonzero(has_object & ~has_state)
    return (wanted, int(a[0]), int(b[0])) if a.size and b.size else None


def _swap_group(viewing: Viewing, a: int, b: int, wanted: int, thumbs: list[Thumb]) -> Group:
    pair = [
        Thumb(
            viewing.look(viewing.images[row]),
            viewing.labels.name(int(viewing.own[row])),
            f"source image {role}",
            None,
            [Line(role)],
        )
        for row, role in ((a, "A: its state"), (b, "B: its object"))
    ]
    return Group(
        f"→ {viewing.labels.name(wanted)}",
        [Strip("sources", pair), Strip("nearest to A's state and B's object", thumbs)],
    )


def _swap_table(numbers: dict[str, Any], file: str) -> Table:
    values = numbers["swap"]
    cells = [Cell(f"{values['questions']}", values["questions"], pointer(file, "swap", "questions"))]
    if "first_right" in values:
        cells.append(Cell(f"{values['first_right']:.1f}", values["first_right"], pointer(file, "swap", "first_right")))
    header = [Column("swaps"), Column("nearest image right, %")][: len(cells)]
    note = "One swap a test pair: how often the nearest other image shows exactly the state of A and the object of B."
    return Table("Swapped factors", header, [Row(cells)], note)
