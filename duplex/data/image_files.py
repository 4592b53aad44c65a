"""Read image files as RGB; a file that is no readable image raises an error with the reason.

Pixels are read as viewers show them: turned as the file's EXIF orientation says, the first frame of an animation, alpha
ignored. Width and height are read from the header: a decompression bomb is never decoded.
"""

from __future__ import annotations

import base64
import io
import os
import stat
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose

from duplex.data.image_errors import machine_fault

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "ICO", "JPEG2000", "AVIF")
Image.init()  # once, before decoding workers are forked
READABLE = tuple(name for name in FORMATS if name in Image.OPEN)  # formats that this Pillow was built with
MAX_PIXELS = 89_478_485  # a quarter of a gigabyte as RGB: Pillow's own limit, an error here instead of a warning

ORIENTATION_TAG = 0x0112
TURNS = {  # by EXIF orientation; 1 is upright
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


class BadImageFile(Exception):
    """A file that cannot be read as an image; `reason` is one of `features.layout.REASONS` ("empty", …)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_image(path: Path) -> Image.Image:
    """The first frame of an image file as 8-bit RGB; errors as of `decode_image`."""
    try:
        info = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadImageFile("missing") from error
    except (OSError, ValueError) as error:
        raise machine_fault(path, error) or BadImageFile("unreadable") from error
    if not stat.S_ISREG(info.st_mode) or not os.access(path, os.R_OK):
        raise BadImageFile("unreadable")  # opening a pipe would block
    if info.st_size == 0:
        raise BadImageFile("empty")
    return decode_image(path)


def decode_image(path: Path | BinaryIO, max_pixels: int = MAX_PIXELS, *, draft: bool = False) -> Image.Image:
    """The first frame of an image, from a path or an open binary file, as 8-bit RGB.

    Unlike `read_image`, this does not refuse paths that are no regular files, such as pipes.

    Args:
        draft: decode a JPEG at an eighth of its size.

    Raises:
        BadImageFile: for a fault of the image, also for more than `max_pixels` pixels.
        MachineFault: for a fault of the machine (memory, disk).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata, and sizes that the next check refuses
            with Image.open(path, formats=READABLE) as image:
                if image.width * image.height > max_pixels:
                    raise BadImageFile("too large")
                if draft:
                    image.draft("RGB", (1, 1))
                return as_rgb(image)
    except Image.DecompressionBombError as error:
        raise BadImageFile("too large") from error
    except UnidentifiedImageError as error:
        raise BadImageFile("not an image") from error
    except BadImageFile:
        raise
    except Exception as error:  # Pillow's decoders raise almost anything for bytes that are no image
        raise machine_fault(path, error) or BadImageFile("damaged") from error


def thumbnail(path: Path, side: int = 128) -> str | None:
    """An image file as a JPEG data URI, at most `side` pixels wide and high; None if it cannot be read."""
    try:
        image = read_image(path)
    except BadImageFile:
        return None
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=72, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def verify_image(path: Path) -> str:
    """Read an image file completely and say what is wrong with it; "" for nothing.

    JPEGs are decoded at an eighth of their size, which still parses every byte. Raises `MachineFault` for errors of
    the machine, such as too little memory.
    """
    try:
        data = path.read_bytes()
        if not data:
            return "0 bytes"
        with Image.open(io.BytesIO(data)) as image:
            image.draft("RGB", (1, 1))
            image.load()
    except Exception as error:  # as in `decode_image`
        if fault := machine_fault(path, error):
            raise fault from error
        return str(error).replace("<_io.BytesIO object at ", "<").split("\n", 1)[0][:80] or type(error).__name__
    return ""


def as_rgb(image: Image.Image) -> Image.Image:
    """An image as upright 8-bit RGB. Raises `BadImageFile` for pixels wider than 16 bits.

    16-bit grey is scaled to 8 bits first: Pillow's conversion to RGB would clip it at 255 and make nearly all of it
    white.
    """
    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image)
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise BadImageFile("pixel type")
        grey = Image.fromarray((values.astype(np.float32) / 257 + 0.5).astype(np.uint8))
        return _upright(grey.convert("RGB"), image)
    if image.mode == "F":
        raise BadImageFile("pixel type")
    return _upright(image.convert("RGB"), image)


def _upright(pixels: Image.Image, image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ORIENTATION_TAG)
    except Exception:  # unreadable metadata turn nothing
        return pixels
    turn = TURNS.get(orientation) if isinstance(orientation, int) else None
    return pixels if turn is None else pixels.transpose(turn)
