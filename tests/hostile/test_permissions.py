"""Folders that may not be listed, and limits of open files: one line says which it is and what is missing."""

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from duplex.errors import DuplexError
from duplex.recognition.recognizer import list_images


def test_a_folder_that_may_not_be_listed_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("open", "closed"):
        Path("pictures", name).mkdir(parents=True)
        Path("pictures", name, "a.png").write_bytes(b"")
    assert len(list_images(["pictures"], io.StringIO())) == 2
    scandir = os.scandir

    def refusing(place: str) -> Iterator[os.DirEntry[str]]:
        if place.rstrip("/").endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refusing)
    for named in ("pictures", "pictures/closed"):
        with pytest.raises(DuplexError, match="closed cannot be listed: Permission denied"):
            list_images([named], io.StringIO())
