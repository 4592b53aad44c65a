"""A small project that has run the whole pipeline, made once for all tests of the report."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from duplex.artifacts import ArtifactPaths
from duplex.data.shapes import render_pictures, shapes_manifest
from duplex.params import Params, load_params
from duplex.stages import evaluate, inventory, maps, report, train
from duplex.stages.extract import extract
from duplex.stages.prepare import prepare

SHIPPED = Path(__file__).parents[2] / "params.yaml"


@dataclass(frozen=True)
class Project:
    folder: Path
    params: Params
    paths: ArtifactPaths  # relative, as the pipeline has them: tests work in the folder

    @property
    def page(self) -> Path:
        return self.folder / self.paths.report / "index.html"


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Project:
    folder = tmp_path_factory.mktemp("reported")
    with inside(folder):
        manifest = shapes_manifest(scale=0.06)
        render_pictures(manifest, Path("pictures"))
        manifest.to_csv("pictures.csv", index=False)
        record = YAML(typ="safe").load(SHIPPED.read_text())
        record["run"] = {"datasets": ["own"], "methods": ["clip", "duplex", "duplex_open"], "seeds": [0, 1]}
        record["device"] = "cpu"
        record["evaluation"]["bootstrap"] = 20
        record["datasets"]["own"] = {
            "source": {"kind": "table", "root": "pictures", "table": "pictures.csv"},
            "encoder": {"name": "tiny"},
            "training": {"learning_rate": 0.001, "batch_size": 64, "epochs": 2},
        }
        with open("params.yaml", "w") as file:
            YAML().dump(record, file)
        params, paths = load_params(), ArtifactPaths()
        run_all(params, paths)
    return Project(folder, params, paths)


def run_all(params: Params, paths: ArtifactPaths) -> None:
    prepare(params, "own", paths)
    extract(params, "own", paths)
    for method in params.run.methods:
        for seed in params.run.seeds:
            train.run(params, "own", method, seed, paths)
            evaluate.run(params, "own", method, seed, paths)
    inventory.run(params, "own", paths)
    maps.run(params, "own", paths)
    report.run(params, paths)


@contextlib.contextmanager
def inside(folder: Path):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture
def project(made):
    """The project, with the test in its folder."""
    with inside(made.folder):
        yield made
