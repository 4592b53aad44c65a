"""Find the image files below a data root; links that lead out of the root raise an error."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from duplex.errors import DuplexError

IMAGE_SUFFIXES = {
    ".jpg", ".jpeg", ".jpe", ".png", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp",
    ".ppm", ".pgm", ".pbm", ".pnm", ".ico", ".jp2", ".j2k", ".avif",
}  # fmt: skip
DOCUMENTS = frozenset({".txt", ".csv", ".tsv", ".parquet", ".pq", ".json", ".t7", ".md", ".html"})  # lists and notes
IGNORED = (".", "__MACOSX")  # beginnings of the names of files and folders that are never listed
SHOWN = 6  # kinds of skipped files in a message
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


def suffix_of(name: str) -> str:
    """The suffix of a file's name in lower case, or "without a suffix"."""
    return os.path.splitext(name)[1].lower() or "without a suffix"


def describe_skipped(counts: Mapping[str, int]) -> str:
    """The numbers of skipped files by kind as text, the most frequent first: `10 .heic, 2 without a suffix`."""
    common = Counter(counts).most_common(SHOWN)
    rest = sum(counts.values()) - sum(count for _, count in common)
    return ", ".join(f"{count:,} {kind}" for kind, count in [*common, *([("others", rest)] if rest else [])])


class ImageTree:
    """Image files below a root folder. Each folder is listed only once, which makes checks of 50,000 files fast."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._real = os.path.realpath(root)
        self._folders: dict[str, dict[str, bool]] = {}  # folder -> name of a file in it -> whether it stays inside
        self.skipped: dict[str, list[str]] = {}  # kind, such as a suffix -> paths skipped by the last `images`
        if not os.path.isdir(self._real):
            raise DuplexError(f"the data root {root} is not a folder; correct its path")

    def has(self, path: str) -> bool:
        """Whether a file exists at a path below the root; raises DuplexError for a link that leaves the root."""
        folder, _, name = path.rpartition("/")
        if folder not in self._folders:
            self._folders[folder] = self._files(folder)
        inside = self._folders[folder].get(name)
        if inside is False:
            raise self._leaves(path)
        return inside is not None

    def images(self, *, refuse_links: bool = True) -> Iterator[str]:
        """Yield the path of every image below the root, in a fixed order.

        Hidden files and folders, and documents (such as .txt and .csv), are ignored. The paths of other files, and of
        linked folders, are added to the attribute `skipped`.

        Args:
            refuse_links: raise DuplexError for a link that leaves the root; otherwise it is added to `skipped`.
        """
        self.skipped = {}
        yield from self._walk("", refuse_links)

    def _walk(self, folder: str, refuse_links: bool) -> Iterator[str]:
        prefix = f"{folder}/" if folder else ""
        for entry in sorted(self._scan(folder), key=lambda entry: entry.name):
            path, suffix = prefix + entry.name, suffix_of(entry.name)
            if entry.name.startswith(IGNORED):
                continue
            if entry.is_symlink() and not self._inside(entry.path):
                if refuse_links:
                    raise self._leaves(path)
                self.skipped.setdefault("links out of the folder", []).append(path)
            elif suffix in IMAGE_SUFFIXES and not entry.is_file():
                no_folder = "broken links" if entry.is_symlink() else "devices and pipes"
                kind = "folders named like an image" if entry.is_dir() else no_folder
                self.skipped.setdefault(kind, []).append(path)
            elif entry.is_dir(follow_symlinks=False):
                yield from self._walk(path, refuse_links)
            elif suffix in IMAGE_SUFFIXES:
                yield path
            elif suffix not in DOCUMENTS:
                kind = "linked folders" if entry.is_dir() else suffix
                self.skipped.setdefault(kind, []).append(path)

    def _files(self, folder: str) -> dict[str, bool]:
        if not self._inside(os.path.join(self._real, folder)):
            raise self._leaves(folder)
        listed = {}
        for entry in self._scan(folder):
            inside = not entry.is_symlink() or self._inside(entry.path)
            if not inside or entry.is_file():
                listed[entry.name] = inside
        return listed

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(os.path.join(self._real, folder)) as entries:
                return list(entries)
        except OSError as error:
            if error.errno in ABSENT:
                return []
            raise DuplexError(f"{self.root / folder} cannot be listed: {error.strerror}") from error

    def _inside(self, path: str) -> bool:
        real = os.path.realpath(path)
        return real == self._real or real.startswith(self._real.rstrip(os.sep) + os.sep)

    def _leaves(self, path: str) -> DuplexError:
        return DuplexError(
            f"{self.root / path} is a link that leaves the data root; put the files themselves there, "
            "or set the data root to the folder that it leads to"
        )
