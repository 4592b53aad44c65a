"""Read text files in UTF-8 or UTF-16 with any line ends."""

from __future__ import annotations

import codecs
import re
import stat
from pathlib import Path

from duplex.errors import DuplexError

LINE_END = re.compile(r"\r\n|\r|\n")  # str.splitlines would also break at form feeds and U+2028, inside a name


def read_bytes(path: Path) -> bytes:
    """Read a file or a pipe; raises DuplexError if it is missing, unreadable or a device, which may never end."""
    try:
        if stat.S_ISCHR(mode := path.stat().st_mode) or stat.S_ISBLK(mode):
            raise DuplexError(f"{path} is a device; name a file")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DuplexError(f"{path} does not exist") from error
    except OSError as error:
        raise DuplexError(f"{path} cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str:
    """Read text in UTF-8, or UTF-16 with a byte-order mark; raises DuplexError for any other encoding."""
    data = read_bytes(path)
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DuplexError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    if "\0" in text:
        raise DuplexError(f"{path} is not text: it holds a zero byte; save it as UTF-8")
    return text


def read_lines(path: Path) -> list[str]:
    return LINE_END.split(read_text(path))
