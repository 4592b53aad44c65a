"""`duplex extract`, `duplex cache` and `duplex encoders`, in a project's folder."""

import json
import shutil
from pathlib import Path

import pytest

from duplex.data.tables import write_manifest
from tests.commands import Command
from tests.encoders.small import write_folder
from tests.features.pictures import write_pictures
from tests.hostile.conftest import PARAMS
from tests.projects import draw_project


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import pandas as pd

    encoder = write_folder(tmp_path / "encoder")
    (tmp_path / "params.yaml").write_text(PARAMS.replace("{name: tiny}", f'{{name: "{encoder}"}}'))
    rows = [(name, "red", "apple", "train") for name in write_pictures(tmp_path / "pictures", 20)]
    frame = pd.DataFrame(rows, columns=["image", "state", "object", "split"])
    write_manifest(frame, tmp_path / "artifacts" / "pics" / "manifest.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CACHE = "artifacts/pics/features.h5"


def test_extraction_is_reported_inspected_and_verified(folder: Path, command: Command) -> None:
    result = command("extract", "-d", "pics", "--json")
    assert result.code == 0 and json.loads(result.out)[0]["rows"] == 20 and "20 rows" in result.err
    assert json.loads((folder / "artifacts/pics/extraction.json").read_text())["bad"] == 0
    assert json.loads(command("extract", "-d", "pics", "--json").out)[0]["resumed"] == 20
    found = json.loads(command("cache", "info", CACHE, "--json").out)
    assert found["rows"] == 20 and found["identity"]["dim"] == "16"
    assert json.loads(command("cache", "verify", CACHE, "--json").out)["checked"] == 20
    lines = command("cache", "info", CACHE).out.splitlines()
    assert {"identity.precision: fp32", "rows: 20", "pending: 0", "patch: none", "bad: none"} <= set(lines)


def test_extract_prepares_what_is_missing_or_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    draw_project(tmp_path, changes=lambda record: record["extraction"].update(num_workers=0))
    monkeypatch.chdir(tmp_path)
    first = command("extract", "-d", "own")
    assert first.code == 0
    assert first.err.startswith("preparing own first: artifacts/own/manifest.csv does not exist\n")
    assert "prepared" not in command("extract", "-d", "own").err
    table = tmp_path / "pictures.csv"
    table.write_text(table.read_text().replace(",striped,", ",lined,"))
    second = command("extract", "-d", "own")
    assert second.code == 0 and second.err.startswith("preparing own first: its table, lists or image files")
    assert "of them encoded before" in second.err and "images per second" not in second.err
    assert ",lined," in (tmp_path / "artifacts/own/manifest.csv").read_text()


def test_extract_names_the_download_where_there_are_no_images(folder: Path, command: Command) -> None:
    shutil.rmtree(folder / "pictures")
    assert command("extract", "-d", "pics").refused("has no images of the data set 'pics'; copy them there")
    (folder / "pictures").mkdir()
    assert command("extract", "-d", "pics").refused("has no images of the data set 'pics'")
    params = (folder / "params.yaml").read_text().replace("pics:", "mit-states:").replace("[pics]", "[mit-states]")
    (folder / "params.yaml").write_text(params)
    (folder / "pictures").rmdir()
    assert command("extract", "-d", "mit-states").refused("`duplex data download mit-states`")


def test_joining_writes_extraction_json(folder: Path, command: Command) -> None:
    note = folder / "artifacts/pics/extraction.json"
    for k in range(2):
        command("extract", "-d", "pics", "--shard", f"{k}/2")
    assert not note.exists()
    assert command("cache", "join", CACHE).code == 0
    assert json.loads(note.read_text()) == {"rows": 20, "bytes": 20 * (2 * 16 + 1 + 4 + 32), "bad": 0, "bad_images": []}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["extract", "-d", "pics", "--shard", "2"], 2, "expected k/N"),
        (["extract", "-d", "pics", "--engine", "spark"], 2, "known: local, ray"),
        (["extract", "-d", "absent"], 2, "known: pics"),
        (["cache", "info", "absent.h5"], 1, "does not exist"),
        (["cache", "info", "params.yaml"], 1, "cannot be opened as an HDF5 file"),
        (["cache", "verify", "params.yaml"], 2, "--dataset"),
        (["cache", "join", "absent.h5"], 1, "no shard"),
        (["encoders", "convert", "absent.pt", "out", "--encoder", "ViT-B-32"], 2, "absent.pt does not exist"),
    ],
)
def test_mistakes_are_one_line(folder: Path, command: Command, words: list[str], code: int, message: str) -> None:
    result = command(*words)
    assert result.code == code and result.refused(message)


def test_encoders_are_listed(command: Command) -> None:
    entries = {entry["name"]: entry for entry in json.loads(command("encoders", "--json").out)}
    assert entries["ViT-L-14-quickgelu"]["dim"] == 768 and "openai" in entries["ViT-L-14-quickgelu"]["tags"]
    siglip = entries["ViT-B-16-SigLIP2"]
    assert (siglip["text"], siglip["blocks"], siglip["megabytes"]) == (True, True, 1501)
    assert siglip["licences"] == {"webli": "apache-2.0"}
    assert entries["timm:vit_base_patch16_dinov3"]["text"] is False
    assert entries["coca_roberta-ViT-B-32"]["megabytes"] is None
    listed = command("encoders", "list").out
    (mobile,) = [line for line in listed.splitlines() if line.startswith("MobileCLIP2-S2 ")]
    assert "397" in mobile and "apple-amlr (no commercial use)" in mobile
    assert "ViT-L-14-quickgelu" in listed and "timm:MODEL" in listed and "blip:OWNER/NAME" in listed
