"""Tell errors of an image file (missing, damaged) from errors of the machine that reads it (memory, disk)."""

from __future__ import annotations

import errno

from duplex.errors import DuplexError

# Error numbers for a file that is missing, forbidden, or of a wrong name or kind
FILE_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP}
FILE_ERRORS |= {errno.ENAMETOOLONG, errno.EINVAL}


class MachineFault(DuplexError):
    """Raised if an image cannot be read because of the machine: little memory, too many open files, a failing disk."""


def machine_fault(place: object, error: BaseException) -> MachineFault | None:
    """A `MachineFault` if reading an image failed because of the machine; None if the file itself is at fault.

    An error of the operating system is judged by its number (errno); Pillow's errors about a file's content have none.
    """
    if isinstance(error, MemoryError):
        reason = "there was not enough memory"
    elif isinstance(error, OSError) and error.errno is not None and error.errno not in FILE_ERRORS:
        reason = str(error.strerror or error).lower()
    else:
        return None
    return MachineFault(f"{place} could not be read: {reason}; finished work is not affected, run the command again")
