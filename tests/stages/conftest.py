"""A drawn project small enough to be swept again and again, without DVC."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from duplex.artifacts import ArtifactPaths
from duplex.data.shapes import render_pictures, shapes_manifest
from duplex.params import Params, load_params
from duplex.stages.extract import extract
from duplex.stages.prepare import prepare
from tests.subprocesses import ROOT


@pytest.fixture(scope="package")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    manifest = shapes_manifest(scale=0.06)
    render_pictures(manifest, folder / "pictures")
    manifest.to_csv(folder / "pictures.csv", index=False)
    record = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
    record["run"] = {"datasets": ["own"], "methods": ["csp", "closed_form"], "seeds": [0, 1]}
    record["device"] = "cpu"
    record["evaluation"]["bootstrap"] = 20
    record["datasets"]["own"] = {
        "source": {"kind": "table", "root": str(folder / "pictures"), "table": str(folder / "pictures.csv")},
        "encoder": {"name": "tiny"},
        "training": {"learning_rate": 0.001, "batch_size": 64, "epochs": 3, "threads": 1},
    }
    with (folder / "params.yaml").open("w") as file:
        YAML().dump(record, file)
    params, paths = load_params(folder / "params.yaml"), ArtifactPaths(folder / "artifacts")
    prepare(params, "own", paths)
    extract(params, "own", paths)
    return folder


@pytest.fixture
def project(drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that has its features and no run, with the test in it."""
    for name in ("params.yaml", "artifacts"):
        (shutil.copytree if name == "artifacts" else shutil.copy)(drawn / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def params(project: Path) -> Params:
    return load_params(project / "params.yaml")
