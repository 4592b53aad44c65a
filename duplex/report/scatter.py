"""Maps as SVG: dots for images; a triangle, square or star for each prototype; one hue per class."""

from __future__ import annotations

import math
from xml.sax.saxutils import quoteattr

import pandas as pd

from duplex.report.blocks import Figure
from duplex.report.charts import number
from duplex.report.figures import slug

SIDE, MARGIN, GOLDEN = 440, 16, 137.508  # the golden angle keeps neighbouring hues apart
CAPTIONS = {
    "prototypes": "Test images (○) of the {n} largest classes with their visual (△) and semantic (□) prototypes.",
    "before": "The {n} largest classes before training: test images (○) and first visual prototypes (☆).",
    "after": "The {n} largest classes after training: test images (○) and visual prototypes (☆).",
    "semantic": "Semantic prototypes of the first {n} pairs, coloured by object.",
    "visual": "Visual prototypes of the same pairs, coloured by object.",
    "combined": "Both together, coloured by object.",
}
PLACES = {"semantic": "object", "visual": "object", "combined": "object"}  # meaning of the hue; else the pair


def map_figures(table: pd.DataFrame, data: str, names: tuple[str, ...]) -> list[Figure]:
    """Draw those of the named maps that `maps.csv` has."""
    figures = []
    for name in names:
        rows = table[table["map"] == name]
        if len(rows):
            caption = CAPTIONS[name].format(n=rows["label"].nunique())
            svg = draw_map(rows, PLACES.get(name, "label"), f"t-SNE map of {data}. {caption}")
            figures.append(Figure(slug(data, "map", name), svg, caption, small=True))
    return figures


def draw_map(rows: pd.DataFrame, hue_by: str, alt: str) -> str:
    """Return the SVG: one `<g>` per class with its name as hover text, prototypes above images."""
    rows = rows.assign(px=_scaled(rows["x"]), py=SIDE - _scaled(rows["y"]))
    hues = {name: i * GOLDEN % 360 for i, name in enumerate(sorted(rows[hue_by].unique()))}
    out = [
        f'<svg class="chart map" viewBox="0 0 {SIDE} {SIDE}" role="img" aria-label={quoteattr(alt)} '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for images in (True, False):
        part = rows[(rows["kind"] == "image") == images]
        for label, group in part.groupby("label", sort=True):
            seen = "seen" if int(group["seen"].iloc[0]) else "unseen"
            points = zip(group["kind"], group["px"], group["py"], strict=True)
            if images:  # all dots of a class are one path of round caps
                dots = "".join(f"M{number(x)} {number(y)}h.01" for _, x, y in points)
                shapes = f'<path class="cloud" d="{dots}"/>'
            else:
                shapes = "".join(_marker(*point) for point in points)
            hue = number(hues[group[hue_by].iloc[0]])
            out.append(f'<g style="--hue:{hue}" data-tip={quoteattr(f"{label} ({seen})")}>{shapes}</g>')
    return "\n".join([*out, "</svg>"])


def _scaled(values: pd.Series) -> pd.Series:
    low, high = values.min(), values.max()
    return pd.Series(MARGIN + (values - low) / (high - low if high > low else 1.0) * (SIDE - 2 * MARGIN))


def _marker(kind: str, x: float, y: float) -> str:
    if kind in ("semantic", "combined"):
        size = 9 if kind == "semantic" else 8
        corner = f'x="{number(x - size / 2)}" y="{number(y - size / 2)}"'
        return f'<rect class="proto" {corner} width="{size}" height="{size}"/>'
    corners = _star(x, y) if kind == "star" else [(x, y - 6), (x + 5.5, y + 4.5), (x - 5.5, y + 4.5)]
    return f'<path class="proto" d="M{"L".join(f"{number(a)} {number(b)}" for a, b in corners)}Z"/>'


def _star(x: float, y: float, outer: float = 8.0, inner: float = 3.4) -> list[tuple[float, float]]:
    turns = [(outer if i % 2 == 0 else inner, math.pi * (i / 5 - 0.5)) for i in range(10)]
    return [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in turns]
