"""Folders that may not be listed, and limits of open files: one line says which it is and what is missing."""

from __future__ import annotations

import errno
import io
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from duplex.errors import DuplexError
from duplex.features.extract import allow_open_files
from duplex.recognition.inputs import list_images


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


def test_a_small_limit_of_open_files_is_raised_where_the_system_allows_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, before[1]))
        allow_open_files(72)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (72, before[1])
        allow_open_files(70)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (72, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
