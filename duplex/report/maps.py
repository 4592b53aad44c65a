"""Compute two-dimensional t-SNE maps of images and prototypes, as in the Duplex paper's figures.

The map `prototypes` shows test images with semantic prototypes (from prompts) and visual prototypes (from images);
`before` and `after` show test images with the visual prototypes before and after training; `semantic`, `visual` and
`combined` show prototypes only, coloured by object. Maps with images show the compositions with the most test images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from duplex.errors import UsageError, install_command
from duplex.labels import Ints, LabelSpace

CLASSES, IMAGES, PROTOTYPES = 20, 40, 300  # largest classes, images of each, pairs of prototype maps
COLUMNS = ["map", "kind", "label", "object", "seen", "x", "y"]
EARLY, STEPS, EVERY = 150, 350, 25
Array = NDArray[np.float32]
Tick = Callable[[int], None]
Prototypes = Callable[[Ints], Array]  # compositions [C] -> [C, d]


@dataclass(frozen=True)
class Scene:
    """Test images and prototypes of a trained method, from which t-SNE maps are computed."""

    labels: LabelSpace
    compositions: Ints  # [n] compositions of the test images
    encoded: Array  # [n, d] unit features of the encoder
    trained: Array  # [n, d] features of the trained method
    semantic: Prototypes | None  # t^c
    visual: Prototypes | None  # h
    start: Prototypes | None  # h before training


def map_count(scene: Scene) -> int:
    """Return the number of t-SNE maps that `compute_maps` returns; it depends on the prototypes that the method has."""
    return sum(1 for _ in _plans(scene))


def compute_maps(scene: Scene, tick: Tick) -> pd.DataFrame:
    """Compute the t-SNE maps of a run's test images and prototypes; return one table with a row per point of each map.

    tick: callback for progress, called with the number of finished optimisation steps over all maps; each of the
        `map_count(scene)` maps takes `EARLY + STEPS` steps.
    """
    tables, done = [], 0
    for name, parts in _plans(scene):
        kinds, points, vectors = zip(*parts, strict=True)
        compositions = np.concatenate(points)
        x, y = _tsne(np.concatenate(vectors), tick, done).T
        objects = [scene.labels.objects[n] for n in scene.labels.object_of(compositions).tolist()]
        columns = {"map": name, "kind": np.repeat(kinds, list(map(len, points))), "object": objects, "x": x, "y": y}
        seen = scene.labels.seen[compositions].astype(int)
        tables.append(pd.DataFrame({**columns, "label": scene.labels.names(compositions), "seen": seen}))
        done += EARLY + STEPS
    return pd.concat(tables, ignore_index=True)[COLUMNS]


def _plans(scene: Scene) -> Iterator[tuple[str, list[tuple[str, Ints, Array]]]]:
    """Yield each t-SNE map's name and groups of points (kind, compositions [r], vectors to map [r, d]).

    The kind chooses a point's symbol: `image`, or a kind of prototype such as `semantic`.
    """
    largest, rows = largest_classes(scene.compositions)
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


def largest_classes(compositions: Ints) -> tuple[Ints, Ints]:
    """Return the compositions with the most test images, and the indices of the images to show in maps.

    Of each composition up to 40 images are shown, evenly spaced.

    compositions: composition of each test image [n].
    """
    names, counts = np.unique(compositions, return_counts=True)
    largest = np.sort(names[np.argsort(-counts, kind="stable")[:CLASSES]])
    picked = []
    for composition in largest:
        rows = np.flatnonzero(compositions == composition)
        picked.append(rows[np.unique(np.linspace(0, len(rows) - 1, min(IMAGES, len(rows))).astype(np.int64))])
    return largest, np.concatenate(picked) if picked else np.empty(0, dtype=np.int64)


def _tsne(vectors: Array, tick: Tick, done: int) -> NDArray[np.float64]:
    """Compute a repeatable t-SNE map [r, 2] of vectors [r, d], started from principal components, on one thread.

    tick: progress callback, called with `done` (steps of maps finished before) plus this map's optimisation steps.
    """
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
        callbacks_every_iters=EVERY,
    ).fit(np.asarray(vectors, dtype=np.float64))
    tick(done + EARLY + STEPS)
    return np.asarray(fit)
