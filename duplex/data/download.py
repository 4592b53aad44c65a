"""Download MIT-States, UT-Zappos and C-GQA, and the Parquet files of data sets on the Hugging Face hub.

An interrupted download is resumed. Archives are not trusted: only the wanted files are unpacked,
only below the given folder, and only up to a limit of bytes.
"""

from __future__ import annotations

import gzip
import lzma
import re
import shutil
import stat
import struct
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import pandas as pd
import requests
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TimeRemainingColumn

from duplex.data.tables import read_benchmarks, read_table, write_manifest
from duplex.errors import DuplexError, UsageError, require
from duplex.labels import SPLITS
from duplex.system.files import expanded_path, report_write_errors, sha256, sole_writer, write_text
from duplex.system.processes import track

CHUNK = 1 << 16  # bytes; at most this much of a broken transfer is downloaded twice
TIMEOUT = (15, 60)  # seconds to connect, seconds of silence
MAX_STALLS = 5  # attempts in a row that bring no byte
ARCHIVES = ".archives"  # folder below the data root; may be deleted once everything is unpacked
UNPACK_CHUNK = 1 << 20
REFUSED = "so this is not the published archive; delete it and run the command again"
DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, struct.error, EOFError,
    NotImplementedError, RuntimeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class BenchmarkArchive:
    """An archive of a published data set: where to download it, and which files to unpack."""

    file: str  # its name
    urls: Sequence[str]  # tried in this order, encrypted ones first
    take: Mapping[str, Sequence[str]]  # name below the data root -> possible names in the archive
    limit: int  # most bytes that may be unpacked
    page: str  # web page to find the archive when no link works


@dataclass(frozen=True)
class Benchmark:
    """A published data set: its archives, terms and citation."""

    archives: tuple[BenchmarkArchive, ...]
    terms: str
    citation: str
    page: str = ""  # web page of a data set without archives


BENCHMARKS = {
    name: Benchmark(
        tuple(BenchmarkArchive(**each) for each in record.get("archives", ())),
        record["terms"],
        record["citation"],
        record.get("page", ""),
    )
    for name, record in read_benchmarks().items()
}


@dataclass(frozen=True)
class ArchiveMember:
    name: str
    regular: bool  # False for links and devices
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, take: Mapping[str, Sequence[str]], root: Path, limit: int) -> None:
    """Unpack files and folders of an archive into `root`; each appears there complete or not at all.

    take: name below `root` -> its possible names in the archive; limit: most bytes to write.
    """
    staging = root / f".{archive.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        parts = _write_parts(archive, take, staging, limit)
        missing = [name for name in take if name not in parts]
        if missing:
            raise DuplexError(f"{archive} lacks {take[missing[0]][0]!r}; replace it with the published archive")
        for name in take:
            if not (root / name).exists():
                (staging / name).rename(root / name)
    except DAMAGED as error:
        raise DuplexError(f"{archive} is damaged ({error}); delete it and run the command again") from error
    except OSError as error:
        raise DuplexError(f"{archive} cannot be unpacked to {root}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_parts(archive: Path, take: Mapping[str, Sequence[str]], staging: Path, limit: int) -> set[str]:
    parts: set[str] = set()
    left = limit
    with _members(archive) as (members, total):
        for member in track(members, f"unpacking {archive.name}", total):
            place = _place(_safe(member.name, archive), take)
            if place is None:
                continue
            if not member.regular:
                raise DuplexError(f"{archive}: {member.name!r} is a link or a device, {REFUSED}")
            target = staging.joinpath(*place)
            target.parent.mkdir(parents=True, exist_ok=True)
            left -= _copy(member, target, left, archive, limit)
            parts.add(place[0])
    return parts


def _copy(member: ArchiveMember, target: Path, left: int, archive: Path, limit: int) -> int:
    source = member.open()
    if source is None:
        raise DuplexError(f"{archive}: {member.name!r} has no content, {REFUSED}")
    written = 0  # counted, since the sizes that an archive states may be false
    with source, target.open("wb") as file:
        while chunk := source.read(UNPACK_CHUNK):
            written += len(chunk)
            if written > left:
                raise DuplexError(f"{archive} exceeds its limit of {limit:,} unpacked bytes, {REFUSED}")
            file.write(chunk)
    return written


def _safe(name: str, archive: Path) -> list[str]:
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or parts[0].endswith(":") or "\0" in name:
        raise DuplexError(f"{archive}: {name!r} lies outside of the target folder, {REFUSED}")
    return [part for part in parts if part not in ("", ".")]


def _place(parts: list[str], take: Mapping[str, Sequence[str]]) -> list[str] | None:
    for name, sources in take.items():
        for source in sources:
            depth = source.count("/") + 1
            if parts[:depth] == source.split("/"):
                return [name, *parts[depth:]]
    return None


@contextmanager
def _members(archive: Path) -> Iterator[tuple[Iterator[ArchiveMember], int]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            infos = [info for info in bundle.infolist() if not info.is_dir()]
            files = (ArchiveMember(info.filename, _is_regular(info), partial(bundle.open, info)) for info in infos)
            yield files, len(infos)
    else:
        with tarfile.open(archive) as tar:
            entries = (entry for entry in tar if not entry.isdir())
            yield (ArchiveMember(entry.name, entry.isreg(), partial(tar.extractfile, entry)) for entry in entries), 0
            while tar.fileobj is not None and tar.fileobj.read(UNPACK_CHUNK):
                pass  # on to the end of the file, where gzip compares its checksum


def _is_regular(info: zipfile.ZipInfo) -> bool:
    return stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)  # 0: the archive has no Unix modes


def download(name: str, root: Path, report: Callable[[str], None]) -> None:
    """Download and unpack the missing parts of a published data set; `report` gets messages."""
    benchmark = BENCHMARKS[require(name, BENCHMARKS, "benchmark")]
    if benchmark.page:
        raise UsageError(
            f"{name} cannot be downloaded by a program; get it by hand from {benchmark.page} ({benchmark.terms}), put "
            f"its images, metadata and pair lists into {root}, and run `duplex data add {name} {root}`"
        )
    report(f"{name}: {benchmark.terms}\ncite: {benchmark.citation}")
    for archive in benchmark.archives:
        download_archive(archive, root, report)


def download_archive(archive: BenchmarkArchive, root: Path, report: Callable[[str], None]) -> None:
    """Download an archive to ROOT/.archives, unless it is there, and unpack the wanted files.

    No sha256 is published, so that of the first archive is recorded; later ones must match it.
    """
    if all((root / name).exists() for name in archive.take):
        report(f"{', '.join(archive.take)}: already in {root}")
        return
    path = root / ARCHIVES / archive.file
    if not path.exists():
        _fetch_from_mirrors(archive, path, root, report)
    digest = sha256(path)
    record = path.with_name(path.name + ".sha256")
    known = ""
    if record.is_file():
        known = record.read_text(encoding="utf-8", errors="replace").split(" ")[0]
    if known and digest != known:
        raise DuplexError(
            f"{path} is not the archive that was unpacked first (its sha256 is {digest:.12}… instead of {known:.12}…); "
            f"delete it to download it again or, if it is the right one, delete {record}; then run the command again"
        )
    report(f"unpacking {path}")
    unpack(path, archive.take, root, archive.limit)
    if not known:
        write_text(record, f"{digest}  {path.name}\n")
        report(f"no hash of {path.name} is published; its sha256 is {digest} and is kept in {record}")


def _fetch_from_mirrors(archive: BenchmarkArchive, path: Path, root: Path, report: Callable[[str], None]) -> None:
    for url in archive.urls:
        warning = "" if url.startswith("https:") else " (not encrypted: the file could be altered on the way)"
        report(f"downloading {url}{warning}")
        try:
            fetch(url, path)
        except DeadLink as error:
            report(str(error))
            continue
        if zipfile.is_zipfile(path) or tarfile.is_tarfile(path):
            return
        path.unlink()
        report(f"{url} does not serve an archive")
    raise DuplexError(
        f"{archive.file} cannot be downloaded from any of its links; get it by hand from {archive.page}, put it into "
        f"{root / ARCHIVES}/ (or unpack {' and '.join(archive.take)} into {root}/), and run the command again"
    )


HUB = "hf-datasets:"  # prefix of OWNER/NAME
SPLIT_IN_PATH = re.compile(r"(?<![a-z])(train|val|test|validation)(?![a-z])")
TABLE = "table.csv"


def local_source(source: str | Path, cache: Path) -> Path:
    """Absolute path of `source` or, for hf-datasets:OWNER/NAME, of the downloaded table in `cache`."""
    path = expanded_path(source, "source")
    if str(path).startswith(HUB):
        return _hub_table(str(path).removeprefix(HUB), cache)
    return path.resolve()


def _hub_table(name: str, cache: Path) -> Path:
    from huggingface_hub import snapshot_download

    root = cache / "hf-datasets" / name
    try:
        snapshot_download(name, repo_type="dataset", allow_patterns=["*.parquet"], local_dir=root)
    except Exception as error:  # of many kinds: network, hub and names
        reason = str(error).strip().splitlines()[0].removeprefix("Got: ").rstrip(".")
        raise UsageError(f"{HUB}{name} could not be downloaded: {reason:.200}; check name and network") from error
    parts = []
    for file in sorted(root.rglob("*.parquet")):
        place = file.relative_to(root)
        part = read_table(file)
        found = SPLIT_IN_PATH.search(place.as_posix())
        split = part.get("split", found[1].replace("validation", "val") if found else "")
        images = [(place.parent / image).as_posix() for image in part["image"]]
        parts.append(part.assign(image=images, split=split))
    if not parts:
        raise UsageError(f"{HUB}{name} has no Parquet files to read; download it and give the folder or table")
    table = pd.concat(parts)
    write_manifest(table if set(table["split"]) == set(SPLITS) else table.drop(columns="split"), root / TABLE)
    return root / TABLE


class DeadLink(DuplexError):
    """Raised if a URL does not serve the wanted file."""


def fetch(url: str, path: Path) -> Path:
    """Download `url` to `path` unless the file exists; an interrupted download is resumed."""
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
                    f"the connection to {url} keeps breaking; run the command again to continue after the {size:,} "
                    f"bytes in {partial}"
                )
            time.sleep(0.2 * stalls)
        partial.replace(path)
    return path


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _attempt(url: str, partial: Path) -> bool:
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
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    task = bar.add_task(partial.stem, total=total, completed=start)
    try:
        with partial.open("ab" if start else "wb") as file, bar:
            for chunk in response.iter_content(CHUNK):
                file.write(chunk)
                bar.advance(task, len(chunk))
    except requests.RequestException:
        raise
    except OSError:
        with report_write_errors(partial):
            raise
