"""Whose fault it is that a picture cannot be read: the file's, or the machine's."""

from __future__ import annotations

import errno
import struct
import zlib

from duplex.errors import DuplexError

DECODING = (  # what Pillow's decoders raise on bytes that are no picture, beside the errors of the system itself
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(RuntimeError, AssertionError, struct.error, zlib.error),
)
OF_THE_FILE = (  # it is not there, it may not be read, its name or kind is wrong
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
)


class MachineFault(DuplexError):
    """Not the picture's fault: too little memory, too many open files, a disk that fails. Worth another try."""


def machine_fault(place: object, error: BaseException) -> MachineFault | None:
    """What to raise where an error says nothing about the file `place`. The system gives its errors a number; Pillow's
    own, about what is in a file, have none."""
    if isinstance(error, MemoryError):
        what = "there was not enough memory"
    elif isinstance(error, OSError) and error.errno is not None and error.errno not in OF_THE_FILE:
        what = str(error.strerror or error).lower()
    else:
        return None
    return MachineFault(f"{place} could not be read: {what}; nothing is wrong with what is done, run the command again")
