"""Careless arguments and values: one line that names them, before any work, and nothing left out in silence."""

import errno
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from duplex.errors import DuplexError
from duplex.recognition import recognizer
from duplex.system.entry import escape_unprintable
from tests.hostile.conftest import Command, files


@pytest.mark.parametrize("words", ["extract -d pics --out P", "score P", "predict f.npy --out P", "data add own P"])
def test_a_folder_in_place_of_a_file_is_refused(pics: Path, command: Command, words: str) -> None:
    np.save("f.npy", np.ones((12, 4), np.float32))
    before = files(pics)
    assert command(*("." if word == "P" else word for word in words.split())).refused("")
    assert files(pics) == before


def test_linked_folders_are_counted_and_hidden_files_ignored(tmp_path: Path) -> None:
    (tmp_path / "pics" / ".cache").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pics" / "linked").symlink_to(tmp_path / "elsewhere")
    for name in ("pics/a.jpg", "pics/._a.jpg", "pics/.cache/b.jpg", "elsewhere/c.jpg"):
        (tmp_path / name).write_bytes(b"x")
    log: list[str] = []
    assert recognizer.list_images([str(tmp_path / "pics")], io.StringIO(), log.append) == [tmp_path / "pics" / "a.jpg"]
    assert log == ["1 file skipped: 1 links out of the folder"]


def test_a_folder_that_may_not_be_listed_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refusing(place: str) -> Iterator[os.DirEntry[str]]:
        if place.endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", place)
        return scandir(place)

    (tmp_path / "pictures" / "closed").mkdir(parents=True)
    (tmp_path / "pictures" / "a.png").touch()
    assert len(recognizer.list_images([str(tmp_path / "pictures")], io.StringIO())) == 1
    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DuplexError, match="closed cannot be listed: Permission denied"):
        recognizer.list_images([str(tmp_path / "pictures")], io.StringIO())


def test_names_of_files_do_not_steer_the_terminal(pics: Path, command: Command) -> None:
    assert escape_unprintable("\x1b[31m\n\udcff ωλ 日本") == "\\x1b[31m\\n\\udcff ωλ 日本"
    assert command("score", "\x1b]0;title\x07.npz").refused("\\x1b]0;title\\x07.npz")
    for name in (b"\xff.jpg", b"\x1b[2J.jpg", b"a\nb.jpg"):
        shutil.copy(b"pictures/00000.jpg", b"pictures/" + name)
    shutil.copy("artifacts/pics/manifest.csv", "table.csv")
    result = command("data", "check", "pics")
    assert "\\udcff.jpg" in result.out and "\\x1b[2J.jpg" in result.out and "a\\nb.jpg" in result.out
    assert not set("\x1b\x07") & set(result.out + result.err)
