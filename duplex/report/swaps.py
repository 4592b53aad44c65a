"""Feature swapping: retrieve images by the state part of one image's feature joined with another's object part."""

from __future__ import annotations

from typing import Any

import numpy as np

from duplex.errors import UsageError
from duplex.evaluation.retrieval import nearest
from duplex.labels import Ints
from duplex.report.blocks import Block, Gallery, Group, Line, Note, Strip, Table, TableCell, TableRow, Thumb, columns
from duplex.report.prototype_retrieval import Array, Hit, RetrievalContext, fuse_factors, hits_of, thumb
from duplex.report.table_cells import json_pointer

TOP, SHOWN = 5, 3


def swap_blocks(context: RetrievalContext, file: str) -> tuple[list[Block], dict[str, Any]]:
    """Return a table and gallery of retrieval by one image's state part joined with another's object part; its numbers.

    file: path of the JSON file that the numbers will be written to, which the table cites.
    """
    if context.embedded_images.states is None or context.embedded_images.objects is None:
        return [Note("The method has no state and object factors to swap.")], {}
    numbers, gallery = _swap_all(
        context, context.embedded_images.states, context.embedded_images.objects, np.unique(context.compositions)
    )
    forms = {"questions": "{}", "first_right": "{:.1f}"}
    cells = [TableCell(forms[key].format(v), v, json_pointer(file, "swap", key)) for key, v in numbers.items()]
    header = columns("swaps", "nearest image right, %", texts=0)[: len(cells)]
    note = "One swap per test pair: how often the nearest other image shows exactly the state of A and the object of B."
    return [Table("Swapped factors", header, [TableRow(cells)], note), gallery], {"swap": numbers}


def swap_hits(context: RetrievalContext, states: Array, objects: Array, top: int) -> list[Hit]:
    """Return the `top` test images nearest to the state part of one image's feature joined with another's object part.

    states, objects: the two parts (factors) [1, d].

    Raise `UsageError` if the method has no state and object factors.
    """
    if context.embedded_images.states is None or context.embedded_images.objects is None:
        raise UsageError("this method has no state and object factors to swap; choose another with --method")
    gallery = fuse_factors(context.method, context.embedded_images.states, context.embedded_images.objects)
    rows, cosines = nearest(fuse_factors(context.method, states, objects), gallery, top)
    return hits_of(context, rows[0], cosines[0], -1)


def _swap_all(
    context: RetrievalContext, states: Array, objects: Array, present: Ints
) -> tuple[dict[str, float], Gallery]:
    """Retrieve each composition by a swap; return how often the nearest test image is right, and a gallery.

    A swap joins the state part of image A's feature with the object part of image B's; neither shows the composition
    looked for. The numbers are `questions`, the number of swaps, and `first_right`, the percentage with the right
    nearest image. The gallery shows some of the swaps.
    """
    swaps = [swap for swap in (_sources_of_swap(context, int(c)) for c in present) if swap is not None]
    if not swaps:
        return {"questions": 0}, Gallery([], "No two test images have a state and an object of another test pair.")
    wanted, a, b = (np.array(column) for column in zip(*swaps, strict=True))
    gallery = fuse_factors(context.method, states, objects)
    rows, cosines = nearest(fuse_factors(context.method, states[a], objects[b]), gallery, TOP + 2)
    groups, firsts = [], []
    unseen_first = np.argsort(context.labels.seen[wanted], kind="stable")[:SHOWN]
    for q in range(len(swaps)):
        others = [place for place, row in enumerate(rows[q]) if row not in (a[q], b[q])][:TOP]
        firsts.append(bool(others) and context.compositions[rows[q, others[0]]] == wanted[q])
        if q in unseen_first:
            hits = hits_of(context, rows[q, others], cosines[q, others], int(wanted[q]))
            thumbs = [thumb(context, hit) for hit in hits]
            groups.append(_swap_group(context, int(a[q]), int(b[q]), int(wanted[q]), thumbs))
    caption = "The state of A joined with the object of B, and the test images nearest to it (A and B left out)."
    return {"questions": len(swaps), "first_right": 100 * float(np.mean(firsts))}, Gallery(groups, caption)


def _sources_of_swap(context: RetrievalContext, wanted: int) -> tuple[int, int, int] | None:
    """Return (`wanted`, image A with its state and another object, image B with its object and another state) or None.

    The state part of A's feature joined with the object part of B's should retrieve images of the pair `wanted`.
    """
    compositions, labels = context.compositions, context.labels
    state, object_ = wanted // len(labels.objects), wanted % len(labels.objects)
    has_state, has_object = labels.state_of(compositions) == state, labels.object_of(compositions) == object_
    a, b = np.flatnonzero(has_state & ~has_object), np.flatnonzero(has_object & ~has_state)
    return (wanted, int(a[0]), int(b[0])) if a.size and b.size else None


def _swap_group(context: RetrievalContext, a: int, b: int, wanted: int, thumbs: list[Thumb]) -> Group:
    pair = []
    for row, role in ((a, "A: its state"), (b, "B: its object")):
        name = context.labels.name(int(context.compositions[row]))
        pair.append(Thumb(context.thumbnails(context.images[row]), name, f"source image {role}", None, [Line(role)]))
    strips = [Strip("sources", pair), Strip("nearest to A's state and B's object", thumbs)]
    return Group(f"→ {context.labels.name(wanted)}", strips)
