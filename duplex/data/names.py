"""Rules for labels and image paths, so that they can be used in tables, prompts and file names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from duplex.errors import DuplexError
from duplex.labels import prompt_name

UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")  # control characters, line ends, half characters
PATH_LIMIT = 4096


def check_labels(labels: Iterable[str], kind: str, place: object) -> None:
    """Raise DuplexError for a label with control characters or without a word for the prompt; `place` is its source."""
    for label in set(labels):
        if UNFIT.search(label):
            raise DuplexError(f"{place}: the {kind} {label!r} holds a control character or half a character")
        if not prompt_name(label):
            raise DuplexError(f"{place}: the {kind} {label!r} leaves no word for a prompt; rename it")


def relative_path(image: str, place: object) -> str:
    """Return `image` as a path below the data root, without `.` and empty parts; raise DuplexError if it leaves it."""
    if UNFIT.search(image) or len(image) > PATH_LIMIT:
        raise DuplexError(f"{place}: the image path {image[:80]!r} is not a file name")
    if image.startswith(("/", "\\")) or re.match(r"[A-Za-z]:[\\/]", image):
        raise DuplexError(f"{place}: the image path {image!r} is absolute; write it relative to the data root")
    parts = [part for part in image.split("/") if part not in ("", ".")]
    if not parts:
        raise DuplexError(f"{place}: an image path is empty")
    if ".." in parts or "..\\" in image:
        raise DuplexError(f"{place}: the image path {image!r} leaves the data root; write it without `..`")
    return "/".join(parts)
