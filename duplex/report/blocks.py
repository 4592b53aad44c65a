"""Building blocks of an HTML page, and functions that draw and write them."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import ClassVar, TypeVar
from xml.sax.saxutils import escape, quoteattr

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from duplex.evaluation.metrics import MISSING
from duplex.system.files import replace_folder, write_json


@dataclass(frozen=True)
class TableCell:
    """Cell of a report table; `source` cites its number, such as `metrics.json#/closed/auc`."""

    text: str
    value: float | str | None = None  # to sort by
    source: str = ""
    rank: int = 0  # 1: best, 2: second
    spread: str = ""  # `± 0.3`, in smaller type
    tip: str = ""


def json_pointer(file: str, *keys: object) -> str:
    """Pointer to a value in a JSON file, such as `file#/a/b`; escapes `/` and `~` (RFC 6901)."""
    escaped = [str(key).replace("~", "~0").replace("/", "~1") for key in keys]
    return file + "#" + "".join(f"/{key}" for key in escaped)


def text_cell(text: str) -> TableCell:
    """Cell that shows a text and is sorted by it."""
    return TableCell(text, text)


def number_cell(
    value: float | None, form: str = "{:.1f}", source: str = "", *, spread: str = "", tip: str = ""
) -> TableCell:
    """Cell that shows a number and is sorted by it; None is shown as a dash."""
    return TableCell(MISSING) if value is None else TableCell(form.format(value), value, source, 0, spread, tip)


def count_cell(count: int, source: str = "") -> TableCell:
    """Cell with a whole number, such as `12,345`."""
    return number_cell(int(count), "{:,}", source)


@dataclass(frozen=True)
class TableRow:
    """Row of a report table; `quoted`: its numbers are published ones, not measured."""

    cells: Sequence[TableCell]
    quoted: bool = False


@dataclass(frozen=True)
class Column:
    """Heading of a report table's column; `tip` is shown when the pointer hovers over it."""

    title: str
    numeric: bool = True
    tip: str = ""


def headings(*titles: str, texts: int = 1) -> list[Column]:
    """Headings with these titles: the first `texts` columns hold text, all others numbers."""
    return [Column(title, place >= texts) for place, title in enumerate(titles)]


def text_column(title: str, tip: str = "") -> Column:
    return Column(title, False, tip)


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[Column]
    rows: Sequence[TableRow]
    note: str = ""


Item = TypeVar("Item")
ColumnOf = tuple[Column, Callable[[Item], TableCell]]  # a heading, and what it says of an item


def table_of(caption: str, columns: Sequence[ColumnOf[Item]], items: Iterable[Item], note: str = "") -> Table:
    """Table with a row per item, whose cells are made by the functions of the columns."""
    rows = [TableRow([cell(item) for _, cell in columns]) for item in items]
    return Table(caption, [column for column, _ in columns], rows, note)


def pair_table(caption: str, pairs: Iterable[tuple[str, TableCell]], value: Column) -> Table:
    """Table with a row per item, its name and its cell; `value` is the heading of the cells."""
    columns: list[ColumnOf[tuple[str, TableCell]]] = [
        (text_column("item"), lambda pair: text_cell(pair[0])),
        (value, lambda pair: pair[1]),
    ]
    return table_of(caption, columns, pairs)


def ranked(rows: Sequence[TableRow], places: Iterable[int]) -> list[TableRow]:
    """Copies of rows, in which the two largest numbers of each column in `places` are ranked."""
    grid = [list(row.cells) for row in rows]
    for place in places:
        numbers = [line[place].value for line in grid]
        largest = {number for number in numbers if isinstance(number, int | float)}
        values = sorted(largest, reverse=True)
        for line in grid:
            value = line[place].value
            if isinstance(value, int | float) and value in values[:2] and len(values) > 1:
                line[place] = replace(line[place], rank=1 + values.index(value))
    return [TableRow(cells, row.quoted) for cells, row in zip(grid, rows, strict=True)]


@dataclass(frozen=True)
class Figure:
    kind: ClassVar[str] = "figure"
    name: str  # file name under artifacts/plots/figures/, without .svg
    svg: str
    caption: str
    small: bool = False  # up to three side by side


@dataclass(frozen=True)
class Note:
    """Paragraph of a report; `command`: the shell command that computes missing results."""

    kind: ClassVar[str] = "note"
    text: str
    command: str = ""


@dataclass(frozen=True)
class Caption:
    """Line of text below a thumbnail; `right`: whether its prediction is right, if it is one."""

    text: str
    right: bool | None = None
    head: bool = False  # heading of the lines below


@dataclass(frozen=True)
class Thumb:
    """Thumbnail with its label and lines of text."""

    uri: str | None  # data URI
    name: str  # label
    alt: str  # text for screen readers
    right: bool | None = None  # whether the answer for the image is right; None: no mark
    lines: Sequence[Caption] = ()


@dataclass(frozen=True)
class Strip:
    """One row of thumbnails in a gallery, with its own title."""

    title: str
    thumbs: Sequence[Thumb]


@dataclass(frozen=True)
class Strips:
    """Several rows of thumbnails in a gallery under one title."""

    title: str
    strips: Sequence[Strip]


@dataclass(frozen=True)
class Gallery:
    kind: ClassVar[str] = "gallery"
    groups: Sequence[Strips]
    caption: str = ""


@dataclass(frozen=True)
class ConfusionMatrix:
    """`counts[i][j]`: number of images with the label `names[i]` and the answer `names[j]`."""

    kind: ClassVar[str] = "matrix"
    caption: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]
    note: str = ""

    @property
    def rows(self) -> list[tuple[str, list[tuple[int, float, str]]]]:
        """Each row's label and cells: number of images, share of the row, hover text."""
        table = []
        for name, counts in zip(self.names, self.counts, strict=True):
            total = max(1, sum(counts))
            cells = [
                (count, count / total, f"{name} answered as {other}: {count} of {total}")
                for count, other in zip(counts, self.names, strict=True)
            ]
            table.append((name, cells))
        return table


Block = Table | Figure | Note | Gallery | ConfusionMatrix


@dataclass(frozen=True)
class ReportPart:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class ReportSection:
    ident: str
    title: str
    parts: Sequence[ReportPart]


@dataclass(frozen=True)
class Report:
    title: str
    lead: str
    sections: Sequence[ReportSection]
    facts: Sequence[tuple[str, str]] = field(default_factory=tuple)

    @property
    def figures(self) -> list[Figure]:
        found = []
        for section in self.sections:
            for part in section.parts:
                found += [block for block in part.blocks if isinstance(block, Figure)]
        return found


WIDTH, HEIGHT = 440, 300
LEFT, RIGHT = 50, 14
TOP, BOTTOM = 12, 44
LETTER, LINE = 7.2, 18  # of the legend; letters of 12 px in the widest usual font
TONES = 8


@dataclass(frozen=True)
class Mark:
    """A point of a chart, with hover text."""

    x: float
    y: float
    tip: str
    visible: bool = True  # False: hover text only


@dataclass(frozen=True)
class Series:
    """A line of a chart, optionally with a band around it and with points that have hover text."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()  # band around `y`
    high: Sequence[float] = ()
    marks: Sequence[Mark] = ()
    tone: int | None = None  # number of the colour; None: position in the chart


@dataclass(frozen=True)
class Chart:
    """A line chart; `alt` describes it for screen readers."""

    alt: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    from_zero: bool = True
    whole_x: bool = False  # ticks at whole numbers only


@dataclass(frozen=True)
class Axis:
    """An axis of a chart with ticks; calling it maps a value linearly to pixels."""

    start: float
    stop: float
    ticks: Sequence[float]

    def __call__(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def draw(chart: Chart) -> str:
    """A line chart as an `<svg>` element, whose colours the page's style sheet sets."""
    tones = [place if series.tone is None else series.tone for place, series in enumerate(chart.series)]
    coloured = [(series, f"t{tone % TONES}") for series, tone in zip(chart.series, tones, strict=True)]
    legend, legend_height = _legend(coloured)
    height = HEIGHT + legend_height
    across: list[float] = []
    upwards: list[float] = []
    for series in chart.series:
        across += series.x
        upwards += [*series.y, *series.low, *series.high]
    x = _axis(across, LEFT, WIDTH - RIGHT, False, chart.whole_x)
    y = _axis(upwards, height - BOTTOM, TOP + legend_height, chart.from_zero, False)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label={quoteattr(chart.alt)} '
        'xmlns="http://www.w3.org/2000/svg">',
        *legend,
        *_frame(x, y, chart),
    ]
    for series, colour in coloured:
        parts += _band(series, x, y, colour)
    for series, colour in coloured:
        parts += _series(series, x, y, colour)
    return "\n".join([*parts, "</svg>"])


def standalone_svg(svg: str) -> str:
    """The content of an SVG file: the `<svg>` element with its style sheet."""
    style = package_text("charts.css")
    head, rest = svg.split(">", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}>\n<style>{escape(style)}</style>{rest}\n'


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """About five round numbers that cover [low, high], 1, 2 or 5 times a power of ten apart."""
    raw = max(high - low, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def coordinate(value: float) -> str:
    """A coordinate as text, with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def package_text(name: str) -> str:
    return files("duplex.report").joinpath(name).read_text(encoding="utf-8")


def _axis(values: Sequence[float], start: float, stop: float, from_zero: bool, whole: bool) -> Axis:
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low = min(finite)
    high = max(finite)
    low = min(low, 0.0) if from_zero else low
    return Axis(start, stop, ticks(low, high if high > low else low + 1, whole=whole))


def _legend(coloured: Sequence[tuple[Series, str]]) -> tuple[list[str], float]:
    out = []
    x = float(LEFT)
    row = 0
    for series, colour in coloured:
        width = 32 + LETTER * len(series.name)
        if x + width > WIDTH - RIGHT and x > LEFT:
            x = float(LEFT)
            row += 1
        y = TOP + 4 + row * LINE
        out.append(f'<path class="line {colour}" d="M{coordinate(x)} {y}h14"/>')
        out.append(f'<text class="ink" x="{coordinate(x + 19)}" y="{y + 4}">{escape(series.name)}</text>')
        x += width
    return out, float((row + 1) * LINE + 4 if coloured else 0)


def _frame(x: Axis, y: Axis, chart: Chart) -> list[str]:
    out = []
    left = coordinate(x.start - 7)
    for tick in y.ticks:
        at = coordinate(y(tick))
        out.append(f'<path class="grid" d="M{coordinate(x.start)} {at}H{coordinate(x.stop)}"/>')
        out.append(f'<text class="tick" x="{left}" y="{coordinate(y(tick) + 4)}" text-anchor="end">{tick:g}</text>')
    for tick in x.ticks:
        at = coordinate(x(tick))
        out.append(f'<path class="axis" d="M{at} {coordinate(y.start)}v4"/>')
        out.append(f'<text class="tick" x="{at}" y="{coordinate(y.start + 17)}" text-anchor="middle">{tick:g}</text>')
    out.append(f'<path class="axis" d="M{coordinate(x.start)} {coordinate(y.start)}H{coordinate(x.stop)}"/>')
    below = f'x="{coordinate((x.start + x.stop) / 2)}" y="{coordinate(y.start + 36)}"'
    beside = f'transform="translate(13 {coordinate((y.start + y.stop) / 2)}) rotate(-90)"'
    for place, label in ((below, chart.x_label), (beside, chart.y_label)):
        out.append(f'<text class="name" {place} text-anchor="middle">{escape(label)}</text>')
    return out


def _path(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float]) -> str:
    points = []
    for a, b in zip(xs, ys, strict=True):
        if math.isfinite(b):
            points.append(f"{coordinate(x(a))} {coordinate(y(b))}")
    return "M" + "L".join(points) if points else ""


def _band(series: Series, x: Axis, y: Axis, colour: str) -> list[str]:
    if not len(series.low):
        return []
    around = _path(x, y, [*series.x, *reversed(series.x)], [*series.high, *reversed(series.low)])
    return [f'<path class="band {colour}" d="{around}Z"/>'] if around else []


def _series(series: Series, x: Axis, y: Axis, colour: str) -> list[str]:
    out = []
    if len(series.x) > 1:
        out.append(f'<path class="line {colour}" d="{_path(x, y, series.x, series.y)}"/>')
    for mark in series.marks:
        place = f'cx="{coordinate(x(mark.x))}" cy="{coordinate(y(mark.y))}" data-tip={quoteattr(mark.tip)}'
        kind = f"dot {colour}" if mark.visible else "hit"
        out.append(f'<circle class="{kind}" {place} r="{3.5 if mark.visible else 7}"/>')
    return out


def render_page(report: Report) -> str:
    """The report as a self-contained HTML page."""
    style = Markup(package_text("page.css") + "\n" + package_text("charts.css"))
    template = _environment().get_template("page.html.j2")
    return template.render(report=report, style=style, script=Markup(package_text("page.js")))


def render_for_notebook(title: str, blocks: Sequence[Block]) -> str:
    """Tables and figures as HTML for a notebook, style sheet included."""
    return _environment().get_template("notebook.html.j2").render(title=title, blocks=blocks)


def write_report(report: Report, folder: Path, figures: Path, numbers: Mapping[str, object] | None = None) -> Path:
    """Write a report and JSON files to `folder`, drawings to `figures`; returns the page's path.

    Both folders are replaced as a whole, because their old files may be links into DVC's cache.
    """
    with replace_folder(folder) as fresh:
        for name, record in (numbers or {}).items():
            write_json(fresh / name, record)
        (fresh / "index.html").write_text(render_page(report), encoding="utf-8")
    with replace_folder(figures) as fresh:
        for figure in report.figures:
            (fresh / f"{figure.name}.svg").write_text(standalone_svg(figure.svg), encoding="utf-8")
    return folder / "index.html"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("duplex.report", ""),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        drawing=lambda figure: Markup(figure.svg),  # `draw` escapes its texts
        data_uri=lambda figure: "data:image/svg+xml;base64," + b64encode(standalone_svg(figure.svg).encode()).decode(),
        groupby_runs=lambda blocks: [(kind, list(run)) for kind, run in groupby(blocks, key=lambda each: each.kind)],
    )
    return environment
