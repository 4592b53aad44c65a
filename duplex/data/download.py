"""Download MIT-States, UT-Zappos and C-GQA in the layout that `czsl_layout` reads; a broken transfer resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import requests
from tqdm import tqdm

from duplex.data.mirrors import BENCHMARKS, BenchmarkArchive
from duplex.data.unpack import is_archive, unpack
from duplex.errors import DuplexError, require
from duplex.system.files import report_write_errors, sha256, sole_writer, write_text

ARCHIVES = ".archives"  # folder below the data root; may be deleted once everything is unpacked


def download(name: str, root: Path, report: Callable[[str], None]) -> None:
    """Download and unpack the missing parts of a benchmark; `report` is called with lines about the progress."""
    benchmark = BENCHMARKS[require(name, BENCHMARKS, "benchmark")]
    report(f"{name}: {benchmark.terms}\ncite: {benchmark.citation}")
    for archive in benchmark.archives:
        download_archive(archive, root, report)


def download_archive(archive: BenchmarkArchive, root: Path, report: Callable[[str], None]) -> None:
    """Download an archive to ROOT/.archives, unless it is there, and unpack the wanted files to `root`.

    No sha256 of the archives is published. It is recorded when an archive is first unpacked; later, a file with another
    sha256 is refused.
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
    """Download an archive from the first of its URLs that serves it; others may serve a web page instead."""
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


CHUNK = 1 << 16  # bytes; at most this much of a broken transfer is downloaded twice
TIMEOUT = (15, 60)  # seconds to connect, seconds of silence
MAX_STALLS = 5  # attempts in a row that bring no byte


class DeadLink(DuplexError):
    """Raised if a URL does not serve the wanted file."""


def fetch(url: str, path: Path) -> Path:
    """Download `url` to `path` unless the file exists, continuing what an earlier call left in FILE.partial.

    Two versions of an archive in one file are noticed when it is unpacked, by its checksums.

    Raises:
        DeadLink: if the URL does not serve a file.
        DuplexError: if the connection keeps breaking, the disk cannot be written, or another process downloads the
            same file.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with sole_writer(path, "download"):
        size = _size(partial)
        stalls = 0
        while not _attempt(url, partial):
            stalls = 0 if _size(partial) > size else stalls + 1
            size = _size(partial)
            if stalls >= MAX_STALLS:
                raise DuplexError(
                    f"the connection to {url} keeps breaking; {size:,} bytes are kept in {partial}, "
                    "and the same command continues from there"
                )
            time.sleep(0.2 * stalls)
        partial.replace(path)
    return path


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _attempt(url: str, partial: Path) -> bool:
    """Request the missing bytes of a download once; return whether the file is complete."""
    start = _size(partial)
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            continues = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            if response.status_code == 416 or (response.status_code == 206 and not continues):
                partial.unlink(missing_ok=True)  # start over
                return False
            response.raise_for_status()
            if response.status_code != 206:
                start = 0
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdigit() else None
            _write(response, partial, start, total)
            return total is None or _size(partial) == total
    except (requests.HTTPError, requests.exceptions.InvalidURL, requests.exceptions.MissingSchema) as error:
        raise DeadLink(f"{url} does not answer with the file ({error})") from error
    except requests.ConnectionError as error:
        if not _size(partial):
            raise DeadLink(f"{url} cannot be reached ({type(error).__name__})") from error
        return False
    except requests.RequestException:
        return False


def _write(response: requests.Response, partial: Path, start: int, total: int | None) -> None:
    bar = tqdm(desc=partial.stem, initial=start, total=total, unit="B", unit_scale=True, disable=None)
    try:
        with partial.open("ab" if start else "wb") as file, bar:
            for chunk in response.iter_content(CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
    except requests.RequestException:
        raise
    except OSError:
        with report_write_errors(partial):
            raise
