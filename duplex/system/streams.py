"""Replace standard streams (stdin, stdout, stderr) that are closed when the program starts, as by daemons or `>&-`."""

from __future__ import annotations

import os
import sys

STREAMS = (  # name, mode, flags with which /dev/null takes the place of a closed one
    ("stdin", "r", os.O_RDONLY),
    ("stdout", "w", os.O_RDONLY),  # so that writing fails: results are not lost in silence
    ("stderr", "w", os.O_WRONLY),
)


def open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed, for which Python's `sys` has None.

    Otherwise the next file that is opened gets the stream's number, and messages of C libraries are written into it.
    The new stdin is empty and the new stderr discards its text; writing to the new stdout raises an error.
    """
    for name, mode, flags in STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))
