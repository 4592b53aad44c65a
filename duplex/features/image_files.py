"""Any file as an RGB picture, or the reason why it is not one.

Pixels are taken as published CLIP features took them: the stored orientation (EXIF rotation is not applied), the first
frame of an animation, alpha ignored. Sixteen-bit grey is scaled to eight bits; wider pixels have no agreed black and
white and are refused. A picture's size is known from its header, so a decompression bomb is never decoded.
"""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from duplex.data.image_errors import DECODING, machine_fault

FORMATS = (
    "JPEG",
    "PNG",
    "GIF",
    "BMP",
    "DIB",
    "TIFF",
    "WEBP",
    "PPM",
    "ICO",
    "JPEG2000",
    "AVIF",
)  # told by their first bytes
Image.init()  # once, before decoding workers are forked, not in each of them
READABLE = tuple(name for name in FORMATS if name in Image.OPEN)  # those that this Pillow was built with
MAX_PIXELS = 89_478_485  # a quarter of a gigabyte as RGB; Pillow's own limit, an error here instead of a warning


class BadPicture(Exception):
    """A file that gives no picture; `reason` is one of the store's `REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_picture(path: Path) -> Image.Image:
    """The first frame of a file as 8-bit RGB; raises `BadPicture`, or `MachineFault` where the file is not to blame."""
    _check_file(path)
    return decode_picture(path)


def decode_picture(path: Path | BinaryIO, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The same of a file that has been looked at, or of one in memory."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata, and about sizes that the next check refuses
            with Image.open(path, formats=READABLE) as picture:
                if picture.width * picture.height > max_pixels:
                    raise BadPicture("too large")
                return as_rgb(picture)
    except BadPicture:
        raise
    except Image.DecompressionBombError as error:
        raise BadPicture("too large") from error
    except UnidentifiedImageError as error:
        raise BadPicture("not a picture") from error
    except (MemoryError, *DECODING) as error:
        raise machine_fault(path, error) or BadPicture("damaged") from error


def _check_file(path: Path) -> None:
    try:
        info = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadPicture("missing") from error
    except OSError as error:
        raise machine_fault(path, error) or BadPicture("unreadable") from error
    except ValueError as error:
        raise BadPicture("unreadable") from error
    if not stat.S_ISREG(info.st_mode) or not os.access(path, os.R_OK):
        raise BadPicture("unreadable")  # opening a pipe would wait for ever
    if info.st_size == 0:
        raise BadPicture("empty")


def as_rgb(picture: Image.Image) -> Image.Image:
    """Pillow clips 16-bit grey at 255 when asked for RGB, which turns nearly all of it white: scale it first."""
    if picture.mode.startswith("I;16") or picture.mode == "I":
        values = np.asarray(picture)
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise BadPicture("pixel type")
        return Image.fromarray((values.astype(np.float32) / 257 + 0.5).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise BadPicture("pixel type")
    return picture.convert("RGB")
