"""Small projects of drawn pictures that have run the pipeline's stages, for tests that look at what those leave."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ruamel.yaml import YAML

from duplex.artifacts import ArtifactPaths
from duplex.data.shapes import render_pictures, shapes_manifest
from duplex.params import Params, load_params
from duplex.stages import evaluate, train
from duplex.stages.extract import extract
from duplex.stages.inputs import Loaded
from duplex.stages.prepare import prepare
from tests.subprocesses import ROOT

SHIPPED = ROOT / "params.yaml"
METHODS = ("clip", "duplex", "duplex_open")


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def make_project(
    folder: Path, seeds: Sequence[int], methods: Sequence[str] = METHODS, device: str = "cpu", epochs: int = 2
) -> Params:
    """A data set `own` of drawn pictures, `methods` trained on it and evaluated."""
    with inside(folder):
        manifest = shapes_manifest(scale=0.06)
        render_pictures(manifest, Path("pictures"))
        manifest.to_csv("pictures.csv", index=False)
        record = YAML(typ="safe").load(SHIPPED.read_text())
        record["run"] = {"datasets": ["own"], "methods": list(methods), "seeds": list(seeds)}
        record["device"] = device
        record["evaluation"]["bootstrap"] = 20
        record["datasets"]["own"] = {
            "source": {"kind": "table", "root": "pictures", "table": "pictures.csv"},
            "encoder": {"name": "tiny"},
            "training": {"learning_rate": 0.001, "batch_size": 64, "epochs": epochs},
        }
        with open("params.yaml", "w") as file:
            YAML().dump(record, file)
        params, paths = load_params(), ArtifactPaths()
        prepare(params, "own", paths)
        extract(params, "own", paths, num_workers=0)
        load = Loaded()
        for method in methods:
            for seed in seeds:
                train.run(params, "own", method, seed, paths, load=load)
                evaluate.run(params, "own", method, seed, paths, load=load)
    return params
