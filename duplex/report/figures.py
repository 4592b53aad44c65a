"""The report's figures: seen-unseen curves, training curves, the sensitivity to lambda."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from duplex.report.blocks import Figure
from duplex.report.charts import Chart, Mark, Series, draw
from duplex.report.curves import MeanCurve
from duplex.report.numbers import Tree
from duplex.report.results import DatasetResults


def slug(*words: str) -> str:
    """A file name of some words."""
    return "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", word) for word in words)


def curve_figure(data: DatasetResults, world: str) -> Figure | None:
    """Seen against unseen accuracy as the bias on unseen scores moves."""
    curves = data.curves[world]
    if not curves:
        return None
    tones = tones_of(data)
    series = [
        Series(m, c.seen.tolist(), c.unseen.tolist(), c.low.tolist(), c.high.tolist(), _steps(m, c), tones[m])
        for m, c in curves.items()
    ]
    what = f"seen–unseen curves of {data.name}, {world} world"
    chart = Chart(_sentence(f"{what}: {', '.join(curves)}"), "seen accuracy, %", "unseen accuracy, %", series)
    caption = (
        f"{world.capitalize()} world. Each point is one bias on the unseen scores; the area below is AUC. "
        "Lines: mean over seeds. Bands: 95 % of resampled test sets."
    )
    return Figure(slug(data.name, "curve", world), draw(chart), caption)


def _steps(method: str, curve: MeanCurve) -> list[Mark]:
    places = range(0, len(curve.seen), 4)
    return [
        Mark(curve.seen[i], curve.unseen[i], f"{method}: seen {curve.seen[i]:.1f}, unseen {curve.unseen[i]:.1f}", False)
        for i in places
    ]


def tones_of(data: DatasetResults) -> dict[str, int]:
    """Each method keeps its colour in all figures of a data set, and a row gives its own to the name it is shown as."""
    tones = {method: tone for tone, method in enumerate(data.runs)}
    return {data.shown_as.get(method, method): tone for method, tone in tones.items()} | tones


def training_figures(data: DatasetResults) -> list[Figure]:
    """Validation AUC and summed loss by epoch; methods that train nothing have no curve."""
    histories = {
        method: [run.history for run in runs.values() if run.history is not None and len(run.history) > 1]
        for method, runs in data.runs.items()
    }
    histories = {method: found for method, found in histories.items() if found}
    if not histories:
        return []
    auc = {method: [100 * h["val_auc"].rename(None) for h in found] for method, found in histories.items()}
    loss = {method: [_total_loss(h) for h in found] for method, found in histories.items()}
    epochs = {method: [h["epoch"] for h in found] for method, found in histories.items()}
    seeds = "Lines: mean over seeds. Bands: lowest to highest seed."
    return [
        _by_epoch(data, "validation AUC", "validation AUC, %", auc, epochs, f"Validation AUC by epoch. {seeds}"),
        _by_epoch(data, "training loss", "sum of losses", loss, epochs, f"Training loss, all terms. {seeds}"),
    ]


def _by_epoch(
    data: DatasetResults,
    what: str,
    label: str,
    values: Mapping[str, Sequence[pd.Series]],
    epochs: Mapping[str, Sequence[pd.Series]],
    caption: str,
) -> Figure:
    series, tones = [], tones_of(data)
    for method, columns in values.items():
        length = min(len(column) for column in columns)
        x = [float(e) for e in epochs[method][0][:length]]
        table = np.stack([column.to_numpy(dtype=float)[:length] for column in columns])  # [seeds, epochs]
        known = ~np.isnan(table).any(axis=0)
        x, table = [e for e, k in zip(x, known, strict=True) if k], table[:, known]
        y = table.mean(axis=0)
        marks = [Mark(a, b, f"{method}, epoch {a:g}: {b:.2f}", len(x) <= 25) for a, b in zip(x, y, strict=True)]
        series.append(Series(method, x, y, table.min(axis=0), table.max(axis=0), marks, tones[method]))
    chart = Chart(
        _sentence(f"{what} by epoch on {data.name}: {', '.join(values)}"), "epoch", label, series, whole_x=True
    )
    return Figure(slug(data.name, what), draw(chart), caption)


def _total_loss(history: pd.DataFrame) -> pd.Series:
    terms = [column for column in history.columns if column.startswith("loss")]
    found: pd.Series = history[terms].apply(pd.to_numeric, errors="coerce").sum(axis=1, min_count=1)
    return found


def lambda_figures(data: DatasetResults, places: Sequence[Tree]) -> list[Figure]:
    """AUC and HM against lambda with the standard error over seeds; `places`: which ablation ran with which value."""
    found = data.ablations
    points = [(row["value"], row["run"]) for row in places if "closed" in found.get(row["run"], {})]
    figures = []
    for metric, label in (("auc", "AUC"), ("hm", "HM")):
        rows = [(x, found[name]["closed"]) for x, name in points if metric in found[name]["closed"]]
        if len(rows) < 2:
            continue
        x = [place for place, _ in rows]
        y = [row[metric] for _, row in rows]
        error = [row.get(f"{metric}_se", 0.0) for _, row in rows]
        marks = [Mark(a, b, f"λ = {a:g}: {label} {b:.2f} ± {e:.2f}") for a, b, e in zip(x, y, error, strict=True)]
        low, high = ([b + sign * e for b, e in zip(y, error, strict=True)] for sign in (-1, 1))
        line = Series(label, x, y, low, high, marks)
        alt = _sentence(f"{label} against the momentum λ on {data.name}, closed world")
        chart = Chart(alt, "λ", f"{label}, %", [line], from_zero=False)
        figures.append(Figure(slug(data.name, "lambda", metric), draw(chart), f"{label} by λ; band: standard error."))
    return figures


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
