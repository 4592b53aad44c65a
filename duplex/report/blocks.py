"""Building blocks of a report, for its HTML and Markdown pages: sections of tables, figures, galleries and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from duplex.metric_table import MISSING


@dataclass(frozen=True)
class TableCell:
    """Cell of a report table. `source`: file and JSON pointer of its number, such as `metrics.json#/closed/auc`."""

    text: str
    value: float | str | None = None  # to sort by
    source: str = ""
    rank: int = 0  # 1: best, 2: second
    spread: str = ""  # `± 0.3`, in smaller type
    tip: str = ""


def text_cell(text: str) -> TableCell:
    """Cell that shows a text and sorts by it."""
    return TableCell(text, text)


def number_cell(
    value: float | None, form: str = "{:.1f}", source: str = "", *, spread: str = "", tip: str = ""
) -> TableCell:
    """Cell that shows a number in a format and sorts by it; a dash for None."""
    return TableCell(MISSING) if value is None else TableCell(form.format(value), value, source, 0, spread, tip)


def count_cell(count: int, source: str = "") -> TableCell:
    """Cell with a whole number, its thousands separated."""
    return number_cell(int(count), "{:,}", source)


@dataclass(frozen=True)
class TableRow:
    """Row of a report table; `quoted`: whether its numbers are quoted from publications, not measured."""

    cells: Sequence[TableCell]
    quoted: bool = False


@dataclass(frozen=True)
class Column:
    """Column heading of a report table; `tip` is its hover text."""

    title: str
    numeric: bool = True
    tip: str = ""


def columns(*titles: str, texts: int = 1) -> list[Column]:
    """Column headings with the given titles; the first `texts` columns hold text, the others numbers."""
    return [Column(title, place >= texts) for place, title in enumerate(titles)]


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[Column]
    rows: Sequence[TableRow]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    kind: ClassVar[str] = "figure"
    name: str  # file name under artifacts/plots/figures/, without .svg
    svg: str
    caption: str
    small: bool = False  # up to three side by side


@dataclass(frozen=True)
class Note:
    """Paragraph of a report, often on missing results; `command`: shell command that computes them, or empty."""

    kind: ClassVar[str] = "note"
    text: str
    command: str = ""


@dataclass(frozen=True)
class Line:
    """Line of text below a thumbnail; `right`: whether the prediction in the text is right, None if there is none."""

    text: str
    right: bool | None = None
    head: bool = False  # heading of the lines below


@dataclass(frozen=True)
class Thumb:
    """Thumbnail with its label and the lines of text below it; `uri` is None if the image is not on this machine."""

    uri: str | None  # data URI
    name: str  # label
    alt: str  # text for screen readers
    right: bool | None = None  # whether the answer for the image is right; None: no mark
    lines: Sequence[Line] = ()


@dataclass(frozen=True)
class Strip:
    """Row of thumbnails in a gallery, with a title."""

    title: str
    thumbs: Sequence[Thumb]


@dataclass(frozen=True)
class Group:
    """Group of rows of thumbnails in a gallery, with a title."""

    title: str
    strips: Sequence[Strip]


@dataclass(frozen=True)
class Gallery:
    kind: ClassVar[str] = "gallery"
    groups: Sequence[Group]
    caption: str = ""


@dataclass(frozen=True)
class Matrix:
    """Confusion matrix of K labels: `counts[i][j]` images of the label `names[i]` were answered with `names[j]`."""

    kind: ClassVar[str] = "matrix"
    caption: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""

    @property
    def rows(self) -> list[tuple[str, list[tuple[int, float, str]]]]:
        """Rows of the confusion matrix for display: a label's name with its cells.

        A cell is (number of images, share of the row's images, hover text).
        """
        table = []
        for name, counts in zip(self.names, self.counts, strict=True):
            total = max(1, sum(counts))
            cells = [
                (count, count / total, f"{name} answered as {other}: {count} of {total}")
                for count, other in zip(counts, self.names, strict=True)
            ]
            table.append((name, cells))
        return table


Block = Table | Figure | Note | Gallery | Matrix


@dataclass(frozen=True)
class ReportPart:
    """Part of a report section: a title with tables, figures, galleries and notes."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class ReportSection:
    ident: str
    title: str
    parts: Sequence[ReportPart]
    lead: str = ""


@dataclass(frozen=True)
class Report:
    title: str
    lead: str
    sections: Sequence[ReportSection]
    facts: Sequence[tuple[str, str]] = field(default_factory=tuple)

    @property
    def figures(self) -> list[Figure]:
        return [block for s in self.sections for p in s.parts for block in p.blocks if isinstance(block, Figure)]
