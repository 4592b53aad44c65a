"""Download MIT-States, UT-Zappos and C-GQA in the layout that `czsl_layout` reads; a broken transfer resumes."""

from __future__ import annotations

import os
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
    """Download a benchmark's archive to ROOT/.archives, unless it is there, and unpack the wanted files to `root`.

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
    """Download an archive from the first of its URLs that serves it; raise `DuplexError` if none does.

    A URL that serves something else, such as a web page, is skipped.
    """
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

    Raise DeadLink if the URL does not serve a file, DuplexError if the connection keeps breaking, the disk cannot be
    written, or another process downloads the same file.
    """
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DuplexError(
            f"{path.parent} cannot be created: {error.strerror}; choose another folder with --to"
        ) from error
    with sole_writer(path, "download"):
        partial = _PartialFile(url, path)
        size, stalls = partial.size(), 0
        while not _attempt(url, partial):
            stalls = 0 if partial.size() > size else stalls + 1
            size = partial.size()
            if stalls >= MAX_STALLS:
                raise DuplexError(
                    f"the connection to {url} keeps breaking; {size:,} bytes are kept in {partial.path}, "
                    "and the same command continues from there"
                )
            time.sleep(0.2 * stalls)
        os.replace(partial.path, path)
        partial.record.unlink()
    return path


class _PartialFile:
    """The downloaded part of a file, with a record of its URL and version (ETag or date).

    The record keeps a resumed download from mixing two versions of a file.
    """

    def __init__(self, url: str, path: Path) -> None:
        self.url = url
        self.path = path.with_name(path.name + ".partial")
        self.record = path.with_name(path.name + ".partial.version")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def version(self) -> str:
        """Return the version (ETag or date) of the downloaded part; "" if unknown or if the part is of another URL."""
        if not self.record.is_file():
            return ""
        url, _, version = self.record.read_text(encoding="utf-8", errors="replace").partition("\n")
        return version if url == self.url else ""

    def write(self, response: requests.Response, start: int, total: int | None) -> None:
        """Write the body of an HTTP response to the partial file from byte `start` on, and show a progress bar.

        total: size of the complete file in bytes, for the progress bar; None if unknown.
        """
        bar = tqdm(desc=self.path.stem, initial=start, total=total, unit="B", unit_scale=True, disable=None)
        try:
            with self.path.open("ab" if start else "wb") as file, bar:
                for chunk in response.iter_content(CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))
        except requests.RequestException:
            raise
        except OSError:
            with report_write_errors(self.path):
                raise


def _attempt(url: str, partial: _PartialFile) -> bool:
    """Request the missing bytes of a download once; return whether the file is complete."""
    version = partial.version()
    start = partial.size() if version else 0
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    try:
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            continues = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            if response.status_code == 416 or (response.status_code == 206 and not continues):
                partial.record.unlink(missing_ok=True)  # start over
                return False
            response.raise_for_status()
            if response.status_code != 206:
                start = 0
                version = response.headers.get("ETag", "")
                if not version or version.startswith("W/"):  # If-Range may carry a strong ETag or a date
                    version = response.headers.get("Last-Modified", "")
                write_text(partial.record, f"{url}\n{version}")
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdigit() else None
            partial.write(response, start, total)
            return total is None or partial.size() == total
    except (requests.HTTPError, requests.exceptions.InvalidURL, requests.exceptions.MissingSchema) as error:
        raise DeadLink(f"{url} does not answer with the file ({error})") from error
    except requests.ConnectionError as error:
        if not partial.size():
            raise DeadLink(f"{url} cannot be reached ({type(error).__name__})") from error
        return False
    except requests.RequestException:
        return False
