"""Compute t-SNE maps of a data set's test images and prototypes, for one trained run."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.labels import Ints
from duplex.library.run_training import initialised_method
from duplex.report.figures import COLUMNS, EARLY, STEPS, Prototypes, Scene, compute_maps, map_count
from duplex.report.images import embed_images
from duplex.stages.featured_run import FeaturedRun, load_featured_run
from duplex.stages.inventory import run_with_prototypes
from duplex.system.files import write_text
from duplex.system.progress import ProgressBar


def run(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write the t-SNE coordinates of a data set's maps as a table; only a header without visual prototypes."""
    chosen, out = run_with_prototypes(params, dataset, paths), paths.maps(dataset)
    table = pd.DataFrame(columns=COLUMNS)
    if chosen is not None:
        scene = scene_of(load_featured_run(params, dataset, *chosen, paths), params.entry(chosen[0]).kind, chosen[1])
        with ProgressBar(f"{dataset} maps", map_count(scene) * (EARLY + STEPS)) as bar:
            table = compute_maps(scene, bar.show)
    write_text(out, table.to_csv(index=False, lineterminator="\n", float_format="%.4f"))


def scene_of(run: FeaturedRun, kind: str, seed: int) -> Scene:
    """What maps show of a run: its test images and prototypes, and its visual prototypes before training."""
    method, labels, test = run.method.inspectable(), run.inputs.labels, run.inputs.examples["test"]
    start = None
    if method.visual is not None:
        cpu = torch.device("cpu")
        untrained = initialised_method(kind, run.method.options, run.method.context, run.inputs, seed, cpu).eval()
        start = untrained.inspectable().visual
    raw = normalize(test.cls, dim=-1).numpy()
    trained = embed_images(method, test).z
    return Scene(
        labels=labels,
        compositions=test.compositions.numpy(),
        encoded=raw,
        trained=raw if trained is None else trained,
        semantic=_rows(method.semantic) if method.text_space_features is None else None,  # a map shows one space
        visual=_rows(method.visual),
        start=_rows(start),
    )


def _rows(prototypes: Callable[[Ints], Tensor] | None) -> Prototypes | None:
    return None if prototypes is None else lambda compositions: prototypes(compositions).numpy()
