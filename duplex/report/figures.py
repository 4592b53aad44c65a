"""Figures of the report: seen–unseen curves, training curves, results by lambda, t-SNE maps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import quoteattr

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from duplex.errors import UsageError, install_command
from duplex.labels import Ints, LabelSpace
from duplex.report.aggregate import DatasetResults, Tree
from duplex.report.blocks import Chart, Figure, Mark, Series, coordinate, draw

SIDE, MARGIN = 440, 16  # of a map
GOLDEN = 137.508  # degrees; the golden angle keeps neighbouring hues apart
CLASSES_SHOWN, PAIRS_SHOWN = "The {n} largest classes", "The first {n} pairs, coloured by object"
TITLES = {
    "prototypes": f"{CLASSES_SHOWN} after training",
    "before": f"{CLASSES_SHOWN} before training",
    "after": f"{CLASSES_SHOWN} after training",
    "semantic": PAIRS_SHOWN,
    "visual": PAIRS_SHOWN,
    "combined": PAIRS_SHOWN,
}
SYMBOL_NAMES = {  # kind of point -> how a caption names it
    "image": "test images (○)",
    "semantic": "semantic prototypes (□)",
    "visual": "visual prototypes (△)",
    "star": "visual prototypes (☆)",
    "combined": "each pair's semantic and visual prototype as one vector (□)",
}
PLACES = dict.fromkeys(("semantic", "visual", "combined"), "object")  # of the hue; else the pair
CLASSES, IMAGES = 20, 40  # compositions of a map with images, and images of each
PROTOTYPES = 300  # compositions of a map of prototypes
COLUMNS = ["map", "kind", "label", "object", "seen", "x", "y"]
EARLY, STEPS = 150, 350  # of the optimisation, with and after exaggeration
Array = NDArray[np.float32]
Tick = Callable[[int], None]
Prototypes = Callable[[Ints], Array]  # compositions [C] -> [C, d]


def slug(*words: str) -> str:
    """Join words to a file name, by hyphens; unsafe characters become `_`."""
    return "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", word) for word in words)


def curve_figure(data: DatasetResults, world: str) -> Figure | None:
    """All methods' seen–unseen curves in one world; None without predictions for it."""
    curves = data.curves[world]
    if not curves:
        return None
    tones = tones_of(data)
    series = []
    for method, curve in curves.items():
        seen, unseen = curve.seen.tolist(), curve.unseen.tolist()
        points = list(zip(seen, unseen, strict=True))[::4]
        marks = [Mark(s, u, f"{method}: seen {s:.1f}, unseen {u:.1f}", visible=False) for s, u in points]
        series.append(Series(method, seen, unseen, curve.low.tolist(), curve.high.tolist(), marks, tones[method]))
    alt = f"Seen–unseen curves of {data.name}, {world} world: {', '.join(curves)}."
    chart = Chart(alt, "seen accuracy, %", "unseen accuracy, %", series)
    caption = (
        f"{world.capitalize()} world. Each point is one bias on the unseen scores; the area below is AUC. "
        "Lines: mean over seeds. Bands: 95 % of resampled test sets."
    )
    return Figure(slug(data.name, "curve", world), draw(chart), caption)


def tones_of(data: DatasetResults) -> dict[str, int]:
    """Method, by its own name and by that in figures -> number of its colour."""
    tones = {method: tone for tone, method in enumerate(data.runs)}
    return {data.shown_as.get(method, method): tone for method, tone in tones.items()} | tones


def training_figures(data: DatasetResults) -> list[Figure]:
    """Validation AUC and total loss by epoch, of methods that train; empty if none does."""
    legend = "Lines: mean over seeds. Bands: lowest to highest seed."
    figures = []
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
    tones = tones_of(data)
    lines = []
    for method, runs in data.runs.items():
        seeds = [run.history for run in runs.values() if run.history is not None and len(run.history) > 1]
        if not seeds:
            continue
        length = min(map(len, seeds))
        values = [value(history).to_numpy(dtype=float)[:length] for history in seeds]
        table = np.stack(values)  # [seeds, epochs]
        known = ~np.isnan(table).any(axis=0)
        x = seeds[0]["epoch"].to_numpy(dtype=float)[:length][known].tolist()
        table = table[:, known]
        y = table.mean(axis=0)
        marks = [Mark(a, b, f"{method}, epoch {a:g}: {b:.2f}", len(x) <= 25) for a, b in zip(x, y, strict=True)]
        lines.append(Series(method, x, y, table.min(axis=0), table.max(axis=0), marks, tones[method]))
    return lines


def _total_loss(history: pd.DataFrame) -> pd.Series:
    terms = [column for column in history.columns if column.startswith("loss")]
    return pd.Series(history[terms].apply(pd.to_numeric, errors="coerce").sum(axis=1, min_count=1))


def lambda_figures(data: DatasetResults, places: Sequence[Tree]) -> list[Figure]:
    """AUC and HM by lambda, the prototypes' momentum; `places`: ablations and lambdas."""
    runs = data.ablations
    points = [(row["value"], row["run"]) for row in places if "closed" in runs.get(row["run"], {})]
    figures = []
    for metric, label in (("auc", "AUC"), ("hm", "HM")):
        rows = [(x, runs[name]["closed"]) for x, name in points if metric in runs[name]["closed"]]
        if len(rows) < 2:
            continue
        x = [place for place, _ in rows]
        y = np.array([row[metric] for _, row in rows])
        error = np.array([row.get(f"{metric}_se", 0.0) for _, row in rows])
        marks = [Mark(a, b, f"λ = {a:g}: {label} {b:.2f} ± {e:.2f}") for a, b, e in zip(x, y, error, strict=True)]
        line = Series(label, x, y.tolist(), (y - error).tolist(), (y + error).tolist(), marks)
        alt = f"{label} against the momentum λ on {data.name}, closed world."
        chart = Chart(alt, "λ", f"{label}, %", [line], from_zero=False)
        figures.append(Figure(slug(data.name, "lambda", metric), draw(chart), f"{label} by λ; band: standard error."))
    return figures


@dataclass(frozen=True)
class Scene:
    """Points of t-SNE maps: test images and prototypes, before and after training."""

    labels: LabelSpace
    compositions: Ints  # [n] compositions of the test images
    encoded: Array  # [n, d] unit features of the encoder
    trained: Array  # [n, d] features of the trained method
    semantic: Prototypes | None  # t^c
    visual: Prototypes | None  # h
    start: Prototypes | None  # h before training


def map_count(scene: Scene) -> int:
    """Number of maps of a scene, which depends on the method's kinds of prototypes."""
    return sum(1 for _ in _plans(scene))


def compute_tsne_maps(scene: Scene, tick: Tick) -> pd.DataFrame:
    """Table with a row per point; `tick` is called with the number of finished steps."""
    tables = []
    done = 0
    for name, parts in _plans(scene):
        kinds, points, vectors = zip(*map(_without_empty, parts), strict=True)
        compositions = np.concatenate(points)
        x, y = _tsne(np.concatenate(vectors), tick, done).T
        objects = [scene.labels.objects[n] for n in scene.labels.object_of(compositions).tolist()]
        columns = {
            "map": name,
            "kind": np.repeat(kinds, list(map(len, points))),
            "label": scene.labels.names(compositions),
            "object": objects,
            "seen": scene.labels.seen[compositions].astype(int),
            "x": x,
            "y": y,
        }
        tables.append(pd.DataFrame(columns))
        done += EARLY + STEPS
    return pd.concat(tables, ignore_index=True)[COLUMNS]


def _without_empty(part: tuple[str, Ints, Array]) -> tuple[str, Ints, Array]:
    """The points of a map, without prototypes that no batch has composed: they are zero vectors."""
    kind, compositions, vectors = part
    composed = vectors.any(axis=1)
    return kind, compositions[composed], vectors[composed]


def _plans(scene: Scene) -> Iterator[tuple[str, list[tuple[str, Ints, Array]]]]:
    largest, rows = largest_compositions(scene.compositions)
    if scene.visual is not None:
        parts = [("image", scene.compositions[rows], scene.trained[rows])]
        parts += [("semantic", largest, scene.semantic(largest))] if scene.semantic is not None else []
        parts += [("visual", largest, scene.visual(largest))]
        yield "prototypes", parts
    for name, features, book in (("before", scene.encoded, scene.start), ("after", scene.trained, scene.visual)):
        stars = [] if book is None else [("star", largest, book(largest))]
        yield name, [("image", scene.compositions[rows], features[rows]), *stars]
    first = scene.labels.candidates("closed", "test")[:PROTOTYPES]
    kinds = {"semantic": scene.semantic, "visual": scene.visual}
    prototypes = {name: rows(first) for name, rows in kinds.items() if rows is not None}
    for name, vectors in prototypes.items():
        yield name, [(name, first, vectors)]
    if len(prototypes) == len(kinds):
        yield "combined", [("combined", first, np.concatenate(list(prototypes.values()), axis=1))]


def largest_compositions(compositions: Ints) -> tuple[Ints, Ints]:
    """The 20 largest compositions, and indices of up to 40 evenly spaced images of each."""
    names, counts = np.unique(compositions, return_counts=True)
    largest = np.sort(names[np.argsort(-counts, kind="stable")[:CLASSES]])
    picked = []
    for composition in largest:
        rows = np.flatnonzero(compositions == composition)
        places = np.linspace(0, len(rows) - 1, min(IMAGES, len(rows))).astype(np.int64)
        picked.append(rows[np.unique(places)])
    return largest, np.concatenate(picked) if picked else np.empty(0, dtype=np.int64)


def _tsne(vectors: Array, tick: Tick, done: int) -> NDArray[np.float64]:
    if len(vectors) < 5:  # too few for neighbourhoods: use the first two coordinates
        tick(done + EARLY + STEPS)
        return np.asarray(vectors[:, :2], dtype=np.float64)
    try:
        import openTSNE
    except ImportError as error:
        raise UsageError(f"the maps need openTSNE; run {install_command('pipeline')}") from error

    fit = openTSNE.TSNE(
        perplexity=min(30.0, (len(vectors) - 1) / 4),
        metric="cosine",
        initialization="pca",
        neighbors="exact",
        negative_gradient_method="bh",
        early_exaggeration_iter=EARLY,
        n_iter=STEPS,
        n_jobs=1,
        random_state=0,
        callbacks=lambda iteration, error, embedding: tick(done + iteration),
        callbacks_every_iters=25,
    ).fit(np.asarray(vectors, dtype=np.float64))
    tick(done + EARLY + STEPS)
    return np.asarray(fit)


def map_figures(table: pd.DataFrame, data: str) -> list[Figure]:
    """One figure with a caption for each map of `compute_tsne_maps`."""
    figures = []
    for name, title in TITLES.items():
        rows = table[table["map"] == name]
        if len(rows):
            drawn = [text for kind, text in SYMBOL_NAMES.items() if (rows["kind"] == kind).any()]
            caption = f"{title.format(n=rows['label'].nunique())}: {', '.join(drawn)}."
            svg = draw_map(rows, PLACES.get(name, "label"), f"t-SNE map of {data}. {caption}")
            figures.append(Figure(slug(data, "map", name), svg, caption, small=True))
    return figures


def draw_map(rows: pd.DataFrame, hue_by: str, alt: str) -> str:
    """Draw a map as SVG, prototypes on top of images; column `hue_by` sets the hues."""
    rows = rows.assign(px=_scaled(rows["x"]), py=SIDE - _scaled(rows["y"]))
    hues = {name: i * GOLDEN % 360 for i, name in enumerate(sorted(rows[hue_by].unique()))}
    out = [
        f'<svg class="chart map" viewBox="0 0 {SIDE} {SIDE}" role="img" aria-label={quoteattr(alt)} '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for images in (True, False):
        for label, group in rows[(rows["kind"] == "image") == images].groupby("label", sort=True):
            seen = "seen" if int(group["seen"].iloc[0]) else "unseen"
            points = zip(group["kind"], group["px"], group["py"], strict=True)
            if images:  # all dots of a class are one path of round caps
                dots = "".join(f"M{coordinate(x)} {coordinate(y)}h.01" for _, x, y in points)
                shapes = f'<path class="cloud" d="{dots}"/>'
            else:
                shapes = "".join(_marker(*point) for point in points)
            hue = coordinate(hues[group[hue_by].iloc[0]])
            out.append(f'<g style="--hue:{hue}" data-tip={quoteattr(f"{label} ({seen})")}>{shapes}</g>')
    return "\n".join([*out, "</svg>"])


def _scaled(values: pd.Series) -> pd.Series:
    low, high = values.min(), values.max()
    extent = high - low if high > low else 1.0
    return pd.Series(MARGIN + (values - low) / extent * (SIDE - 2 * MARGIN))


def _marker(kind: str, x: float, y: float) -> str:
    if kind in ("semantic", "combined"):
        size = 9 if kind == "semantic" else 8
        corner = f'x="{coordinate(x - size / 2)}" y="{coordinate(y - size / 2)}"'
        return f'<rect class="proto" {corner} width="{size}" height="{size}"/>'
    corners = [(x, y - 6), (x + 5.5, y + 4.5), (x - 5.5, y + 4.5)]
    if kind == "star":
        angles = [math.pi * (i / 5 - 0.5) for i in range(10)]
        radii = [8.0, 3.4] * 5
        turns = list(zip(radii, angles, strict=True))
        corners = [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in turns]
    outline = "L".join(f"{coordinate(a)} {coordinate(b)}" for a, b in corners)
    return f'<path class="proto" d="M{outline}Z"/>'
