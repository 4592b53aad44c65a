"""Whatever stops an extraction, running it again gives the file of a run that nothing stopped."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from duplex.features.store import PENDING, PartialCache, open_features, partial_path
from tests.features.pictures import write_pictures
from tests.subprocesses import ENVIRONMENT, ROOT


def start(name: str, root: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.features.killed", name, str(root), str(out)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n", process.communicate()
    return process


def done_rows(out: Path) -> int:
    if not partial_path(out).exists():
        return 0
    cache = PartialCache(out)
    cache.close()
    return int((cache.marks != PENDING).sum())


def wait_for_rows(out: Path, rows: int, process: subprocess.Popen[str]) -> None:
    while done_rows(out) < rows and process.poll() is None:
        time.sleep(0.01)


def kill_and_resume(name: str, folder: Path, count: int, moments: list[float]) -> None:
    """Kill with SIGKILL at each moment (seconds after the encoder is ready), then let it end."""
    root, whole, broken = folder / "pictures", folder / "whole" / "features.h5", folder / "broken" / "features.h5"
    write_pictures(root, count)
    (root / "00005.jpg").write_bytes(b"not a picture")
    assert start(name, root, whole).communicate(timeout=120)[0] == "done 0\n"
    progress = []
    for moment in moments:
        process = start(name, root, broken)
        time.sleep(moment)
        process.kill()
        process.communicate()
        assert not broken.exists(), "the moments are too late to interrupt anything"
        progress.append(done_rows(broken))
    assert progress == sorted(progress), "a kill lost rows"
    output, errors = start(name, root, broken).communicate(timeout=120)
    assert output.startswith("done "), errors
    assert int(output.split()[1]) >= progress[-1] > 0
    assert broken.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in broken.parent.iterdir()) == ["features.h5"]
    assert open_features(broken).reasons == ["not a picture"]


def test_killed_twice(encoder_name: str, tmp_path: Path) -> None:
    kill_and_resume(encoder_name, tmp_path, 400, [0.6, 0.5])


@pytest.mark.slow
def test_killed_at_ten_random_moments(encoder_name: str, tmp_path: Path) -> None:
    draw = random.Random(0)
    kill_and_resume(encoder_name, tmp_path, 3000, [draw.uniform(0.1, 1.0) for _ in range(10)])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_ends_cleanly_and_says_how_to_go_on(encoder_name: str, tmp_path: Path, number: int) -> None:
    root, out = tmp_path / "pictures", tmp_path / "out" / "features.h5"
    write_pictures(root, 400)
    process = start(encoder_name, root, out)
    wait_for_rows(out, 16, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in errors
    assert "of 400 rows encoded; run the same command again to go on" in errors
    assert done_rows(out) >= 16
    assert [path.name for path in out.parent.iterdir()] == ["features.h5.partial"]


def test_a_second_extraction_into_one_path_is_refused(encoder_name: str, tmp_path: Path) -> None:
    root, out = tmp_path / "pictures", tmp_path / "out" / "features.h5"
    write_pictures(root, 400)
    first = start(encoder_name, root, out)
    wait_for_rows(out, 8, first)
    _, errors = start(encoder_name, root, out).communicate(timeout=60)
    assert f"another extraction (process {first.pid}) is writing" in errors and "Traceback" not in errors
    assert first.communicate(timeout=120)[0] == "done 0\n"
    assert out.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_a_sentence_and_what_was_written_stays_usable(encoder_name: str, tmp_path: Path) -> None:
    root, disk = tmp_path / "pictures", tmp_path / "disk"
    write_pictures(root, 400)
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this container may not mount")
    out = disk / "features.h5"
    try:
        process = start(encoder_name, root, out)
        wait_for_rows(out, 16, process)
        (disk / "filler").write_bytes(b"")
        with open(disk / "filler", "wb", buffering=0) as filler:
            try:
                while filler.write(b"x" * 4096):
                    pass
            except OSError:
                pass
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1 and "Traceback" not in errors
        assert "the disk is full" in errors and "run the same command again" in errors
        kept = done_rows(out)
        assert 16 <= kept < 400
        (disk / "filler").unlink()
        assert start(encoder_name, root, out).communicate(timeout=120)[0] == f"done {kept}\n"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_without_room_is_refused_before_anything_is_encoded(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(Exception, match="make room or choose --out"):
        run()
