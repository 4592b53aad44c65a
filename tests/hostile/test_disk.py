"""A full disk, a folder that may not be written to, a reader that leaves: one sentence, and no half files."""

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
from tests.hostile.conftest import PARAMS, Command
from tests.subprocesses import ENVIRONMENT, ROOT

PREPARE = [sys.executable, str(ROOT / "pipeline/prepare.py"), "pics"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def small_disk(limit: int) -> None:
    """No file may grow beyond `limit` bytes: what a full disk does to whoever writes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.fixture
def table(pics: Path) -> Path:
    lines = [f"{i:05d}.jpg,{('red', 'blue')[i % 2]},{('star', 'moon')[i // 2 % 2]}" for i in range(12)]
    splits = ["train"] * 4 + ["val"] * 4 + ["test"] * 4
    (pics / "table.csv").write_text(
        "image,state,object,split\n" + "".join(f"{a},{b}\n" for a, b in zip(lines, splits, strict=True))
    )
    return pics


@pytest.mark.parametrize("limit", [0, 20, 300])
def test_a_full_disk_leaves_what_was_there(table: Path, limit: int) -> None:
    """As the pipeline's script: manifest, labels and statistics are 388, 132 and 287 bytes or so."""
    before = files(table)
    done = subprocess.run(
        PREPARE, cwd=table, env=ENVIRONMENT, capture_output=True, text=True, check=False,
        preexec_fn=lambda: small_disk(limit),
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "cannot be written: the disk is full; make room" in done.stderr
    assert files(table) == before


def test_a_full_disk_in_the_middle_leaves_whole_files_alone(table: Path) -> None:
    done = subprocess.run(
        PREPARE, cwd=table, env=ENVIRONMENT, capture_output=True, text=True, check=False,
        preexec_fn=lambda: small_disk(450),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = (table / "artifacts/pics/labels.json").read_bytes()
    (table / "table.csv").write_text(
        (table / "table.csv").read_text() + "".join(f"x{i}.jpg,a,b,val\n" for i in range(9))
    )
    done = subprocess.run(
        PREPARE, cwd=table, env=ENVIRONMENT, capture_output=True, text=True, check=False,
        preexec_fn=lambda: small_disk(450),
    )  # fmt: skip
    assert done.returncode == 1 and "manifest.csv cannot be written: the disk is full" in done.stderr
    assert (table / "artifacts/pics/labels.json").read_bytes() == written
    assert not list(table.rglob("*.partial"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_folder_that_may_not_be_written_to(table: Path) -> None:
    """A read-only file system, in a mount namespace of its own."""
    (table / "artifacts").mkdir(exist_ok=True)
    before = files(table)
    mount = "mount --bind artifacts artifacts && mount -o remount,bind,ro artifacts"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *PREPARE],
        cwd=table, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "read-only file system" in done.stderr
    assert files(table) == before


def test_a_file_where_a_folder_should_be(table: Path, command: Command) -> None:
    import shutil

    shutil.rmtree("artifacts")
    Path("artifacts").write_text("precious")
    assert command("prepare", "-d", "pics").refused("artifacts", "is a file")
    assert Path("artifacts").read_text() == "precious"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_whatever_the_system_says_of_a_write(
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


def test_modes_follow_the_umask(table: Path, command: Command) -> None:
    before = os.umask(0o027)
    try:
        assert command("prepare", "-d", "pics").code == 0
        np.save("f.npy", np.ones((12, 4), np.float32))
        assert command("cache", "import", "f.npy", "-d", "pics").code == 0
    finally:
        os.umask(before)
    written = list((table / "artifacts/pics").iterdir())
    assert {path.stat().st_mode & 0o777 for path in written} == {0o640}, written


def test_links_into_a_store_are_replaced_not_written_through(table: Path, command: Command) -> None:
    """As `dvc config cache.type symlink` leaves outputs."""
    assert command("prepare", "-d", "pics").code == 0
    labels = table / "artifacts/pics/labels.json"
    stored = table / "stored"
    labels.rename(stored)
    stored.write_text("of another time")
    labels.symlink_to(stored)
    assert command("prepare", "-d", "pics").code == 0
    assert stored.read_text() == "of another time" and LabelSpace.load(labels).states == ("blue", "red")


def test_a_params_file_that_is_a_link_is_edited_where_it_lies(tmp_path: Path, pics: Path, command: Command) -> None:
    (pics / "params.yaml").rename(pics / "kept.yaml")
    (pics / "params.yaml").symlink_to("kept.yaml")
    assert command("data", "remove", "pics").refused("names only pics")
    assert (pics / "params.yaml").is_symlink() and (pics / "kept.yaml").read_text() == PARAMS
