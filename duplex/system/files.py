"""Write files and folders completely or not at all; the package writes all files by these functions."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from duplex.errors import DuplexError, UsageError, shown

if TYPE_CHECKING:
    from torch import Tensor

SCRATCH = ".partial"  # suffix of every unfinished file; git and DVC ignore it
OLD = ".old"  # before SCRATCH: a folder that is being replaced
TRIES = 10  # to replace a folder that other processes replace too
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, quota or file-size limit


def expanded_path(path: object, noun: str) -> Path:
    """A user's path, called `noun` in messages, with `~` expanded; `UsageError` if it is no path."""
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        raise UsageError(f"{noun} is {shown(path)}; expected a path")
    return Path(path).expanduser()


def refuse_existing(path: Path, *, force: bool = False) -> None:
    """Raise `UsageError` if `path` exists and is not an empty folder, unless `force`."""
    if force or not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
        return
    advice = "move it, choose another path or replace it with --force (in Python, force=True)"
    raise UsageError(f"the output {path} exists; {advice}")


@contextmanager
def replace_file(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Context manager that yields a scratch path; the file there is renamed to `path` at the end.

    A link is replaced, not its target. `sync=False` is faster, but a power cut may leave the file
    empty.
    """
    with report_write_errors(path):
        scratch = path.with_name(f"{path.name}.{os.getpid()}{SCRATCH}")
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        scratch.write_bytes(b"")
        mode = stat.S_IMODE(scratch.stat().st_mode)
        try:
            yield scratch
            os.chmod(scratch, mode)
            if sync:
                with open(scratch, "rb") as file:
                    os.fsync(file.fileno())
            os.replace(scratch, path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to report
                scratch.unlink(missing_ok=True)
            raise


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Context manager that yields a scratch folder, which replaces the folder `path` at the end."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}{SCRATCH}")
    with report_write_errors(path):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        _remove_abandoned(path)
        try:
            yield scratch
            _replace(scratch, path)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def _replace(scratch: Path, path: Path) -> None:
    # The old folder is renamed first and removed last: a mounted one, which cannot be renamed, stays
    # whole. After an error or Ctrl-C, it gets its name back. Other processes may replace the folder, too.
    old = path.with_name(f"{path.name}.{os.getpid()}{OLD}{SCRATCH}")
    for tries in reversed(range(TRIES)):
        try:
            if path.is_symlink():
                path.unlink()
            elif path.exists():
                if not path.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
                path.rename(old)
            os.replace(scratch, path)
        except BaseException as error:
            if old.exists():
                with suppress(OSError):  # another process has written a newer one
                    old.rename(path)
            moved = errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT  # by another process
            if not (tries and isinstance(error, OSError) and error.errno in moved):
                raise
        else:
            break
        finally:
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with replace_file(path) as scratch:
        scratch.write_bytes(text.encode("utf-8"))


def write_json(path: Path, record: object) -> None:
    write_text(path, json.dumps(record, indent=2) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replace_file(path) as scratch:
        try:
            save_file(tensors, scratch, metadata)
        except SafetensorError as error:
            if match := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from error
            raise


@contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Context manager for code that writes `path`: raises its `OSError`s as `DuplexError`."""
    try:
        yield
    except OSError as error:
        remedy = "fix the cause, or choose another place"
        if error.errno in FULL:
            remedy = "make room and run the same command again"
        raise DuplexError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error


def named_path(path: Path) -> Path:
    """The path, or its absolute form if it is `.` or ends with `..` and so has no name of its own."""
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """The sha256 of a file, which is read again only if its size or modification time has changed."""
    status = path.stat()
    return _sha256_of_state(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256_of_state(path: Path, size: int, changed: int) -> str:
    return sha256(path)


def json_digest(record: object) -> str:
    """SHA-256 of a value's JSON text; the order of keys has no effect."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _remove_abandoned(path: Path) -> None:
    # A folder that was being replaced when its writer was killed gets its name back.
    for name in os.listdir(path.parent):
        if name.startswith(path.name + ".") and name.endswith(SCRATCH):
            left = path.with_name(name)
            writer = name[len(path.name) + 1 : -len(SCRATCH)]
            process = writer.removesuffix(OLD)
            if not process.isdecimal() or is_running(int(process)):
                continue
            with suppress(OSError):
                if writer.endswith(OLD) and not os.path.lexists(path):
                    left.rename(path)
                elif left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's process
        return True
    return True


@contextmanager
def sole_writer(path: Path, work: str, instead: str = "") -> Iterator[None]:
    """Context manager: hold the lock for writing `path`; `DuplexError` if another process holds it.

    `work`: what the other process does; `instead`: what to do other than wait.
    """
    lock = path.with_name(path.name + ".lock.partial")
    with report_write_errors(lock):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(lock)
    if descriptor is None:
        raise DuplexError(f"another {work} is writing {path}; let it finish{instead and f', {instead}'}")
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(lock: Path) -> int | None:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if lock.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # another process removed the file before it was locked


def size_text(count: int) -> str:
    """A number of bytes as text, in GB or MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
