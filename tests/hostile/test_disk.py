"""Full disks and system errors: one line of error, and no incomplete files."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from duplex.labels import LabelSpace
from tests.hostile.conftest import Command, files, full_disk


@pytest.fixture
def table(pics: Path) -> Path:
    lines = [f"{i:05d}.jpg,{('red', 'blue')[i % 2]},{('star', 'moon')[i // 2 % 2]}" for i in range(12)]
    splits = ["train"] * 4 + ["val"] * 4 + ["test"] * 4
    (pics / "table.csv").write_text(
        "image,state,object,split\n" + "".join(f"{a},{b}\n" for a, b in zip(lines, splits, strict=True))
    )
    return pics


@pytest.mark.parametrize("limit", [0, 20, 300])
def test_a_full_disk_leaves_existing_files_unchanged(table: Path, command: Command, limit: int) -> None:
    """manifest.csv, labels.json, statistics.json and source.json have about 388, 132, 287 and 350 bytes."""
    before = files(table)
    with full_disk(limit):
        done = command("prepare", "-d", "pics")
    assert done.refused("cannot be written: File too large; make room") and files(table) == before


def test_a_disk_that_fills_up_leaves_no_incomplete_file(table: Path, command: Command) -> None:
    with full_disk(450):
        assert command("prepare", "-d", "pics").code == 0
    written = (table / "artifacts/pics/labels.json").read_bytes()
    rows = "".join(f"x{i}.jpg,a,b,val\n" for i in range(9))
    (table / "table.csv").write_text((table / "table.csv").read_text() + rows)
    with full_disk(450):
        assert command("prepare", "-d", "pics").refused("manifest.csv cannot be written: File too large; make room")
    assert (table / "artifacts/pics/labels.json").read_bytes() == written
    assert not list(table.rglob("*.partial"))


def test_a_file_in_place_of_a_folder_is_not_replaced(table: Path, command: Command) -> None:
    shutil.rmtree("artifacts")
    Path("artifacts").write_text("precious")
    assert command("prepare", "-d", "pics").refused("artifacts", "cannot be written")
    assert Path("artifacts").read_text() == "precious"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EDQUOT])
def test_system_errors_of_a_write_are_reported(
    table: Path, command: Command, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.replace

    def refuse(source: object, target: object) -> None:
        if str(target).endswith("labels.json"):
            raise OSError(number, os.strerror(number), str(source))
        real(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr("duplex.system.files.os.replace", refuse)
    assert command("prepare", "-d", "pics").refused("labels.json cannot be written")
    assert not list(table.rglob("*.partial")) and not list(table.rglob("labels.json"))


def test_file_modes_follow_the_umask(table: Path, command: Command) -> None:
    before = os.umask(0o027)
    try:
        assert command("prepare", "-d", "pics").code == 0
        np.save("f.npy", np.ones((12, 128), np.float32))
        assert command("cache", "import", "f.npy", "-d", "pics").code == 0
    finally:
        os.umask(before)
    written = list((table / "artifacts/pics").iterdir())
    assert {path.stat().st_mode & 0o777 for path in written} == {0o640}, written


def test_links_are_replaced_and_their_targets_kept(table: Path, command: Command) -> None:
    """`dvc config cache.type symlink` makes outputs links."""
    assert command("prepare", "-d", "pics").code == 0
    labels = table / "artifacts/pics/labels.json"
    stored = table / "stored"
    labels.rename(stored)
    stored.write_text("earlier version")
    labels.symlink_to(stored)
    assert command("prepare", "-d", "pics").code == 0
    assert stored.read_text() == "earlier version" and LabelSpace.load(labels).states == ("blue", "red")
