"""Text of users, such as names of files, on a terminal."""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """Return `text` with escapes for control characters, which steer terminals, and for bytes that are not text."""
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
