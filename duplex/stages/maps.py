"""The shown run of a data set -> t-SNE maps of its test images and prototypes."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from torch import Tensor
from torch.nn.functional import normalize

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.labels import Ints
from duplex.report.maps import EARLY, STEPS, Array, Rows, Scene, count, draw_maps
from duplex.report.prototypes import embed
from duplex.stages.featured_run import ShownRun, load_shown
from duplex.stages.inventory import prototype_run
from duplex.system.files import write_text
from duplex.system.progress import Bar

COLUMNS = ["map", "kind", "label", "object", "seen", "x", "y"]


def run(params: Params, dataset: str, paths: ArtifactPaths | None = None) -> None:
    """Write maps.csv; only its header where no method of `run:` has visual prototypes."""
    paths = paths or ArtifactPaths()
    chosen, out = prototype_run(params, dataset, paths), paths.maps(dataset)
    table = pd.DataFrame(columns=COLUMNS)
    if chosen is not None:
        scene = scene_of(load_shown(params, dataset, *chosen, paths), params.row(chosen[0]).kind, chosen[1])
        with Bar(f"{dataset} maps", count(scene) * (EARLY + STEPS)) as bar:
            table = draw_maps(scene, bar.show)
    write_text(out, table.to_csv(index=False, lineterminator="\n", float_format="%.4f"))


def scene_of(shown: ShownRun, kind: str, seed: int) -> Scene:
    """The method and its test images as arrays, and the visual prototypes as training found them."""
    method, labels, test = shown.method.exhibits(), shown.inputs.labels, shown.inputs.examples["test"]
    start = None if method.visual is None else shown.at_start(kind, seed).exhibits().visual
    raw = normalize(test.z, dim=-1).numpy()
    trained = embed(method, test).z
    return Scene(
        labels=labels,
        own=test.compositions.numpy(),
        raw=raw,
        trained=raw if trained is None else trained,
        semantic=_rows(method.semantic) if method.spoken is None else None,  # one map holds one space
        visual=_rows(method.visual),
        start=_rows(start),
    )


def _rows(prototypes: Callable[[Ints], Tensor] | None) -> Rows | None:
    if prototypes is None:
        return None

    def rows(compositions: Ints) -> Array:
        found: Array = prototypes(compositions).numpy()
        return found

    return rows
