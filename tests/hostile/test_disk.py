"""Full disks, read-only folders, system errors: one line of error, and no incomplete files."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from duplex.labels import LabelSpace
from tests.hostile.conftest import PARAMS, Command, files
from tests.subprocesses import ENVIRONMENT, ROOT

PREPARE = [sys.executable, str(ROOT / "pipeline/prepare.py"), "pics"]


def prepare(folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """Limit files to `limit` bytes: writing fails as on a full disk."""
    return subprocess.run(
        PREPARE, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip


@pytest.fixture
def table(pics: Path) -> Path:
    lines = [f"{i:05d}.jpg,{('red', 'blue')[i % 2]},{('star', 'moon')[i // 2 % 2]}" for i in range(12)]
    splits = ["train"] * 4 + ["val"] * 4 + ["test"] * 4
    (pics / "table.csv").write_text(
        "image,state,object,split\n" + "".join(f"{a},{b}\n" for a, b in zip(lines, splits, strict=True))
    )
    return pics


@pytest.mark.parametrize("limit", [0, 20, 300])
def test_a_full_disk_leaves_existing_files_unchanged(table: Path, limit: int) -> None:
    """manifest.csv, labels.json, statistics.json and source.json have about 388, 132, 287 and 350 bytes."""
    before = files(table)
    done = prepare(table, limit)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "cannot be written: File too large; make room" in done.stderr
    assert files(table) == before


def test_a_disk_that_fills_up_leaves_no_incomplete_file(table: Path) -> None:
    done = prepare(table, 450)
    assert done.returncode == 0, done.stderr
    written = (table / "artifacts/pics/labels.json").read_bytes()
    (table / "table.csv").write_text(
        (table / "table.csv").read_text() + "".join(f"x{i}.jpg,a,b,val\n" for i in range(9))
    )
    done = prepare(table, 450)
    assert done.returncode == 1 and "manifest.csv cannot be written: File too large; make room" in done.stderr
    assert (table / "artifacts/pics/labels.json").read_bytes() == written
    assert not list(table.rglob("*.partial"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_read_only_folder_is_reported(table: Path) -> None:
    """The folder is mounted read-only in a mount namespace."""
    (table / "artifacts").mkdir(exist_ok=True)
    before = files(table)
    mount = "mount --bind artifacts artifacts && mount -o remount,bind,ro artifacts"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *PREPARE],
        cwd=table, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Read-only file system" in done.stderr
    assert files(table) == before


def test_a_file_in_place_of_a_folder_is_not_replaced(table: Path, command: Command) -> None:
    import shutil

    shutil.rmtree("artifacts")
    Path("artifacts").write_text("precious")
    assert command("prepare", "-d", "pics").refused("artifacts", "cannot be written")
    assert Path("artifacts").read_text() == "precious"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO])
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


def test_a_linked_params_file_stays_a_link(tmp_path: Path, pics: Path, command: Command) -> None:
    (pics / "params.yaml").rename(pics / "kept.yaml")
    (pics / "params.yaml").symlink_to("kept.yaml")
    assert command("data", "remove", "pics").refused("lists only pics")
    assert (pics / "params.yaml").is_symlink() and (pics / "kept.yaml").read_text() == PARAMS
