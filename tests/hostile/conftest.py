import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from duplex.data.tables import write_manifest
from tests.commands import Command, command, project
from tests.features.pictures import write_pictures

__all__ = ["Command", "command", "project"]
PARAMS = """
run:
  datasets: [pics]
  methods: [m]
  seeds: [0]
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
def pics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with twelve images and their manifest, for the packaged encoder."""
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
def ranked(pics: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that `duplex suspects pics` writes to, from a fixed ranking."""
    row = {"rank": 1, "image": "00000.jpg", "state": "red", "object": "star", "better_state": "blue", "copy_of": ""}
    table = pd.DataFrame([{**row, "better_object": "moon", "distance": 0.1}])
    monkeypatch.setattr("duplex.project.suspects.ProjectData.require", lambda *_, **__: None)
    monkeypatch.setattr("duplex.project.suspects.rank_suspects", lambda *_: table)
    return pics / "suspects" / "pics"


@contextmanager
def full_disk(size: int = 2000) -> Iterator[None]:
    """Limit files to `size` bytes: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(folder: Path) -> dict[str, bytes]:
    """Return path -> content of the complete files below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".partial")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
