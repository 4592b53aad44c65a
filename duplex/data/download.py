"""The three benchmarks from their mirrors to a data root in the standard layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from duplex.data.fetch import DeadLink, fetch
from duplex.data.mirrors import BENCHMARKS, Archive
from duplex.data.unpack import is_archive, unpack
from duplex.errors import DuplexError, pick

ARCHIVES = ".archives"  # below the data root; may be deleted once everything is unpacked


def download(name: str, root: Path, say: Callable[[str], None]) -> None:
    """Fetch and unpack what is not there yet. Archives stay in `ROOT/.archives`."""
    benchmark = BENCHMARKS[pick(name, BENCHMARKS, "benchmark")]
    say(f"{name}: {benchmark.terms}\ncite: {benchmark.citation}")
    for archive in benchmark.archives:
        download_archive(archive, root, say)


def download_archive(archive: Archive, root: Path, say: Callable[[str], None]) -> None:
    if all((root / name).exists() for name in archive.take):
        say(f"{', '.join(archive.take)}: already in {root}")
        return
    path = root / ARCHIVES / archive.file
    if not path.exists():
        _fetch_first(archive, path, root, say)
    say(f"unpacking {path}")
    unpack(path, archive.take, root, archive.limit)


def _fetch_first(archive: Archive, path: Path, root: Path, say: Callable[[str], None]) -> None:
    """From the first mirror that has it. A page served in the archive's place counts as a dead link."""
    for url in archive.urls:
        say(f"fetching {url}")
        try:
            fetch(url, path)
        except DeadLink as error:
            say(str(error))
            continue
        if is_archive(path):
            return
        path.unlink()
        say(f"{url} answers with something that is no archive")
    raise DuplexError(
        f"no link to {archive.file} works; get it by hand from {archive.page} and put it into {root / ARCHIVES}/, "
        f"or put its {' and '.join(archive.take)} straight into {root}/; then run the command again"
    )
