"""One writer a cache: an advisory lock that the system drops when its holder dies.

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


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Hold the right to write the cache at `path`, or say who does."""
    lock = path.with_name(path.name + ".lock.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(lock, path)
    except OSError as error:  # no permission, a file where a folder should be, a file system without locks
        raise DuplexError(f"{path} cannot be written: {error.strerror} ({lock}); choose another --out") from error
    try:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(lock: Path, path: Path) -> int:
    """Lock the file that bears the name at the end: its last holder may have removed the one that was opened."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(descriptor, 20, 0).decode() or "unknown"
            os.close(descriptor)
            writer = f"another extraction (process {holder}) is writing {path}"
            raise DuplexError(f"{writer}; let it finish, or give this one another --out") from error
        try:
            if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
