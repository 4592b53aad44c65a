"""Files to look at, from what a person names: files, folders, patterns, and `-` for a list on stdin."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from duplex.data.text import LINE_END
from duplex.errors import UsageError

ENDINGS = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".ico", ".jp2", ".j2k", ".avif"),
)


def gather(names: Iterable[str], lines: TextIO) -> list[Path]:
    """Every file once, in the order in which it is named; of folders, the pictures by their ending, sorted."""
    found: dict[Path, None] = {}
    for name in names:
        before = len(found)
        found.update(dict.fromkeys(_named(name, lines)))
        if len(found) == before and name == "-":
            raise UsageError("stdin lists no files; give one path a line")
    if not found:
        raise UsageError("no files were named")
    return list(found)


def _named(name: str, lines: TextIO) -> Iterator[Path]:
    path = Path(name)
    if name == "-":
        yield from (Path(line) for line in LINE_END.split(lines.read()) if line.strip())
    elif path.is_dir():
        pictures = list(_pictures(path))
        if not pictures:
            raise UsageError(f"{path} holds no pictures (files ending in .jpg, .png and the like)")
        yield from pictures
    elif not path.exists() and glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UsageError(f"nothing matches {name}")
        for match in matches:
            yield from _pictures(Path(match)) if os.path.isdir(match) else [Path(match)]
    else:
        yield path  # one that is missing gets a line of its own, as every other that cannot be read


def _pictures(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(root) / file for file in sorted(files) if Path(file).suffix.lower() in ENDINGS)
