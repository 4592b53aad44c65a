"""What a report is built of: sections of tables, figures, galleries and notes, for page and Markdown alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """One entry of a table. `source` is `file#/json/pointer` of the number it shows."""

    text: str
    value: float | str | None = None  # what it is sorted by
    source: str = ""
    rank: int = 0  # 1: best, 2: second
    spread: str = ""  # `± 0.3`, in smaller type
    tip: str = ""


@dataclass(frozen=True)
class Row:
    cells: Sequence[Cell]
    quoted: bool = False


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = True
    tip: str = ""


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    kind: ClassVar[str] = "figure"
    name: str  # of its file under artifacts/plots/figures/
    svg: str
    caption: str
    small: bool = False  # three in a row where there is room


@dataclass(frozen=True)
class Note:
    """Plain words; `command` makes what is missing."""

    kind: ClassVar[str] = "note"
    text: str
    command: str = ""


@dataclass(frozen=True)
class Line:
    text: str
    right: bool | None = None
    head: bool = False  # says what the lines below it are


@dataclass(frozen=True)
class Thumb:
    """A small picture with what is said about it; `uri` is None where the picture is not on the machine."""

    uri: str | None
    name: str
    alt: str
    right: bool | None = None
    lines: Sequence[Line] = ()


@dataclass(frozen=True)
class Strip:
    title: str
    thumbs: Sequence[Thumb]


@dataclass(frozen=True)
class Group:
    title: str
    strips: Sequence[Strip]


@dataclass(frozen=True)
class Gallery:
    kind: ClassVar[str] = "gallery"
    groups: Sequence[Group]
    caption: str = ""


Block = Table | Figure | Note | Gallery


@dataclass(frozen=True)
class Part:
    """A titled run of blocks within a section."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    ident: str
    title: str
    parts: Sequence[Part]
    lead: str = ""


@dataclass(frozen=True)
class Report:
    title: str
    lead: str
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]] = field(default_factory=tuple)

    @property
    def figures(self) -> list[Figure]:
        return [block for s in self.sections for p in s.parts for block in p.blocks if isinstance(block, Figure)]
