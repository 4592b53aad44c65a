"""Line charts as small SVG drawings with hover text.

Colours are CSS classes (`charts.css`), so that one drawing fits light pages, dark pages and print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 44
LETTER, LINE = 7.2, 18  # widths for the layout of the legend; letters of 12 px in the widest usual font
TONES = 8


@dataclass(frozen=True)
class Mark:
    """Point of a chart with hover text."""

    x: float
    y: float
    tip: str
    visible: bool = True  # False: hover text only


@dataclass(frozen=True)
class Series:
    """Line of a chart, with an optional band around it and points with hover text."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()  # band around `y`
    high: Sequence[float] = ()
    marks: Sequence[Mark] = ()
    tone: int | None = None  # number of the colour; None: position in the chart


@dataclass(frozen=True)
class Chart:
    """Line chart; `alt` is its text for screen readers."""

    alt: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    from_zero: bool = True
    whole_x: bool = False  # ticks at whole numbers only


@dataclass(frozen=True)
class Axis:
    """Axis of a chart: a linear map from data to pixels, with ticks."""

    start: float
    stop: float
    ticks: Sequence[float]

    def __call__(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def draw(chart: Chart) -> str:
    """Return a line chart as an `<svg>` element for an HTML page, whose style sheet sets the colours."""
    tones = [place if series.tone is None else series.tone for place, series in enumerate(chart.series)]
    coloured = [(series, f"t{tone % TONES}") for series, tone in zip(chart.series, tones, strict=True)]
    legend, legend_height = _legend(coloured)
    height = HEIGHT + legend_height
    x = _axis([v for s in chart.series for v in s.x], LEFT, WIDTH - RIGHT, False, chart.whole_x)
    spread = [v for s in chart.series for v in (*s.y, *s.low, *s.high)]
    y = _axis(spread, height - BOTTOM, TOP + legend_height, chart.from_zero, False)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label={quoteattr(chart.alt)} '
        'xmlns="http://www.w3.org/2000/svg">',
        *legend,
        *_frame(x, y, chart),
        *(part for series, colour in coloured for part in _band(series, x, y, colour)),
        *(part for series, colour in coloured for part in _series(series, x, y, colour)),
        "</svg>",
    ]
    return "\n".join(parts)


def standalone_svg(svg: str) -> str:
    """Return an `<svg>` element as the content of an SVG file, with the style sheet that sets its colours."""
    style = files("duplex.report").joinpath("charts.css").read_text(encoding="utf-8")
    head, rest = svg.split(">", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}>\n<style>{escape(style)}</style>{rest}\n'


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return about five round numbers that cover [low, high], in steps of 1, 2 or 5 times a power of ten.

    whole: whether steps are at least 1.
    """
    raw = max(high - low, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Format a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def _axis(values: Sequence[float], start: float, stop: float, from_zero: bool, whole: bool) -> Axis:
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    low = min(low, 0.0) if from_zero else low
    marks = ticks(low, high if high > low else low + 1, whole=whole)
    return Axis(start, stop, marks)


def _legend(coloured: Sequence[tuple[Series, str]]) -> tuple[list[str], float]:
    """Return the SVG elements of a chart's legend, and its height in pixels.

    coloured: the chart's lines with the CSS classes of their colours.
    """
    out, x, row = [], float(LEFT), 0
    for series, colour in coloured:
        width = 32 + LETTER * len(series.name)
        if x + width > WIDTH - RIGHT and x > LEFT:
            x, row = float(LEFT), row + 1
        y = TOP + 4 + row * LINE
        out.append(f'<path class="line {colour}" d="M{number(x)} {y}h14"/>')
        out.append(f'<text class="ink" x="{number(x + 19)}" y="{y + 4}">{escape(series.name)}</text>')
        x += width
    return out, float((row + 1) * LINE + 4 if coloured else 0)


def _frame(x: Axis, y: Axis, chart: Chart) -> list[str]:
    out = []
    left = number(x.start - 7)
    for tick in y.ticks:
        at = number(y(tick))
        out.append(f'<path class="grid" d="M{number(x.start)} {at}H{number(x.stop)}"/>')
        out.append(f'<text class="tick" x="{left}" y="{number(y(tick) + 4)}" text-anchor="end">{tick:g}</text>')
    for tick in x.ticks:
        at = number(x(tick))
        out.append(f'<path class="axis" d="M{at} {number(y.start)}v4"/>')
        out.append(f'<text class="tick" x="{at}" y="{number(y.start + 17)}" text-anchor="middle">{tick:g}</text>')
    out.append(f'<path class="axis" d="M{number(x.start)} {number(y.start)}H{number(x.stop)}"/>')
    below = f'x="{number((x.start + x.stop) / 2)}" y="{number(y.start + 36)}"'
    beside = f'transform="translate(13 {number((y.start + y.stop) / 2)}) rotate(-90)"'
    for place, label in ((below, chart.x_label), (beside, chart.y_label)):
        out.append(f'<text class="name" {place} text-anchor="middle">{escape(label)}</text>')
    return out


def _path(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float]) -> str:
    points = [f"{number(x(a))} {number(y(b))}" for a, b in zip(xs, ys, strict=True) if math.isfinite(b)]
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
        place = f'cx="{number(x(mark.x))}" cy="{number(y(mark.y))}" data-tip={quoteattr(mark.tip)}'
        kind = f"dot {colour}" if mark.visible else "hit"
        out.append(f'<circle class="{kind}" {place} r="{3.5 if mark.visible else 7}"/>')
    return out
