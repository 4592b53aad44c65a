"""An interrupted extraction, run again, writes the same bytes as an uninterrupted one."""

import contextlib
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from duplex.errors import DuplexError
from duplex.features.file import FIRST_BAD, PENDING, PartialCache, partial_path, read_features
from tests.features.killed import alone, main
from tests.features.pictures import write_pictures
from tests.subprocesses import Forked


def start(root: Path, out: Path) -> Forked:
    return Forked(alone, root, out)


def done_rows(out: Path) -> int:
    if not partial_path(out).exists():
        return 0
    cache = PartialCache(out)
    cache.close()
    return int((cache.statuses != PENDING).sum())


def wait_for_rows(out: Path, rows: int, process: Forked) -> None:
    while done_rows(out) < rows and process.poll() is None:
        time.sleep(0.01)


def begin(folder: Path, count: int, rows: int) -> tuple[Path, Path, Forked]:
    root, out = folder / "pictures", folder / "out" / "features.h5"
    write_pictures(root, count)
    process = start(root, out)
    wait_for_rows(out, rows, process)
    return root, out, process


@pytest.mark.slow
def test_killed_at_four_random_moments(tmp_path: Path) -> None:
    root, count = tmp_path / "pictures", 1000
    whole, broken = (tmp_path / name / "features.h5" for name in ("whole", "broken"))
    write_pictures(root, count)
    (root / "00005.jpg").write_bytes(b"not an image")
    assert start(root, whole).communicate(timeout=120)[0] == "done 0\n"
    progress = []
    draw = random.Random(0)
    for rows in sorted(draw.choices(range(0, 700), k=4)):
        process = start(root, broken)
        wait_for_rows(broken, max(0, rows - 300), process)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.wait()  # its worker lives on for seconds
        assert not broken.exists(), "the moments are too late to interrupt anything"
        progress.append(done_rows(broken))
    assert progress == sorted(progress), "a kill lost rows"
    output, errors = start(root, broken).communicate(timeout=120)
    assert output.startswith("done "), errors
    assert int(output.split()[1]) == progress[-1] > 0
    assert broken.read_bytes() == whole.read_bytes()
    assert {path.name for path in broken.parent.iterdir()} == {"features.h5"}
    assert (read_features(broken).statuses >= FIRST_BAD).tolist() == [row == 5 for row in range(count)]


def test_a_second_extraction_into_one_path_is_refused(tmp_path: Path) -> None:
    root, out, first = begin(tmp_path, 600, 8)
    with pytest.raises(DuplexError, match=r"another extraction is writing .*another --out"):
        main(root, out)
    assert first.poll() is None
    first.kill()
    first.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_reported_and_finished_rows_are_kept(tmp_path: Path) -> None:
    root, disk = tmp_path / "pictures", tmp_path / "disk"
    write_pictures(root, 400)
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this container may not mount")
    out = disk / "features.h5"
    try:
        process = start(root, out)
        wait_for_rows(out, 16, process)
        with open(disk / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(b"x" * 4096):
                pass
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1 and "Traceback" not in errors
        assert "No space left on device" in errors and "run the same command again" in errors
        kept = done_rows(out)
        assert 16 <= kept < 400
        (disk / "filler").unlink()
        assert start(root, out).communicate(timeout=120)[0] == f"done {kept}\n"
    finally:
        subprocess.run(["umount", str(disk)], check=True)
