"""Image-to-text retrieval, as in the paper's qualitative figure.

For each test image: the three semantic prototypes `t^c` of the closed world with the largest cosines to its feature.
Other score terms and the bias on unseen pairs are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from duplex.evaluation.accumulator import Floats
from duplex.evaluation.retrieval import nearest
from duplex.labels import Bools, Ints
from duplex.report.blocks import Block, Line
from duplex.report.prototype_retrieval import EmbeddedImages, RetrievalContext, masks_of, shares_table

TOP = 3


@dataclass(frozen=True)
class Texts:
    """Nearest texts of the test images; empty if the method has no semantic prototypes."""

    lines: Mapping[int, Sequence[Line]] = field(default_factory=dict)  # by row of the manifest
    blocks: Sequence[Block] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)  # cited by `blocks`


def nearest_texts(context: RetrievalContext, embedded: EmbeddedImages) -> tuple[Ints, Floats] | None:
    """Return the three nearest compositions of each test image [n, 3] and the cosines, descending."""
    if context.method.semantic is None or embedded.text_space is None:
        return None
    candidates = context.labels.candidates("closed", "test")
    places, cosines = nearest(embedded.text_space, context.method.semantic(candidates).cpu().numpy(), TOP)
    return candidates[places], cosines


def text_blocks(context: RetrievalContext, embedded: EmbeddedImages, file: str) -> Texts:
    """Return the lines below test images and how often they are right; tables cite the numbers as being in `file`."""
    nearest_three = nearest_texts(context, embedded)
    if nearest_three is None:
        return Texts()
    compositions, cosines = nearest_three
    right: Bools = compositions == context.compositions[:, None]
    names = [context.labels.names(column) for column in compositions.T]
    lines = {
        row: [Line(f"{cosines[i, k]:.3f} {names[k][i]}", bool(right[i, k])) for k in range(len(names))]
        for i, row in enumerate(context.test.rows.tolist())
    }
    numbers = {"texts": _shares(right, context.labels.seen[context.compositions])}
    titles = {"first": "the nearest text", "among_three": "one of the nearest three"}
    note = "Share of test images whose label it is, by cosine of feature and semantic prototype, closed world, percent."
    return Texts(lines, [shares_table("Image to text", "label is", numbers, file, "texts", titles, note)], numbers)


def _shares(right: Bools, seen: Bools) -> dict[str, dict[str, float]]:
    """Return the percentages of images whose label is the first text, and of those where it is among the three."""
    hits = {"first": right[:, 0], "among_three": np.any(right, axis=1)}
    return {
        name: {kind: 100 * float(hit[mask].mean()) for kind, mask in masks_of(seen).items()}
        for name, hit in hits.items()
    }
