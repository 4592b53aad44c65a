"""The shown run of a data set -> t-SNE maps of its test images and prototypes."""

from __future__ import annotations

from functools import partial

import pandas as pd
import torch

from duplex.artifacts import ArtifactPaths
from duplex.model.codebook import initial_rows
from duplex.model.factors import unit
from duplex.params import Params
from duplex.progress import Live
from duplex.report.maps import EARLY, STEPS, Scene, count, draw_maps
from duplex.report.prototypes import embed, semantic_rows, visual_rows
from duplex.stages.inventory import prototype_run
from duplex.stages.shown import Shown, load_shown

COLUMNS = ["map", "kind", "label", "object", "seen", "x", "y"]


def run(params: Params, dataset: str, paths: ArtifactPaths | None = None) -> None:
    """Write maps.csv; only its header where no method of `run:` has visual prototypes."""
    paths = paths or ArtifactPaths()
    chosen, out = prototype_run(params), paths.maps(dataset)
    out.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(columns=COLUMNS)
    if chosen is not None:
        scene = scene_of(load_shown(params, dataset, *chosen, paths), chosen[1])
        with Live(f"{dataset} maps", count(scene) * (EARLY + STEPS)) as live:
            table = draw_maps(scene, live.show)
    table.to_csv(out, index=False, lineterminator="\n", float_format="%.4f")


def scene_of(shown: Shown, seed: int) -> Scene:
    """The network and its test images as arrays, and the codebook as training found it."""
    network, labels, examples = shown.network, shown.inputs.labels, shown.inputs.examples
    visual = start = None
    if network.codebook is not None:
        visual = partial(visual_rows, network)
        torch.manual_seed(seed)  # rows that start at random
        train = examples["train"]
        start = initial_rows(network.options, labels, unit(train.z), train.compositions).numpy().__getitem__
    return Scene(
        labels=labels,
        own=examples["test"].compositions.numpy(),
        raw=unit(examples["test"].z).numpy(),
        trained=embed(network, examples["test"]).z,
        semantic=partial(semantic_rows, network),
        visual=visual,
        start=start,
    )
