"""Damaged and malicious params.yaml, manifests, labels, tables and archives."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

from duplex.config.params import load_params
from duplex.data.download import BENCHMARKS, BenchmarkArchive, download_archive
from duplex.data.shapes import shapes_manifest
from duplex.data.tables import write_manifest
from duplex.errors import DuplexError
from duplex.report.aggregate import aggregate, stored_numbers
from tests.data.web import serving
from tests.hostile.conftest import Command

YAMLS = {
    "a recursive list": lambda text: text + "x: &x [*x]\n",
    "deep lists": lambda text: text + "x: " + "[" * 3000 + "]" * 3000,
    "a code tag": lambda text: text + "x: !!python/object/apply:os.system [ls]\n",
    "a month 99": lambda text: text + "x: 9999-99-99\n",
    "half a character": lambda text: text.replace("device: auto", 'device: "\\ud800"'),
    "two documents": lambda text: text + "---\na: 1\n",
}


@pytest.mark.parametrize("name", YAMLS)
def test_what_is_not_plain_yaml_is_refused(project: Path, command: Command, name: str) -> None:
    Path("params.yaml").write_text(YAMLS[name](Path("params.yaml").read_text()))
    assert command("params", "--check").refused("params.yaml cannot be read as YAML")


@pytest.mark.parametrize(
    ("row", "says"),
    [("../secret.jpg,red,star,train", "contains `..`"), ("/etc/passwd,red,star,train", "is absolute"),
     ("a.jpg,red,star", "has 3 cells"), ("a.jpg,,star,val", "state is empty"),
     ('"a.jpg,red,star,train', "cannot be read as a manifest"), ("a\x00.jpg,red,star,train", "zero byte")],
)  # fmt: skip
def test_invalid_manifest_rows_are_refused(pics: Path, command: Command, row: str, says: str) -> None:
    path = Path("artifacts/pics/manifest.csv")
    path.write_text(path.read_text() + row + "\n")
    assert command("extract", "-d", "pics").refused("manifest.csv", says)


def test_an_image_behind_a_link_out_of_the_root_is_not_opened(pics: Path, command: Command) -> None:
    (pics / "outside").mkdir()
    shutil.move("pictures/00003.jpg", "outside/00003.jpg")
    Path("pictures/00003.jpg").symlink_to(pics / "outside/00003.jpg")
    assert command("extract", "-d", "pics").refused("leaves the images' folder")


def test_nan_and_infinity_in_metrics_are_undefined(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"closed": {"seen": NaN, "auc": 1.0, "hm": Infinity}}')
    found = aggregate({("a", "m"): [stored_numbers(tmp_path / "metrics.json") or {}]})["a"]["m"]["closed"]
    assert found["auc"] == 1.0 and not {"seen", "hm"} & set(found)


def test_the_report_names_missing_runs(project: Path, command: Command) -> None:
    params, good = load_params(), {"seen": 1.0, "unseen": 2.0, "hm": 1.5, "auc": 0.5}
    for name, seed in itertools.product(params.run.methods, params.run.seeds):
        path = Path("artifacts/shapes") / name / str(seed) / "metrics.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        worlds = dict.fromkeys(params.entry(name).worlds, good)
        path.write_text(json.dumps({**worlds, "val_auc": 3.0, "epoch": 4, "bad_images": 0}))
    write_manifest(shapes_manifest(scale=0.01), Path("artifacts/shapes/manifest.csv"))
    shutil.rmtree("artifacts/shapes/duplex/1")
    shutil.rmtree("artifacts/shapes/csp")
    Path("artifacts/metrics.json").write_text("committed")
    assert command("report").code == 0
    assert Path("artifacts/metrics.json").read_text() == "committed"
    page = Path("artifacts/report/index.html").read_text()
    assert "Not evaluated and not included: csp seed 0, csp seed 1, duplex seed 1." in page
    found = json.loads(Path("artifacts/summary.json").read_text())["shapes"]
    assert set(found) == {"linear", "clip", "cso", "duplex", "closed_form", "dual", "dual_finetuned"}
    assert found["duplex"]["closed"]["seeds"] == 1 and found["duplex"]["open"]["seeds"] == 2
    shutil.rmtree("artifacts/shapes")
    answer = command("report")
    assert answer.code == 0 and answer.err.startswith("duplex: no run of params.yaml has been evaluated; `dvc repro`")
    assert answer.err.count("\n") == 1
    assert "No method has been evaluated." in Path("artifacts/report/index.html").read_text()


def zipped(folder: Path, content: str) -> bytes:
    (folder / "made" / "images").mkdir(parents=True, exist_ok=True)
    (folder / "made" / "images" / "a.txt").write_text(content)
    return Path(shutil.make_archive(str(folder / "made"), "zip", folder / "made")).read_bytes()


def test_archives_are_verified_by_their_hash(tmp_path: Path) -> None:
    log: list[str] = []
    with serving() as server:
        server.files["/a.zip"] = zipped(tmp_path, "first")
        archive = BenchmarkArchive("a.zip", (server.url("/a.zip"),), {"images": ("images",)}, 10**6, "http://page")
        root = tmp_path / "root"
        download_archive(archive, root, log.append)
        assert any("no hash of a.zip is published; its sha256 is" in line for line in log)
        assert any("not encrypted" in line for line in log)
        known = (root / ".archives/a.zip.sha256").read_text().split()[0]
        shutil.rmtree(root / "images")
        (root / ".archives/a.zip").write_bytes(zipped(tmp_path, "another"))
        with pytest.raises(DuplexError, match=rf"instead of {known[:12]}…\); delete it to download it again or, if it"):
            download_archive(archive, root, log.append)
        assert not (root / "images").exists()
        (root / ".archives/a.zip").unlink()
        download_archive(archive, root, log.append)
        assert (root / "images/a.txt").read_text() == "first"


def test_encrypted_mirrors_come_first() -> None:
    for benchmark in BENCHMARKS.values():
        for archive in benchmark.archives:
            plain = [not url.startswith("https://") for url in archive.urls]
            assert plain == sorted(plain) and not plain[0]


@pytest.mark.parametrize("licence", [" ", "mit\nbase_model: somebody/else", "[evil]", "a b"])
def test_a_licence_cannot_inject_lines_into_a_model_card(pics: Path, command: Command, licence: str) -> None:
    assert command("export", "run", "out", "--licence", licence).refused("--licence is", "cc-by-4.0")
    assert not Path("out").exists()
