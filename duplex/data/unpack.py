"""Unpacking of untrusted archives: only wanted files, below one folder, up to a limit of bytes."""

from __future__ import annotations

import gzip
import lzma
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from duplex.errors import DuplexError
from duplex.system.progress import track

CHUNK = 1 << 20
DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, struct.error, EOFError,
    NotImplementedError, RuntimeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class ArchiveMember:
    """A file in a zip or tar archive."""

    name: str
    regular: bool  # False for links and devices
    open: Callable[[], IO[bytes] | None]


def is_archive(path: Path) -> bool:
    return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def unpack(archive: Path, take: Mapping[str, tuple[str, ...]], root: Path, limit: int) -> None:
    """Unpack the wanted files and folders of an archive to `root`; each appears complete or not at all.

    Args:
        take: name of a file or folder below `root` -> its possible names in the archive.
        limit: most bytes that may be unpacked; checked while unpacking, whatever sizes the archive states.
    """
    staging = root / f".{archive.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        parts = _write_parts(archive, take, staging, limit)
        missing = [name for name in take if name not in parts]
        if missing:
            raise DuplexError(f"{archive} lacks {take[missing[0]][0]!r}; delete it and get the published archive")
        for name in take:
            if not (root / name).exists():
                (staging / name).rename(root / name)
    except DAMAGED as error:
        raise DuplexError(f"{archive} is damaged ({error}); delete it and run the command again") from error
    except OSError as error:
        raise DuplexError(f"{archive} cannot be unpacked to {root}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_parts(archive: Path, take: Mapping[str, tuple[str, ...]], staging: Path, limit: int) -> set[str]:
    """Write the wanted files of an archive below `staging`; return which wanted files and folders it contains."""
    parts: set[str] = set()
    left = limit
    with _members(archive) as (members, total):
        for member in track(members, f"unpacking {archive.name}", total):
            place = _place(_safe(member.name, archive), take)
            if place is None:
                continue
            if not member.regular:
                raise DuplexError(f"{archive}: {member.name!r} is a link or a device; get the published archive")
            target = staging.joinpath(*place)
            target.parent.mkdir(parents=True, exist_ok=True)
            left -= _copy(member, target, left, archive, limit)
            parts.add(place[0])
    return parts


def _copy(member: ArchiveMember, target: Path, left: int, archive: Path, limit: int) -> int:
    """Copy an archive member to `target` and return its size; raises `DuplexError` beyond `left` bytes.

    Bytes are counted while copying, since the sizes that an archive states may be false.

    limit: bytes allowed for the whole archive, for the message.
    """
    written, source = 0, member.open()
    if source is None:
        raise DuplexError(f"{archive}: {member.name!r} is not a file; get the published archive")
    with source, target.open("wb") as file:
        while chunk := source.read(CHUNK):
            written += len(chunk)
            if written > left:
                raise DuplexError(
                    f"{archive} unpacks to more than {limit:,} bytes, far too many; get the published archive"
                )
            file.write(chunk)
    return written


def _safe(name: str, archive: Path) -> list[str]:
    """The parts of the path of a file in an archive; raises DuplexError if it leads out of the target folder."""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or parts[0].endswith(":") or "\0" in name:
        raise DuplexError(
            f"{archive}: {name!r} would be outside of the folder; nothing was unpacked; get the published archive"
        )
    return [part for part in parts if part not in ("", ".")]


def _place(parts: list[str], take: Mapping[str, tuple[str, ...]]) -> list[str] | None:
    """The path to which a file of an archive is unpacked, as parts below the target folder; None if not wanted.

    parts: path of the file in the archive.
    take: name of a wanted file or folder -> its possible names in the archive.
    """
    for name, sources in take.items():
        for source in sources:
            depth = source.count("/") + 1
            if parts[:depth] == source.split("/"):
                return [name, *parts[depth:]]
    return None


@contextmanager
def _members(archive: Path) -> Iterator[tuple[Iterator[ArchiveMember], int]]:
    """Open a zip or tar archive; yield an iterator over its members, and their number (0 if unknown)."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            infos = [info for info in bundle.infolist() if not info.is_dir()]
            files = (ArchiveMember(info.filename, _is_regular(info), partial(bundle.open, info)) for info in infos)
            yield files, len(infos)
    else:
        with tarfile.open(archive) as tar:
            entries = (entry for entry in tar if not entry.isdir())
            yield (ArchiveMember(entry.name, entry.isreg(), partial(tar.extractfile, entry)) for entry in entries), 0
            while tar.fileobj is not None and tar.fileobj.read(CHUNK):
                pass  # on to the end of the file, where gzip compares its checksum


def _is_regular(info: zipfile.ZipInfo) -> bool:
    return stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)  # 0: the archive has no Unix modes
