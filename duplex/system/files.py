"""Files, written whole or not at all: the one way in which anything here takes its name on the disk."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from duplex.errors import DuplexError

if TYPE_CHECKING:
    from torch import Tensor

SCRATCH = ".partial"  # ends the name of every unfinished file; git and DVC ignore them
TRIES = 10  # of putting a folder in another's place
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replaced(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Hand out a scratch path beside `path`; what the block writes there takes the name `path` when the block ends.

    A block that fails leaves what was at `path`, and no scratch. The file's mode follows the umask, whatever wrote it.
    A link is replaced by the file: what it leads to, which may be DVC's cache, is never written into. `sync=False` is
    for many small files that can be made again: a power cut may leave them empty.
    """
    scratch = path.with_name(f"{path.name}.{os.getpid()}{SCRATCH}")
    try:
        refuse_unwritable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        mode = _create(scratch)
        try:
            yield scratch
            os.chmod(scratch, mode)
            if sync:
                _to_disk(scratch)
            os.replace(scratch, path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to tell
                scratch.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise unwritable(path, error) from error


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """The same for a folder of files that are made together: the old one stays until the new one is complete."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}{SCRATCH}")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
            _take_name(scratch, path)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    except OSError as error:
        raise unwritable(path, error) from error


def _take_name(scratch: Path, path: Path) -> None:
    """A folder takes the name of another, and once more where somebody else has just done the same."""
    for tries in reversed(range(TRIES)):
        try:
            if path.is_symlink():
                path.unlink()
            elif path.exists():
                shutil.rmtree(path)
            os.replace(scratch, path)
            return
        except OSError as error:
            if not (tries and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)):
                raise


def write_text(path: Path, text: str) -> None:
    """UTF-8, whole or not at all, with the line ends that `text` has."""
    with replaced(path) as scratch:
        scratch.write_bytes(text.encode("utf-8"))


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replaced(path) as scratch:
        try:
            save_file(tensors, scratch, metadata)
        except SafetensorError as error:
            if found := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
            raise


def unwritable(path: Path, error: OSError) -> DuplexError:
    """One sentence for a file that could not be written."""
    if error.errno in FULL:
        return DuplexError(f"{path} cannot be written: {reason(error)}; make room and run the same command again")
    return DuplexError(f"{path} cannot be written: {reason(error)}; mend that, or choose another place")


def reason(error: OSError) -> str:
    """What the system says, without its number and the file's name."""
    if error.errno in FULL:
        return "the disk is full"
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename is not None:
        return f"{error.filename} is a file, not a folder"
    return " ".join(str(error.strerror or error).lower().split())


def refuse_unwritable(path: Path) -> None:
    """A folder, a device or a pipe is never replaced by a file."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise DuplexError(f"{path} is {what}, not a file that can be replaced; choose another place")


def sha256(path: Path) -> str:
    """Of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _create(scratch: Path) -> int:
    """An empty file with the mode that the umask gives; that mode."""
    descriptor = os.open(scratch, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(path: Path) -> None:
    """Remove the scratch files of `path` whose writers were killed."""
    with os.scandir(path.parent) as entries:
        listed = list(entries)
    for entry in listed:
        if entry.name.startswith(path.name + ".") and entry.name.endswith(SCRATCH):
            writer = entry.name[len(path.name) + 1 : -len(SCRATCH)]
            if writer.isdecimal() and not _alive(int(writer)):
                with suppress(OSError):
                    os.unlink(entry.path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True
