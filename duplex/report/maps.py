"""Two-dimensional maps of images and prototypes by t-SNE, as the paper's figures show them.

A map is rows of one table: `map, kind, label, object, seen, x, y`. `prototypes` puts semantic and visual prototypes
among test images; `before` and `after` are the largest classes with their visual prototypes, as encoded and as trained;
`semantic`, `visual` and `combined` are prototypes alone, coloured by object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from duplex.errors import UsageError
from duplex.labels import Ints, LabelSpace

CLASSES, IMAGES, PROTOTYPES = 20, 40, 300  # largest classes, images shown of each, classes of the prototype maps
EARLY, STEPS, EVERY = 150, 350, 25
Array = NDArray[np.float32]
Tick = Callable[[int], None]
Rows = Callable[[Ints], Array]  # of compositions [C]: [C, d]


@dataclass(frozen=True)
class Scene:
    """What the maps are made of, as arrays."""

    labels: LabelSpace
    own: Ints  # [n] compositions of the test images
    raw: Array  # [n, d] unit features as the encoder gave them
    trained: Array  # [n, d] as the trained network sees them
    semantic: Rows | None  # t^c
    visual: Rows | None  # h
    start: Rows | None  # h before training


def count(scene: Scene) -> int:
    """How many maps there will be."""
    return sum(1 for _ in _plans(scene))


def draw_maps(scene: Scene, tick: Tick) -> pd.DataFrame:
    """All maps; `tick` hears every finished step, of `count(scene) * (EARLY + STEPS)`."""
    tables, done = [], 0
    for name, parts in _plans(scene):
        vectors = np.concatenate([rows for *_, rows in parts])
        x, y = _tsne(vectors, partial(_after, tick, done)).T
        table = pd.concat([_described(scene, kind, compositions) for kind, compositions, _ in parts], ignore_index=True)
        tables.append(table.assign(map=name, x=x, y=y))
        done += EARLY + STEPS
    return pd.concat(tables, ignore_index=True)[["map", "kind", "label", "object", "seen", "x", "y"]]


def _after(tick: Tick, done: int, step: int) -> None:
    tick(done + step)


def _plans(scene: Scene) -> Iterator[tuple[str, list[tuple[str, Ints, Array]]]]:
    """Each map's name and its parts: kind, compositions [r], vectors [r, d]."""
    largest, rows = largest_classes(scene.own)
    if scene.visual is not None:
        parts = [("image", scene.own[rows], scene.trained[rows])]
        parts += [("semantic", largest, scene.semantic(largest))] if scene.semantic is not None else []
        parts += [("visual", largest, scene.visual(largest))]
        yield "prototypes", parts
    for name, features, book in (("before", scene.raw, scene.start), ("after", scene.trained, scene.visual)):
        stars = [] if book is None else [("star", largest, book(largest))]
        yield name, [("image", scene.own[rows], features[rows]), *stars]
    first = scene.labels.target("closed", "test")[:PROTOTYPES]
    kinds = {"semantic": scene.semantic, "visual": scene.visual}
    found = {name: rows(first) for name, rows in kinds.items() if rows is not None}
    for name, vectors in found.items():
        yield name, [(name, first, vectors)]
    if len(found) == len(kinds):
        yield "combined", [("combined", first, np.concatenate(list(found.values()), axis=1))]


def largest_classes(own: Ints, classes: int = CLASSES, images: int = IMAGES) -> tuple[Ints, Ints]:
    """The compositions with the most test images, and rows of up to `images` of each, evenly taken."""
    names, counts = np.unique(own, return_counts=True)
    largest = np.sort(names[np.argsort(-counts, kind="stable")[:classes]])
    picked = [_evenly(np.flatnonzero(own == composition), images) for composition in largest]
    return largest, np.concatenate(picked) if picked else np.empty(0, dtype=np.int64)


def _evenly(rows: Ints, most: int) -> Ints:
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64))]


def _described(scene: Scene, kind: str, compositions: Ints) -> pd.DataFrame:
    objects = scene.labels.object_of(compositions)
    return pd.DataFrame(
        {
            "kind": kind,
            "label": scene.labels.names(compositions),
            "object": [scene.labels.objects[n] for n in objects.tolist()],
            "seen": scene.labels.seen[compositions].astype(int),
        }
    )


def _tsne(vectors: Array, tick: Tick) -> NDArray[np.float64]:
    """[r, 2] the same on every run: started from principal components, one thread."""
    if len(vectors) < 5:  # too few for neighbourhoods: the first two coordinates will do
        tick(EARLY + STEPS)
        return np.asarray(vectors[:, :2], dtype=np.float64)
    try:
        import openTSNE
    except ImportError as error:
        raise UsageError("the maps need the extra: pip install 'duplex[pipeline]'") from error

    def heard(iteration: int, error: float, embedding: Any) -> None:
        tick(iteration)

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
        callbacks=heard,
        callbacks_every_iters=EVERY,
    ).fit(np.asarray(vectors, dtype=np.float64))
    tick(EARLY + STEPS)
    return np.asarray(fit)
