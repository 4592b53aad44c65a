"""Make text from users, such as file names, safe to print on a terminal."""

from __future__ import annotations

import unicodedata


def escape_unprintable(text: str) -> str:
    """Return `text` with escapes such as `\\x1b` for control characters and for bytes that are not text."""
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
