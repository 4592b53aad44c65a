"""The commands as a person runs them, in a folder of their own."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from duplex.cli import main
from duplex.data.manifest import read_manifest, write_manifest
from tests.encoders.small import write_folder
from tests.features.pictures import write_pictures

Command = Callable[..., tuple[int, str, str]]
PARAMS = """
run: {{datasets: [pics], methods: [], seeds: [0]}}
ablation_run: {{datasets: [pics], seeds: [0]}}
device: cpu
extraction: {{batch_size: 8, num_workers: 0}}
evaluation: {{}}
datasets:
  pics:
    source: {{kind: table, root: pictures, table: table.csv}}
    encoder: {{name: "{encoder}"}}
    training: {{learning_rate: 0.1, batch_size: 2, epochs: 1}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import pandas as pd

    text = PARAMS.format(encoder=write_folder(tmp_path / "encoder"))
    (tmp_path / "params.yaml").write_text(text.replace("methods: []", "methods: [m]") + "methods: {m: {}}\n")
    rows = [(name, "red", "apple", "train") for name in write_pictures(tmp_path / "pictures", 20)]
    frame = pd.DataFrame(rows, columns=["image", "state", "object", "split"])
    write_manifest(frame, tmp_path / "artifacts" / "pics" / "manifest.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["duplex", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
            sys.exit(0)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


CACHE = "artifacts/pics/features.h5"


def test_extract_then_look_then_verify(folder: Path, command: Command) -> None:
    code, out, err = command("extract", "-d", "pics", "--json")
    assert code == 0 and json.loads(out)[0]["rows"] == 20 and "20 rows" in err
    assert json.loads((folder / "artifacts/pics/extraction.json").read_text())["bad"] == 0
    assert json.loads(command("extract", "-d", "pics", "--json")[1])[0]["resumed"] == 20
    found = json.loads(command("cache", "info", CACHE, "--json")[1])
    assert found["rows"] == 20 and found["duplicate_rows"] == 0 and found["identity"]["dim"] == "16"
    assert json.loads(command("cache", "verify", CACHE, "--json")[1])["checked"] == 20
    assert "identity.precision: fp32" in command("cache", "info", CACHE)[1]


def test_shards_and_their_join(folder: Path, command: Command) -> None:
    command("extract", "-d", "pics", "--out", "whole.h5")
    for k in range(2):
        assert command("extract", "-d", "pics", "--shard", f"{k}/2", "--out", "parts.h5")[0] == 0
    assert "here --shard k/N makes one piece at a time" in command("extract", "-d", "pics", "--shards", "2")[2]
    assert command("cache", "join", "parts.h5", "--copy")[0] == 0
    assert Path("parts.h5").read_bytes() == Path("whole.h5").read_bytes()


def test_test_pictures_are_left_out_of_a_deep_cache(folder: Path, command: Command) -> None:
    table = read_manifest(folder / "artifacts/pics/manifest.csv")
    write_manifest(table.assign(split=["train"] * 12 + ["test"] * 8), folder / "artifacts/pics/manifest.csv")
    deep = ["extract", "--dataset", "pics", "--depth", 1]
    for option, rows in (("--no-deep-test", 12), ("--deep-test", None), ("--no-deep-test", 12)):
        assert command(*deep, option)[0] == 0
        code, out, _ = command("cache", "info", CACHE, "--json")
        assert code == 0 and json.loads(out)["deep"] and json.loads(out).get("deep_rows") == rows
    assert command("cache", "verify", CACHE)[0] == 0


def test_every_way_to_a_cache_notes_its_bad_pictures(folder: Path, command: Command) -> None:
    note = folder / "artifacts/pics/extraction.json"
    for k in range(2):
        command("extract", "-d", "pics", "--shard", f"{k}/2")
    assert not note.exists()
    assert command("cache", "join", CACHE)[0] == 0
    assert json.loads(note.read_text()) == {"rows": 20, "bytes": 20 * (2 * 16 + 1), "bad": 0, "bad_images": []}
    note.unlink()
    values = np.ones((20, 16))
    values[4, 2] = np.nan
    np.save("f.npy", values)
    assert command("cache", "import", "f.npy", "--dataset", "pics")[0] == 0
    (bad,) = json.loads(note.read_text())["bad_images"]
    assert (bad["row"], bad["reason"]) == (4, "features not finite")


def test_own_features(folder: Path, command: Command) -> None:
    np.save("f.npy", np.ones((20, 16), np.float32))
    assert command("cache", "import", "f.npy", "--dataset", "pics")[0] == 0
    assert json.loads(command("cache", "info", CACHE, "--json")[1])["identity"]["encoder"] == "imported"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["extract", "-d", "pics", "--shard", "2"], 2, "must read k/N"),
        (["extract", "-d", "pics", "--shard", "2/2"], 2, "counts from 0 to 1"),
        (["extract", "-d", "pics", "--precision", "fp8"], 2, "fp8"),
        (["extract", "-d", "pics", "--precision", "fp16"], 2, "bf16"),
        (["extract", "-d", "pics", "--precision", "tf32"], 2, "arithmetic of GPUs"),
        (["extract", "-d", "pics", "--num-workers", "-1"], 2, "auto"),
        (["extract", "-d", "pics", "--num-workers", "many"], 2, "or auto"),
        (["extract", "-d", "pics", "--engine", "spark"], 2, "known: local, ray"),
        (["extract", "-d", "absent"], 2, "known: pics"),
        (["extract", "-d", "pics", "--limit", "5"], 2, "say where it goes with --out"),
        (["extract", "-d", "pics", "--encoder", "ViT-B-32"], 2, "needs weights"),
        (["cache", "info", "absent.h5"], 1, "does not exist"),
        (["cache", "verify", "absent.h5"], 2, "--dataset"),
        (["cache", "join", "absent.h5"], 1, "no shard"),
        (["cache", "import", "absent.npy"], 2, "--manifest FILE or --dataset NAME"),
        (["cache", "import", "absent.npy", "-d", "pics"], 2, "absent.npy does not exist"),
        (["encoders", "convert", "absent.pt", "out", "--encoder", "ViT-B-32"], 2, "absent.pt does not exist"),
    ],
)
def test_mistakes_are_one_sentence(folder: Path, command: Command, words: list[str], code: int, says: str) -> None:
    found, out, err = command(*words)
    assert found == code and says in err and not out
    assert err.startswith("duplex: ") and err.count("\n") == 1


def test_encoders_are_listed(command: Command) -> None:
    entries = {entry["name"]: entry for entry in json.loads(command("encoders", "--json")[1])}
    assert entries["ViT-L-14-quickgelu"]["dim"] == 768 and "openai" in entries["ViT-L-14-quickgelu"]["tags"]
    listed = command("encoders", "list")[1]
    assert "ViT-L-14-quickgelu" in listed and "timm:MODEL" in listed and "blip:OWNER/NAME" in listed
