"""Download of the three benchmarks to a data root in the layout that `czsl_layout` reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from duplex.data.fetch import DeadLink, fetch
from duplex.data.mirrors import BENCHMARKS, BenchmarkArchive
from duplex.data.unpack import is_archive, unpack
from duplex.errors import DuplexError, require
from duplex.system.files import sha256, write_text

ARCHIVES = ".archives"  # folder below the data root; may be deleted once everything is unpacked


def download(name: str, root: Path, report: Callable[[str], None]) -> None:
    """Download and unpack what is missing of a benchmark; `report` takes lines about the progress."""
    benchmark = BENCHMARKS[require(name, BENCHMARKS, "benchmark")]
    report(f"{name}: {benchmark.terms}\ncite: {benchmark.citation}")
    for archive in benchmark.archives:
        download_archive(archive, root, report)


def download_archive(archive: BenchmarkArchive, root: Path, report: Callable[[str], None]) -> None:
    """Download an archive to ROOT/.archives, unless it is there, and unpack it to `root`.

    The sha256 of an archive is recorded when it is first unpacked, since none is published; another one is refused.
    """
    if all((root / name).exists() for name in archive.take):
        report(f"{', '.join(archive.take)}: already in {root}")
        return
    path = root / ARCHIVES / archive.file
    if not path.exists():
        _fetch_from_mirrors(archive, path, root, report)
    digest, record = sha256(path), path.with_name(path.name + ".sha256")
    known = record.read_text(encoding="utf-8", errors="replace").split(" ")[0] if record.is_file() else ""
    if known and digest != known:
        raise DuplexError(
            f"{path} has the sha256 {digest}, not {known}; delete it to download it again, "
            f"or delete {record} if this one is right"
        )
    report(f"unpacking {path}")
    unpack(path, archive.take, root, archive.limit)
    if not known:
        write_text(record, f"{digest}  {path.name}\n")
        report(f"no hash of {path.name} is published; its sha256 is {digest} and is kept in {record}")


def _fetch_from_mirrors(archive: BenchmarkArchive, path: Path, root: Path, report: Callable[[str], None]) -> None:
    """Download from the first mirror that serves an archive; a web page in its place counts as a dead link."""
    for url in archive.urls:
        warning = "" if url.startswith("https:") else " (not encrypted: the file could be altered on the way)"
        report(f"downloading {url}{warning}")
        try:
            fetch(url, path)
        except DeadLink as error:
            report(str(error))
            continue
        if is_archive(path):
            return
        path.unlink()
        report(f"{url} does not serve an archive")
    raise DuplexError(
        f"no link to {archive.file} works; get it by hand from {archive.page} and put it into {root / ARCHIVES}/, "
        f"or put its {' and '.join(archive.take)} straight into {root}/; then run the command again"
    )
