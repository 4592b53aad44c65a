"""The wheel: its files, the same bytes each time, and its bill of materials."""

import hashlib
import json
import os
import re
import zipfile
from importlib.metadata import PathDistribution, distribution, version
from pathlib import Path

import pytest

from duplex.errors import DISTRIBUTION
from release import materials
from tests.subprocesses import ROOT
from tests.wheels import build_wheel, listed_files

pytestmark = pytest.mark.slow
INFO = f"duplex_czsl-{version(DISTRIBUTION)}.dist-info"
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
DATA = {
    "py.typed", "config/recipes.yaml", "data/benchmarks.yaml", "recognition/encoders.csv",
    "encoders/tiny/model.json", "encoders/tiny/weights.safetensors",
    "recognition/browser.js", "recognition/docs.html", "recognition/page.html",
    "report/blocks.html.j2", "report/charts.css", "report/claims.yaml",
    "report/notebook.html.j2", "report/page.css", "report/page.html.j2",
    "report/page.js",
    "report/quoted.yaml", "report/ablation_tables.yaml",
}  # fmt: skip
PROJECT = re.compile(r"(ablations/)?(params\.yaml|dvc\.yaml|\.dvcignore|\.dvc/.*|pipeline/\w+\.py)")
PATHS = re.compile(rb"/(?:home|root|Users|work|tmp)/[\w.-]+|" + re.escape(os.fsencode(ROOT)))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), SOURCE_DATE_EPOCH="1700000000")


def test_the_wheel_contains_the_package_and_nothing_else(wheel: Path) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "duplex").rglob("*.py")}
    expected = modules | {f"duplex/{name}" for name in DATA} | {f"{INFO}/{name}" for name in METADATA}
    expected |= {f"duplex/shipped/{name}" for name in listed_files() if PROJECT.fullmatch(name)}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert set(names) == expected and len(names) == len(expected)


def test_no_file_of_the_wheel_names_a_path_of_a_machine(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name: PATHS.findall(archive.read(name)) for name in archive.namelist()}
    assert not {name: paths for name, paths in found.items() if paths}
    assert PATHS.search(b"file:///home/builder/duplex") and PATHS.search(os.fsencode(ROOT / "duplex"))


def test_the_wheel_is_the_same_from_another_folder_umask_and_hour(wheel: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        again = build_wheel(tmp_path / "another folder", SOURCE_DATE_EPOCH="1700000000", TZ="Asia/Tokyo")
    finally:
        os.umask(before)
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()


def test_the_bill_of_materials_lists_what_is_installed(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the wheel's own metadata, as in the environment into which `make wheel` installs it."""
    built = PathDistribution(zipfile.Path(wheel, f"{INFO}/"))
    monkeypatch.setattr(materials, "distribution", lambda name: built if name == DISTRIBUTION else distribution(name))
    materials.main(wheel)
    record = json.loads(wheel.with_suffix(".cdx.json").read_text())
    assert (record["bomFormat"], record["specVersion"]) == ("CycloneDX", "1.6")
    root = record["metadata"]["component"]
    assert root["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    versions = {part["name"]: part["version"] for part in record["components"]}
    assert versions == {name: version(name) for name in versions}
    assert {"torch", "numpy", "dvc", "opentsne", "tqdm", "pygit2"} <= set(versions) and "pytest" not in versions
    edges = {entry["ref"]: entry["dependsOn"] for entry in record["dependencies"]}
    refs = {part["bom-ref"] for part in (root, *record["components"])}
    assert set(edges) == refs and {ref for named in edges.values() for ref in named} == refs - {root["bom-ref"]}
    assert f"pkg:pypi/torch@{versions['torch']}" in edges[root["bom-ref"]]
