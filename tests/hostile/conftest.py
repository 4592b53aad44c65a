from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from duplex.cli import main
from duplex.data.manifest import write_manifest
from tests.features.pictures import write_pictures
from tests.subprocesses import ROOT


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    def refused(self, *says: str) -> bool:
        """One sentence, and nothing else."""
        return self.code in (1, 2) and self.err.count("\n") == 1 and all(part in self.err for part in says)


Command = Callable[..., Answer]
PARAMS = """
run: {datasets: [pics], methods: [m], seeds: [0]}
ablation_run: {datasets: [pics], seeds: [0]}
device: cpu
extraction: {batch_size: 4, num_workers: 0, max_bad: 0.5}
evaluation: {}
datasets:
  pics:
    source: {kind: table, root: pictures, table: table.csv}
    encoder: {name: tiny}
    training: {learning_rate: 0.1, batch_size: 2, epochs: 1}
methods: {m: {}}
"""
CACHE = "artifacts/pics/features.h5"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A command in this process, as its console script runs it."""

    def call(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["duplex", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        return Answer(int(left.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def pics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with twelve pictures and their manifest, seen through the packaged encoder."""
    (tmp_path / "params.yaml").write_text(PARAMS)
    names = write_pictures(tmp_path / "pictures", 12)
    splits = ["train"] * 6 + ["val"] * 3 + ["test"] * 3
    rows = [(name, ("red", "blue")[i % 2], "star", splits[i]) for i, name in enumerate(names)]
    write_manifest(
        pd.DataFrame(rows, columns=["image", "state", "object", "split"]), tmp_path / "artifacts/pics/manifest.csv"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the program's own params.yaml, and a network that answers."""
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("duplex.encoders.hub.answers", lambda address: True)
    return tmp_path
