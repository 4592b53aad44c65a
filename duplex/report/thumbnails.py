"""Thumbnails of a data set's images, embedded in the report."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from duplex.data.image_files import BadImageFile, read_image
from duplex.report.blocks import Block, Note

SIDE, QUALITY = 128, 72
Thumbnails = Callable[[str], str | None]  # data URI of an image, by its name in the manifest


def thumbnail(path: Path, side: int = SIDE) -> str | None:
    """Return an image file as a JPEG data URI, at most `side` pixels wide and high; None if it cannot be read."""
    try:
        image = read_image(path)
    except BadImageFile:
        return None
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def thumbnails_under(root: Path) -> Thumbnails:
    """Return a function from an image's path in the folder `root` to its thumbnail: a data URI, None if unreadable."""
    return lambda image: thumbnail(root / image)


def missing_images_note(root: Path, images: Sequence[str], dataset: str) -> list[Block]:
    """Return a list with a report note if none of a data set's images is in the folder `root`; else an empty list."""
    if any((root / image).is_file() for image in images):
        return []
    return [Note(f"The images of {dataset} are not on this machine (expected in {root}); only labels are shown.")]
