"""One writer a file: an advisory lock that the system drops when its holder dies. POSIX only, as record locks are.

A record lock belongs to the process alone: decoding workers that outlive a killed parent for a moment do not keep it,
as they would a lock on an inherited descriptor.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from duplex.errors import DuplexError
from duplex.system.files import refuse_unwritable, unwritable


@contextmanager
def sole_writer(path: Path, work: str, instead: str = "") -> Iterator[None]:
    """Hold the right to write the file at `path`, or say who does. `work` is what its writers do, such as
    `extraction`; `instead` what a person may do other than wait."""
    refuse_unwritable(path)
    lock = path.with_name(path.name + ".lock.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(lock, path, work, instead)
    except OSError as error:  # no permission, a file where a folder should be, a file system without locks
        raise unwritable(path, error) from error
    try:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(lock: Path, path: Path, work: str, instead: str) -> int:
    """Lock the file that bears the name at the end: its last holder may have removed the one that was opened."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
            os.close(descriptor)
            other = f", {instead}" if instead else ""
            raise DuplexError(f"another {work} (process {holder}) is writing {path}; let it finish{other}") from error
        try:
            if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
