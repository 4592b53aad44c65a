"""Figures of the report: seen–unseen curves, training curves, sensitivity to lambda."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from duplex.report.aggregate import Tree
from duplex.report.blocks import Figure
from duplex.report.charts import Chart, Mark, Series, draw
from duplex.report.curves import MeanCurve
from duplex.report.results import DatasetResults


def slug(*words: str) -> str:
    """Join words to a file name."""
    return "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", word) for word in words)


def curve_figure(data: DatasetResults, world: str) -> Figure | None:
    """Plot seen against unseen accuracy over all biases; None without predictions."""
    curves = data.curves[world]
    if not curves:
        return None
    tones = tones_of(data)
    series = [
        Series(m, c.seen.tolist(), c.unseen.tolist(), c.low.tolist(), c.high.tolist(), _steps(m, c), tones[m])
        for m, c in curves.items()
    ]
    alt = f"Seen–unseen curves of {data.name}, {world} world: {', '.join(curves)}."
    chart = Chart(alt, "seen accuracy, %", "unseen accuracy, %", series)
    caption = (
        f"{world.capitalize()} world. Each point is one bias on the unseen scores; the area below is AUC. "
        "Lines: mean over seeds. Bands: 95 % of resampled test sets."
    )
    return Figure(slug(data.name, "curve", world), draw(chart), caption)


def _steps(method: str, curve: MeanCurve) -> list[Mark]:
    points = list(zip(curve.seen, curve.unseen, strict=True))[::4]
    return [Mark(s, u, f"{method}: seen {s:.1f}, unseen {u:.1f}", visible=False) for s, u in points]


def tones_of(data: DatasetResults) -> dict[str, int]:
    """Return the colour number of each method, and of the method that it is shown as, for all figures."""
    tones = {method: tone for tone, method in enumerate(data.runs)}
    return {data.shown_as.get(method, method): tone for method, tone in tones.items()} | tones


def training_figures(data: DatasetResults) -> list[Figure]:
    """Plot validation AUC and summed loss by epoch, for methods that train."""
    histories = {
        method: [run.history for run in runs.values() if run.history is not None and len(run.history) > 1]
        for method, runs in data.runs.items()
    }
    histories = {method: seeds for method, seeds in histories.items() if seeds}
    if not histories:
        return []
    return [
        _by_epoch(data, histories, "validation AUC", "validation AUC, %", _auc, "Validation AUC by epoch."),
        _by_epoch(data, histories, "training loss", "sum of losses", _total_loss, "Training loss, all terms."),
    ]


def _by_epoch(
    data: DatasetResults,
    histories: Mapping[str, Sequence[pd.DataFrame]],
    title: str,
    label: str,
    value: Callable[[pd.DataFrame], pd.Series],
    caption: str,
) -> Figure:
    series, tones = [], tones_of(data)
    for method, seeds in histories.items():
        length = min(map(len, seeds))
        x = [float(e) for e in seeds[0]["epoch"][:length]]
        table = np.stack([value(history).to_numpy(dtype=float)[:length] for history in seeds])  # [seeds, epochs]
        known = ~np.isnan(table).any(axis=0)
        x, table = [e for e, k in zip(x, known, strict=True) if k], table[:, known]
        y = table.mean(axis=0)
        marks = [Mark(a, b, f"{method}, epoch {a:g}: {b:.2f}", len(x) <= 25) for a, b in zip(x, y, strict=True)]
        series.append(Series(method, x, y, table.min(axis=0), table.max(axis=0), marks, tones[method]))
    alt = f"{title[0].upper()}{title[1:]} by epoch on {data.name}: {', '.join(histories)}."
    drawing = draw(Chart(alt, "epoch", label, series, whole_x=True))
    legend = "Lines: mean over seeds. Bands: lowest to highest seed."
    return Figure(slug(data.name, title), drawing, f"{caption} {legend}")


def _auc(history: pd.DataFrame) -> pd.Series:
    return 100 * history["val_auc"]


def _total_loss(history: pd.DataFrame) -> pd.Series:
    terms = [column for column in history.columns if column.startswith("loss")]
    return pd.Series(history[terms].apply(pd.to_numeric, errors="coerce").sum(axis=1, min_count=1))


def lambda_figures(data: DatasetResults, places: Sequence[Tree]) -> list[Figure]:
    """Plot AUC and HM against lambda with the standard error over seeds; `places`: lambda of each ablation run."""
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
