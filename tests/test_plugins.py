"""A method of another distribution runs through the whole pipeline without changes to this package."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from duplex.cli import main
from duplex.testing import check_method
from tests.projects import draw_project, edited_params
from tests.subprocesses import ROOT, Forked

EXAMPLE = ROOT / "examples" / "linear_probe"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "linear_probe")
    install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", folder, source]
    subprocess.run([sys.executable, "-m", *install], check=True, capture_output=True)
    (folder / "falls_over.py").write_text("import a_package_that_is_not_there\n")
    info = folder / "falls_over-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: falls_over\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[duplex.methods]\nfalls_over = falls_over:Method\n")
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    draw_project(folder, ["clip"], changes=alone)
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copyfile(ROOT / name, folder / name)
    shutil.copytree(ROOT / "pipeline", folder / "pipeline")
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp"))
    (folder / "duplex").symlink_to(ROOT / "duplex")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def alone(record: dict) -> None:
    """Keep only this data set, with paths relative to the project."""
    own = record["datasets"]["own"]
    own["source"] |= {"root": "pictures", "table": "pictures.csv"}
    record["datasets"] = {"own": own}
    for row in record["methods"].values():
        row.pop("per_dataset", None)


def changed(folder: Path, methods: list[str], rows: dict[str, dict]) -> None:
    with edited_params(folder / "params.yaml") as record:
        record["run"]["methods"] = methods
        record["methods"].update(rows)


def start(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def duplex(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    process = Forked(with_plugins, str(site), *words, cwd=folder)
    out, err = process.communicate()
    return subprocess.CompletedProcess(words, process.wait(), out, err)


def with_plugins(site: str, *words: str) -> None:
    sys.path.insert(0, site)
    sys.argv = ["duplex", *words]
    main()


def stages_run(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"Running stage '(.*)':", done.stdout))


@pytest.mark.long
def test_a_method_of_another_distribution_is_trained_evaluated_and_reported(site, project):
    first = stages_run(start(site, project, "-m", "dvc", "repro"))
    assert {"train@own-clip-0", "evaluate@own-clip-0", "report"} <= first

    row = {"kind": "linear_probe", "scale": 30.0, "training": {"learning_rate": 0.01, "epochs": 3}}
    changed(project, ["clip", "probe"], {"probe": row})
    second = stages_run(start(site, project, "-m", "dvc", "repro"))
    assert {name for name in second if name.startswith(("train", "evaluate"))} == {
        "train@own-probe-0",
        "evaluate@own-probe-0",
    }, "a new method retrains none other"
    metrics = json.loads((project / "artifacts" / "metrics.json").read_text())["own"]
    assert 0 < metrics["probe"]["closed"]["auc"] <= 100 and metrics["probe"]["open"]["auc"] > 0
    assert "probe" in (project / "artifacts" / "report" / "index.html").read_text()
    compared = duplex(site, project, "compare", "--dataset", "own", "--methods", "clip", "probe", "--json")
    gain = json.loads(compared.stdout)["difference"]["auc"]["value"]
    assert gain == pytest.approx(metrics["probe"]["closed"]["auc"] - metrics["clip"]["closed"]["auc"], abs=1e-6)

    plugin = site / "linear_probe.py"
    text = plugin.read_text()
    plugin.write_text(f"# another comment\n{text}")
    assert stages_run(start(site, project, "-m", "dvc", "repro")) == {"plan"}, "nothing is left to do"
    plugin.write_text(f"{text}\nCHANGED = 1\n")
    late = duplex(site, project, "evaluate", "--dataset", "own", "--method", "probe")
    assert late.returncode == 1 and "its code has changed; `duplex train --dataset own" in late.stderr
    assert stages_run(start(site, project, "-m", "dvc", "repro", "train")) == {"plan", "train@own-probe-0"}
    current = duplex(site, project, "evaluate", "--dataset", "own", "--method", "probe")
    assert current.returncode == 0 and "has changed" not in current.stderr
    plugin.write_text(text)

    changed(project, ["clip", "probe"], {"probe": {**row, "scale": 10.0}})
    third = stages_run(start(site, project, "-m", "dvc", "repro", "--dry"))
    assert {name for name in third if name.startswith("train")} <= {"train@own-probe-0"}


@pytest.mark.slow
def test_a_broken_plugin_fails_only_its_own_methods(site, project):
    rows = {"bad": {"kind": "falls_over"}}
    before = (project / "params.yaml").read_text()
    changed(project, ["clip", "bad"], rows)
    try:
        listed = duplex(site, project, "methods")
        assert listed.returncode == 0 and "prompts  (duplex" in listed.stdout
        assert "method kind 'falls_over' of falls_over 0.3 cannot be loaded (ModuleNotFoundError" in listed.stdout
        planned = start(site, project, "pipeline/plan.py")
        assert planned.returncode == 0 and planned.stderr.count("\n") == 1 and "falls_over 0.3" in planned.stderr
        plan = project / "artifacts" / "plan" / "own"
        assert {json.loads((plan / name / "train.json").read_text())["kind"] for name in ("bad", "clip")} == {
            "falls_over",
            "prompts",
        }
        done = duplex(site, project, "train", "--dataset", "own", "--method", "bad")
        assert done.returncode == 1 and "remove its methods from params.yaml" in done.stderr
        assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    finally:
        (project / "params.yaml").write_text(before)


def test_the_documentation_includes_the_example():
    page = (ROOT / "docs" / "your_method.md").read_text()
    assert all((EXAMPLE / name).read_text().rstrip() in page for name in ("linear_probe.py", "pyproject.toml"))
    assert len((EXAMPLE / "linear_probe.py").read_text().splitlines()) <= 50


def test_the_example_passes_check_method(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    try:
        check_method(importlib.import_module("linear_probe").LinearProbe)
    finally:
        sys.modules.pop("linear_probe", None)
