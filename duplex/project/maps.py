"""The pipeline's stage `maps`: the run whose t-SNE maps `report/figures.py` computes, for the report."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.labels import Ints
from duplex.project.run import ProjectData
from duplex.project.runs import LoadedRun, load_run, run_shown_in_maps
from duplex.report.figures import COLUMNS, EARLY, STEPS, Prototypes, Scene, compute_tsne_maps, map_count
from duplex.report.retrieval import image_features
from duplex.system.files import write_text
from duplex.system.processes import ProgressBar
from duplex.training.run import initialised_method


def maps_stage(data: ProjectData) -> None:
    """Write a table of t-SNE coordinates of `run_shown_in_maps`; no rows without one."""
    run = run_shown_in_maps(data)
    table = pd.DataFrame(columns=COLUMNS)
    if run is not None:
        scene = scene_of(load_run(run), run.entry.kind, run.seed)
        with ProgressBar(f"{data.dataset} maps", map_count(scene) * (EARLY + STEPS)) as bar:
            table = compute_tsne_maps(scene, bar.show)
    write_text(data.paths.maps(data.dataset), table.to_csv(index=False, lineterminator="\n", float_format="%.4f"))


def scene_of(run: LoadedRun, kind: str, seed: int) -> Scene:
    """What the maps show of a run: test images, prototypes, and visual ones before training."""
    method = run.method.inspectable()
    test = run.inputs.examples["test"]
    start = None
    if method.visual is not None:
        cpu = torch.device("cpu")
        untrained = initialised_method(kind, run.method.options, run.method.context, run.inputs, seed, cpu).eval()
        start = untrained.inspectable().visual
    raw = normalize(test.cls, dim=-1).numpy()
    trained = image_features(method, test).z
    return Scene(
        labels=run.inputs.labels,
        compositions=test.compositions.numpy(),
        encoded=raw,
        trained=raw if trained is None else trained,
        semantic=_rows(method.semantic) if method.text_space_features is None else None,  # a map shows one space
        visual=_rows(method.visual),
        start=_rows(start),
    )


def _rows(prototypes: Callable[[Ints], Tensor] | None) -> Prototypes | None:
    return None if prototypes is None else lambda compositions: prototypes(compositions).numpy()
