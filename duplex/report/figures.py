"""Figures of the report: seen–unseen curves, training curves, results by momentum lambda, and t-SNE maps.

Maps show a dot per image, a triangle, square or star per prototype, and one hue per class.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from xml.sax.saxutils import quoteattr

import numpy as np
import pandas as pd

from duplex.report.aggregate import Tree
from duplex.report.blocks import Figure
from duplex.report.charts import Chart, Mark, Series, draw, number
from duplex.report.results import DatasetResults


def slug(*words: str) -> str:
    """Join words by hyphens to a file name; unsafe characters become `_`."""
    return "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", word) for word in words)


def curve_figure(data: DatasetResults, world: str) -> Figure | None:
    """Plot the seen–unseen curves of all methods in the closed or open world; None if no run has predictions."""
    curves = data.curves[world]
    if not curves:
        return None
    tones, series = tones_of(data), []
    for method, curve in curves.items():
        seen, unseen, low, high = (values.tolist() for values in (curve.seen, curve.unseen, curve.low, curve.high))
        points = list(zip(seen, unseen, strict=True))[::4]
        marks = [Mark(s, u, f"{method}: seen {s:.1f}, unseen {u:.1f}", visible=False) for s, u in points]
        series.append(Series(method, seen, unseen, low, high, marks, tones[method]))
    alt = f"Seen–unseen curves of {data.name}, {world} world: {', '.join(curves)}."
    chart = Chart(alt, "seen accuracy, %", "unseen accuracy, %", series)
    caption = (
        f"{world.capitalize()} world. Each point is one bias on the unseen scores; the area below is AUC. "
        "Lines: mean over seeds. Bands: 95 % of resampled test sets."
    )
    return Figure(slug(data.name, "curve", world), draw(chart), caption)


def tones_of(data: DatasetResults) -> dict[str, int]:
    """Return method name -> number of its colour, the same in all figures of a data set.

    The names under which the report shows methods (option `shown_as`) are keys, too.
    """
    tones = {method: tone for tone, method in enumerate(data.runs)}
    return {data.shown_as.get(method, method): tone for method, tone in tones.items()} | tones


def training_figures(data: DatasetResults) -> list[Figure]:
    """Plot validation AUC and the sum of losses by epoch, for the methods that train; empty if none does."""
    figures, legend = [], "Lines: mean over seeds. Bands: lowest to highest seed."
    for title, label, value, caption in (
        ("validation AUC", "validation AUC, %", lambda history: 100 * history["val_auc"], "Validation AUC by epoch."),
        ("training loss", "sum of losses", _total_loss, "Training loss, all terms."),
    ):
        series = _by_epoch(data, value)
        if not series:
            return []
        alt = f"{title[0].upper()}{title[1:]} by epoch on {data.name}: {', '.join(line.name for line in series)}."
        drawing = draw(Chart(alt, "epoch", label, series, whole_x=True))
        figures.append(Figure(slug(data.name, title), drawing, f"{caption} {legend}"))
    return figures


def _by_epoch(data: DatasetResults, value: Callable[[pd.DataFrame], pd.Series]) -> list[Series]:
    """Return a line of a chart by epoch for each method that trains, averaged over seeds.

    value: function from a training history (a table) to one number per epoch.
    """
    lines, tones = [], tones_of(data)
    for method, runs in data.runs.items():
        seeds = [run.history for run in runs.values() if run.history is not None and len(run.history) > 1]
        if not seeds:
            continue
        length = min(map(len, seeds))
        x = [float(e) for e in seeds[0]["epoch"][:length]]
        table = np.stack([value(history).to_numpy(dtype=float)[:length] for history in seeds])  # [seeds, epochs]
        known = ~np.isnan(table).any(axis=0)
        x, table = [e for e, k in zip(x, known, strict=True) if k], table[:, known]
        y = table.mean(axis=0)
        marks = [Mark(a, b, f"{method}, epoch {a:g}: {b:.2f}", len(x) <= 25) for a, b in zip(x, y, strict=True)]
        lines.append(Series(method, x, y, table.min(axis=0), table.max(axis=0), marks, tones[method]))
    return lines


def _total_loss(history: pd.DataFrame) -> pd.Series:
    terms = [column for column in history.columns if column.startswith("loss")]
    return pd.Series(history[terms].apply(pd.to_numeric, errors="coerce").sum(axis=1, min_count=1))


def lambda_figures(data: DatasetResults, places: Sequence[Tree]) -> list[Figure]:
    """Plot AUC and HM of ablations against lambda, the momentum of the prototypes' updates, with standard errors.

    places: a mapping per ablation, with its lambda as `value` and its name as `run`.
    """
    runs = data.ablations
    points = [(row["value"], row["run"]) for row in places if "closed" in runs.get(row["run"], {})]
    figures = []
    for metric, label in (("auc", "AUC"), ("hm", "HM")):
        rows = [(x, runs[name]["closed"]) for x, name in points if metric in runs[name]["closed"]]
        if len(rows) < 2:
            continue
        x = [place for place, _ in rows]
        y = [row[metric] for _, row in rows]
        error = [row.get(f"{metric}_se", 0.0) for _, row in rows]
        marks = [Mark(a, b, f"λ = {a:g}: {label} {b:.2f} ± {e:.2f}") for a, b, e in zip(x, y, error, strict=True)]
        low, high = ([b + sign * e for b, e in zip(y, error, strict=True)] for sign in (-1, 1))
        line = Series(label, x, y, low, high, marks)
        alt = f"{label} against the momentum λ on {data.name}, closed world."
        chart = Chart(alt, "λ", f"{label}, %", [line], from_zero=False)
        figures.append(Figure(slug(data.name, "lambda", metric), draw(chart), f"{label} by λ; band: standard error."))
    return figures


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
    figures = []
    for name in names:
        rows = table[table["map"] == name]
        if len(rows):
            caption = CAPTIONS[name].format(n=rows["label"].nunique())
            svg = draw_map(rows, PLACES.get(name, "label"), f"t-SNE map of {data}. {caption}")
            figures.append(Figure(slug(data, "map", name), svg, caption, small=True))
    return figures


def draw_map(rows: pd.DataFrame, hue_by: str, alt: str) -> str:
    """Return a t-SNE map as SVG: one `<g>` per label, with the label as hover text; prototypes are drawn above images.

    rows: table of points.
    hue_by: column of `rows` whose values are told apart by colour.
    alt: text for screen readers.
    """
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
    corners = [(x, y - 6), (x + 5.5, y + 4.5), (x - 5.5, y + 4.5)]
    if kind == "star":
        turns = [(8.0 if i % 2 == 0 else 3.4, math.pi * (i / 5 - 0.5)) for i in range(10)]  # radius, angle
        corners = [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in turns]
    return f'<path class="proto" d="M{"L".join(f"{number(a)} {number(b)}" for a, b in corners)}Z"/>'
