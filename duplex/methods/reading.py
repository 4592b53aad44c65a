"""Readings of the Duplex paper: options for what its text leaves open, and a preset that follows it literally."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from duplex.errors import shown
from duplex.options import Count, OptionError, Options, refuse


@dataclass(frozen=True)
class PaperReading(Options):
    """Options for what the paper's text leaves open (docs/paper.md); other values also fit the text.

    `reading: literal`, or `preset: literal` beside changed options, sets those of `LITERAL`.
    """

    unseen: Literal["means", "batch", "empty"] = "means"
    softmax: Literal["candidates", "all"] = "candidates"
    edges: Literal["posterior", "label"] = "posterior"
    factors: Literal["images", "labels"] = "images"
    counterfactuals: Literal["pairs", "labels"] = "pairs"
    diagonal: bool = True
    normalise: Literal["together", "by_kind"] = "together"
    anchors: Literal["attached", "detached"] = "attached"
    codebook: Literal["buffer", "trained"] = "buffer"
    fusion_rank: Count | None = None

    def rules(self) -> Iterable[tuple[object, str]]:
        message = "with counterfactuals: labels, no image is paired with itself; leave diagonal out"
        yield refuse(self.counterfactuals == "labels" and not self.diagonal, message)

    def changed(self) -> set[str]:
        return {name for name, value in self.to_dict().items() if value != getattr(type(self), name)}


# What the paper writes, where our defaults differ: unseen pairs' prototypes are composed from the
# factors of a batch, and the names in prompts are their token sequences
LITERAL: dict[str, Any] = {"vocabulary": "fixed", "reading": {"unseen": "batch"}}


def with_preset(record: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a file, with those of `LITERAL` if `reading` names it; stated options come first."""
    reading = record.get("reading")
    changes = dict(reading) if isinstance(reading, Mapping) else {"preset": reading}
    if "preset" not in changes or reading is None:
        return dict(record)
    preset = changes.pop("preset")
    if preset != "literal":
        raise OptionError(f"is {shown(preset)}; expected literal, or a table of options", "reading")
    return {**LITERAL, **record, "reading": {**LITERAL["reading"], **changes}}
