"""A small trained project, made once for all tests of recognition."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from duplex.artifacts import ArtifactPaths
from duplex.data.manifest import read_manifest
from duplex.data.shapes import render_pictures, shapes_manifest
from duplex.params import load_params
from duplex.stages import evaluate, train
from duplex.stages.extract import extract
from duplex.stages.prepare import prepare
from tests.report.conftest import SHIPPED, inside

METHODS = ("clip", "duplex", "duplex_open", "closed_form", "duplex_plus")


@dataclass(frozen=True)
class Trained:
    folder: Path

    @property
    def paths(self) -> ArtifactPaths:
        return ArtifactPaths(self.folder / "artifacts")

    def run(self, method: str = "duplex") -> Path:
        return self.paths.run("own", method, 0).root

    def pictures(self, split: str = "test") -> list[Path]:
        manifest = read_manifest(self.paths.manifest("own"))
        return [self.folder / "pictures" / image for image in manifest[manifest["split"] == split]["image"]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    with inside(folder):
        manifest = shapes_manifest(scale=0.06)
        render_pictures(manifest, Path("pictures"))
        manifest.to_csv("pictures.csv", index=False)
        record = YAML(typ="safe").load(SHIPPED.read_text())
        record["run"] = {"datasets": ["own"], "methods": list(METHODS), "seeds": [0]}
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
        prepare(params, "own", paths)
        extract(params, "own", paths, num_workers=0)
        for method in METHODS:
            train.run(params, "own", method, 0, paths)
            evaluate.run(params, "own", method, 0, paths)
    return Trained(folder)


@pytest.fixture
def project(trained):
    """The project, with the test in its folder."""
    with inside(trained.folder):
        yield trained
