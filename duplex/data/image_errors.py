"""Errors while reading images: those of the file and those of the machine."""

from __future__ import annotations

import errno

from duplex.errors import DuplexError

FILE_ERRORS = (  # error numbers for a file that is missing, forbidden, or of a wrong name or kind
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
)


class MachineFault(DuplexError):
    """An error of the machine, not of the image: too little memory, too many open files, a failing disk."""


def machine_fault(place: object, error: BaseException) -> MachineFault | None:
    """Return the error to raise if reading the file `place` failed for a reason that is not the file's; None otherwise.
    Errors of the operating system have a number; Pillow's own, about a file's content, have none."""
    if isinstance(error, MemoryError):
        reason = "there was not enough memory"
    elif isinstance(error, OSError) and error.errno is not None and error.errno not in FILE_ERRORS:
        reason = str(error.strerror or error).lower()
    else:
        return None
    return MachineFault(f"{place} could not be read: {reason}; finished work is not affected, run the command again")
