"""The three benchmarks from their mirrors to a data root in the standard layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from duplex.data.fetch import DeadLink, fetch
from duplex.data.mirrors import BENCHMARKS, Archive
from duplex.data.unpack import is_archive, unpack
from duplex.errors import DuplexError, require
from duplex.system.files import sha256, write_text

ARCHIVES = ".archives"  # below the data root; may be deleted once everything is unpacked


def download(name: str, root: Path, say: Callable[[str], None]) -> None:
    """Fetch and unpack what is not there yet. Archives stay in `ROOT/.archives`."""
    benchmark = BENCHMARKS[require(name, BENCHMARKS, "benchmark")]
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
    found = _recognised(archive, path)
    say(f"unpacking {path}")
    unpack(path, archive.take, root, archive.limit)
    _remember(archive, path, found, say)


def _recognised(archive: Archive, path: Path) -> str:
    """Its hash: the known one, or that which it had when it was first unpacked here."""
    found, record, known = sha256(path), _record(path), archive.sha256
    if not known and record.is_file():
        known = record.read_text(encoding="utf-8", errors="replace").split(" ")[0]
    if known and found != known:
        trust = "" if archive.sha256 else f", or delete {record} if this one is right"
        raise DuplexError(f"{path} has the sha256 {found}, not {known}; delete it to fetch it again{trust}")
    return found


def _remember(archive: Archive, path: Path, found: str, say: Callable[[str], None]) -> None:
    """Of an archive that has shown itself to be whole."""
    record = _record(path)
    if not archive.sha256 and not record.is_file():
        write_text(record, f"{found}  {path.name}\n")
        say(f"no hash of {path.name} is published; its sha256 is {found} and is kept in {record}")


def _record(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _fetch_first(archive: Archive, path: Path, root: Path, say: Callable[[str], None]) -> None:
    """From the first mirror that has it. A page served in the archive's place counts as a dead link."""
    for url in archive.urls:
        say(
            f"fetching {url}"
            + ("" if url.startswith("https:") else " (not encrypted: anyone on the way may change it)")
        )
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
