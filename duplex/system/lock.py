"""One writer per file: an advisory lock that the system releases when its holder dies (POSIX only).

The lock is a record lock, which belongs to the process: decoding workers that outlive a killed parent for a moment do
not keep it, as they would a lock on an inherited descriptor.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from duplex.errors import DuplexError
from duplex.system.files import refuse_unwritable, report_write_errors


@contextmanager
def sole_writer(path: Path, work: str, instead: str = "") -> Iterator[None]:
    """Hold the lock for writing the file at `path` during the `with` block; raise `DuplexError` if it is taken.

    work: what writers of the file do, such as "extraction", for the message.
    instead: what the user can do instead of waiting, for the message.
    """
    refuse_unwritable(path)
    lock = path.with_name(path.name + ".lock.partial")
    # no permission, a file where a folder should be, a file system without locks
    with report_write_errors(lock if os.path.exists(lock) else path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(lock, path, work, instead)
    try:
        with report_write_errors(path):  # a full disk
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(lock: Path, path: Path, work: str, instead: str) -> int:
    """Lock a lock file and return its descriptor; raise `DuplexError` if another process holds the lock.

    The file is opened again if another process removed it in the meantime.

    path: the file that the lock is for.
    work, instead: what writers of the file do, and what the user can do instead of waiting, for the message.
    """
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
            os.close(descriptor)
            alternative = f", {instead}" if instead else ""
            raise DuplexError(
                f"another {work} (process {holder}) is writing {path}; let it finish{alternative}"
            ) from error
        with suppress(FileNotFoundError):
            if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)
