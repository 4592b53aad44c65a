"""List the image files named on the command line by files, folders, patterns, and `-` for a list on stdin."""

from __future__ import annotations

import glob
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO

from duplex.data.image_tree import IGNORED, IMAGE_SUFFIXES, describe_skipped, suffix_of
from duplex.data.text_files import LINE_END
from duplex.errors import DuplexError, UsageError

INTERVAL = 2.0  # seconds between lines of progress


def list_images(names: Iterable[str], stdin: TextIO, log: Callable[[str], None] = lambda line: None) -> list[Path]:
    """The files that `names` (files, folders, patterns, `-`) stand for, each once, in order, a folder's sorted.

    `log` is called with lines of progress while a large folder is listed, and with the number of files skipped.
    """
    paths: dict[Path, None] = {}
    folders = _Folders(log)
    for name in names:
        count = len(paths)
        paths.update(dict.fromkeys(_expand(name, stdin, folders)))
        if len(paths) == count and name == "-":
            raise UsageError("stdin lists no files; expected one path per line")
    if not paths:
        raise UsageError("no files were named")
    if folders.skipped:
        total = folders.skipped.total()
        log(f"{total:,} {'file' if total == 1 else 'files'} skipped: {describe_skipped(folders.skipped)}")
    return list(paths)


class _Folders:
    """Lists the images in folders, except hidden ones, and counts what it skips: linked folders, and other files."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.skipped: Counter[str] = Counter()
        self._log = log
        self._images = 0
        self._next = time.monotonic() + INTERVAL

    def images(self, folder: Path) -> Iterator[Path]:
        for root, folders, files in os.walk(folder, onerror=_refuse):
            folders[:] = sorted(name for name in folders if not name.startswith(IGNORED))
            if links := sum(os.path.islink(os.path.join(root, name)) for name in folders):
                self.skipped["linked folders"] += links  # `os.walk` does not enter them
            for file in sorted(name for name in files if not name.startswith(IGNORED)):
                if suffix_of(file) in IMAGE_SUFFIXES:
                    self._images += 1
                    yield Path(root) / file
                else:
                    self.skipped[suffix_of(file)] += 1
            if time.monotonic() > self._next:
                self._log(f"listing {root}: {self._images:,} images and {self.skipped.total():,} other files so far")
                self._next = time.monotonic() + INTERVAL


def _refuse(error: OSError) -> NoReturn:
    raise DuplexError(
        f"{error.filename} cannot be listed: {error.strerror}; fix that, or name other folders"
    ) from error


def _expand(name: str, stdin: TextIO, folders: _Folders) -> Iterator[Path]:
    path = Path(name)
    if name == "-":
        text = stdin.read()
        if "\0" in text:
            raise UsageError("stdin holds zero bytes, as UTF-16 does; expected UTF-8 text, one path per line")
        yield from (Path(line) for line in LINE_END.split(text) if line.strip())
    elif path.is_dir():
        images = list(folders.images(path))
        if not images:
            skipped = f"; skipped: {describe_skipped(folders.skipped)}" if folders.skipped else ""
            raise UsageError(f"{path} holds no images (files ending in .jpg, .png and the like){skipped}")
        yield from images
    elif not path.exists() and glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UsageError(f"no file matches {name}")
        for match in matches:
            yield from folders.images(Path(match)) if os.path.isdir(match) else [Path(match)]
    else:
        yield path  # a missing file is reported among the answers, as every unreadable one
