"""Thumbnails: a data set's own pictures, small, inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from duplex.features.image_files import BadPicture, read_picture

SIDE, QUALITY = 128, 72


def thumbnail(path: Path, side: int = SIDE) -> str | None:
    """A data URI of the picture, at most `side` wide and high; None where it cannot be read."""
    try:
        picture = read_picture(path)
    except BadPicture:
        return None
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def any_there(root: Path, images: Iterable[str]) -> bool:
    """Whether at least one of some pictures lies under the data root."""
    return any((root / image).is_file() for image in images)
