"""Image files named on the command line: files, folders, patterns, and `-` for a list on stdin."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from duplex.data.text_files import LINE_END
from duplex.errors import UsageError

ENDINGS = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".ico", ".jp2", ".j2k", ".avif"),
)


def list_images(names: Iterable[str], stdin: TextIO) -> list[Path]:
    """Return each file once, in the order of `names`; of folders, the files with image endings, sorted."""
    paths: dict[Path, None] = {}
    for name in names:
        count = len(paths)
        paths.update(dict.fromkeys(_expand(name, stdin)))
        if len(paths) == count and name == "-":
            raise UsageError("stdin lists no files; expected one path per line")
    if not paths:
        raise UsageError("no files were named")
    return list(paths)


def _expand(name: str, stdin: TextIO) -> Iterator[Path]:
    path = Path(name)
    if name == "-":
        yield from (Path(line) for line in LINE_END.split(stdin.read()) if line.strip())
    elif path.is_dir():
        images = list(_in_folder(path))
        if not images:
            raise UsageError(f"{path} holds no images (files ending in .jpg, .png and the like)")
        yield from images
    elif not path.exists() and glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UsageError(f"nothing matches {name}")
        for match in matches:
            yield from _in_folder(Path(match)) if os.path.isdir(match) else [Path(match)]
    else:
        yield path  # a missing file is reported among the answers, as every unreadable one


def _in_folder(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(root) / file for file in sorted(files) if Path(file).suffix.lower() in ENDINGS)
