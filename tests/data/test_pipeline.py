"""A small data set in each layout, from `duplex data add` through `dvc repro` to metrics."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from ruamel.yaml import YAML

from tests.data.makers import QUIRKS, make_folder, make_standard, make_table, rows
from tests.subprocesses import duplex

PROJECT = Path(__file__).parents[2]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def run(project: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(project), "PATH": PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def copy_project(project: Path) -> None:
    """Copy the package and its pipeline into a new repository, with one short run."""
    kept = shutil.ignore_patterns("__pycache__")
    for folder in ("duplex", "pipeline"):
        shutil.copytree(PROJECT / folder, project / folder, ignore=kept)
    for file in ("dvc.yaml", "params.yaml"):
        shutil.copy(PROJECT / file, project)
    run(project, "git", "init", "-q")
    run(project, sys.executable, "-m", "dvc", "init", "-q")
    yaml = YAML()
    params = yaml.load(project / "params.yaml")
    for key, values in {"datasets": ["shapes"], "methods": ["cso"], "products": [], "seeds": [0]}.items():
        params["run"][key].clear()  # the lists keep their form: each on one line
        params["run"][key].extend(values)
    params["extraction"]["num_workers"] = 0
    params["evaluation"]["bootstrap"] = 20
    yaml.dump(params, project / "params.yaml")


def make_all(root: Path) -> dict[str, Path]:
    """Write one data set per layout; return name -> path for `duplex data add`."""
    paths = {f"standard-{quirk}": root / quirk for quirk in QUIRKS}
    for quirk in QUIRKS:
        make_standard(root / quirk, quirk)
    for form in ("nested", "flat"):
        paths[f"folder-{form}"] = root / f"folder {form}"
        make_folder(root / f"folder {form}", form)
    paths["csv"] = make_table(root / "csv", ".csv", split=True)
    paths["parquet"] = make_table(root / "parquet", ".parquet", split=False)
    return paths


@pytest.mark.long
def test_every_layout_reaches_metrics(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    copy_project(project)
    names = ("standard-archive", "folder-nested", "standard-spaces", "standard-flat", "folder-flat", "csv", "parquet")
    paths = {name: path for name, path in make_all(tmp_path / "pictures").items() if name in names}
    assert len(paths) == len(names)
    for name, path in paths.items():
        assert duplex("data", "add", name, path, "--encoder", "tiny", cwd=project).returncode == 0
    yaml = YAML()
    params = yaml.load(project / "params.yaml")
    params["run"]["datasets"].remove("shapes")
    yaml.dump(params, project / "params.yaml")
    for file in (project / "datasets").glob("*.yaml"):
        entry = yaml.load(file)
        entry["training"]["epochs"] = 2
        yaml.dump(entry, file)
    swept = duplex("sweep", cwd=project, env={"PATH": PATH})  # as `make repro` does
    assert swept.returncode == 0, swept.stderr
    run(project, sys.executable, "-m", "dvc", "repro")
    for name in paths:
        metrics = json.loads((project / f"artifacts/{name}/cso/0/metrics.json").read_text())
        assert metrics["bad_images"] == 0
        for world in ("closed", "open"):
            assert 0 <= metrics[world]["auc"] <= 100
        assert len((project / f"artifacts/{name}/manifest.csv").read_text().splitlines()) == 1 + len(rows())


@pytest.mark.long
def test_what_changes_features_is_noticed(tmp_path: Path) -> None:
    project, root = tmp_path / "project", tmp_path / "pictures"
    project.mkdir()
    copy_project(project)
    make_standard(root, "archive")
    assert duplex("data", "add", "own", root, "--encoder", "tiny", cwd=project).returncode == 0

    def extracted() -> str:
        """What `dvc repro` prints about the stage extract; "" if it did not run."""
        said = run(project, sys.executable, "-m", "dvc", "repro", "extract@own")
        return said.partition("Running stage 'extract@own'")[2]

    assert extracted() and not extracted()
    image = root / pd.read_csv(project / "artifacts/own/manifest.csv")["image"][0]
    image.touch()
    assert not extracted()
    data = image.read_bytes()
    image.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "encoded before" in extracted()
    code = project / "duplex/data/images.py"
    text = code.read_text()
    code.write_text(text.replace('image.convert("RGB"), image)', 'image.convert("RGB").rotate(180), image)'))
    assert code.read_text() != text
    said = extracted()
    assert "the code that encodes images" in said and "encoded before" not in said
    weights = project / "duplex/encoders/tiny/weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    said = extracted()
    assert "another weights file" in said and "encoded before" not in said and not extracted()
