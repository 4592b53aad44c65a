"""Files appear whole or not at all, whatever interrupts the writer."""

import errno
import os
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from duplex.errors import DuplexError
from duplex.system import files
from duplex.system.files import replace_file, replace_folder, sole_writer, write_text
from tests.subprocesses import ENVIRONMENT


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_and_its_folders_appear_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    with replace_file(path) as scratch:
        scratch.write_text("whole")
        assert not path.exists() and scratch.parent == path.parent
    assert path.read_text() == "whole" and names(path.parent) == ["file.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_block_leaves_the_old_file_and_no_scratch_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file.txt"
    path.write_text("before")
    with pytest.raises(error), replace_file(path) as scratch:
        scratch.write_text("half")
        raise error
    assert path.read_text() == "before" and names(tmp_path) == ["file.txt"]


@pytest.mark.parametrize(("number", "says"), [(errno.ENOSPC, "device; make room"), (errno.EACCES, "denied")])
def test_a_system_error_is_reported_with_its_cause(tmp_path: Path, number: int, says: str) -> None:
    path = tmp_path / "file.txt"
    with pytest.raises(DuplexError, match=says) as caught, replace_file(path) as scratch:
        raise OSError(number, os.strerror(number), str(scratch))
    assert isinstance(caught.value.__cause__, OSError) and str(path) in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_mode_follows_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with replace_file(tmp_path / "file") as scratch:
            scratch.unlink()
            os.close(os.open(scratch, os.O_CREAT | os.O_WRONLY, 0o600))  # as safetensors and tempfile do
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_a_link_is_replaced_and_its_target_unchanged(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("kept")
    (tmp_path / "link").symlink_to("cache")
    write_text(tmp_path / "link", "ours")
    assert (tmp_path / "cache").read_text() == "kept" and (tmp_path / "link").read_text() == "ours"
    assert not (tmp_path / "link").is_symlink()


def test_a_folder_is_never_replaced_by_a_file_nor_a_file_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("folder", "file/below"):
        with pytest.raises(DuplexError, match="choose another place"):
            write_text(tmp_path / name, "text")
    assert (tmp_path / "folder").is_dir() and (tmp_path / "file").is_file()


def test_bytes_reach_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: (happened.append("fsync"), fsync(fd)))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (happened.append("rename"), replace(a, b)))
    write_text(tmp_path / "file", "text")
    with replace_file(tmp_path / "quick", sync=False):
        pass
    assert happened == ["fsync", "rename", "rename"]


KILLED = """
import os, signal, sys
from pathlib import Path
from duplex.system.files import replace_file
with replace_file(Path(sys.argv[1])) as scratch:
    scratch.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_write_removes_the_scratch_file_of_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=ENVIRONMENT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 1 and names(tmp_path)[0].endswith(".partial")
    alive, other = tmp_path / f"file.{os.getppid()}.partial", tmp_path / "file.other.partial"
    alive.touch(), other.touch()
    write_text(path, "whole")
    assert names(tmp_path) == sorted(["file", alive.name, other.name])


@pytest.mark.parametrize("rivals", [1, 3])
def test_of_two_processes_that_write_one_folder_the_later_wins(tmp_path, monkeypatch, rivals) -> None:
    """Another process may create the folder between the removal of the old one and the rename."""
    path, rename, came = tmp_path / "plan", os.replace, list[int]()

    def late(scratch: Path, final: Path) -> None:
        if len(came) < rivals:
            came.append(1)
            final.mkdir()
            (final / "theirs").write_text("theirs")
        rename(scratch, final)

    monkeypatch.setattr("duplex.system.files.os.replace", late)
    with replace_folder(path) as scratch:
        (scratch / "ours").write_text("ours")
    assert (names(path), names(tmp_path), len(came)) == (["ours"], ["plan"], rivals)


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError(errno.ENOSPC, "full"), DuplexError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_the_old_folder_comes_back_if_the_new_one_is_not_moved(tmp_path: Path, monkeypatch, error, raised) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "theirs").write_text("theirs")

    def fail(*_: object) -> None:
        assert not (tmp_path / "plan").exists(), "the old folder has its scratch name"
        raise error

    monkeypatch.setattr("duplex.system.files.os.replace", fail)
    with pytest.raises(raised), replace_folder(tmp_path / "plan"):
        pass
    assert (names(tmp_path / "plan"), names(tmp_path)) == (["theirs"], ["plan"])


KILLED_BETWEEN_RENAMES = """
import os, signal, sys
from pathlib import Path
from duplex.system import files

files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with files.replace_folder(Path(sys.argv[1])) as scratch:
    (scratch / "unfinished").write_text("unfinished")
"""


@pytest.mark.parametrize("fails", (True, False))
def test_a_folder_comes_back_after_a_process_was_killed_between_the_two_renames(tmp_path: Path, fails: bool) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "theirs").write_text("theirs")
    killed = subprocess.run([sys.executable, "-c", KILLED_BETWEEN_RENAMES, str(path)], env=ENVIRONMENT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(names(tmp_path)) == 2, "the old folder and the unfinished one"

    with suppress(KeyError), replace_folder(path) as scratch:
        assert names(path) == ["theirs"]
        (scratch / "ours").write_text("ours")
        if fails:
            raise KeyError
    assert (names(path), names(tmp_path)) == (["theirs" if fails else "ours"], ["model"])


LOCKED = """
import sys
from pathlib import Path
from duplex.system.files import sole_writer
with sole_writer(Path(sys.argv[1]), "extraction", "or give this one another --out"):
    print("holds it", flush=True)
    sys.stdin.read()
"""


def test_the_second_of_two_writers_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    path = tmp_path / "features.h5"
    command = [sys.executable, "-c", LOCKED, str(path)]
    first = subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None and first.stdout.readline() == b"holds it\n"
    says = r"another extraction is writing .*features\.h5; let it finish, or wait"
    with pytest.raises(DuplexError, match=says), sole_writer(path, "extraction", "or wait"):
        pass
    first.kill()
    first.wait()
    with sole_writer(path, "extraction"):
        pass
    assert names(tmp_path) == []
