"""Read image and text files from untrusted sources, and find images below a data root.

Pixels are read as viewers show them: upright by EXIF, the first frame, without alpha. A name may
end in a crop, `photo.jpg#xywh=LEFT,TOP,WIDTH,HEIGHT`.
"""

from __future__ import annotations

import base64
import codecs
import errno
import hashlib
import io
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose

from duplex.errors import DuplexError, install_command

with suppress(ImportError):  # of the extra `heif`
    from pillow_heif import register_heif_opener

    register_heif_opener()

# Error numbers for a file that is missing, forbidden, or of a wrong name or kind
FILE_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP}
FILE_ERRORS |= {errno.ENAMETOOLONG, errno.EINVAL}
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "ICO", "JPEG2000", "AVIF", "HEIF")
Image.init()  # once, before decoding workers are forked
READABLE = tuple(name for name in FORMATS if name in Image.OPEN)  # formats that this Pillow was built with
MAX_PIXELS = 89_478_485  # 256 MiB as RGB: Pillow's own limit, an error here instead of a warning
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
IMAGE_SUFFIXES = {
    ".jpg", ".jpeg", ".jpe", ".png", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp",
    ".ppm", ".pgm", ".pbm", ".pnm", ".ico", ".jp2", ".j2k", ".avif",
}  # fmt: skip
HEIF_SUFFIXES = {".heic", ".heif"}
IMAGE_SUFFIXES |= HEIF_SUFFIXES if "HEIF" in READABLE else set()
HEIF = re.compile(rb"....ftyp(hei|hev|mif1|msf1)", re.DOTALL)  # first bytes of a file, by ISO 23008-12
READ_HEIF = f"run {install_command('heif')} to read HEIC images"
CROP = re.compile(r"#xywh=(\d+),(\d+),(\d+),(\d+)$")  # as in the W3C's media fragments
DOCUMENTS = frozenset({".txt", ".csv", ".tsv", ".parquet", ".pq", ".json", ".t7", ".md", ".html"})  # lists and notes
IGNORED = (".", "__MACOSX")  # beginnings of the names of files and folders that are never listed
SHOWN = 6  # kinds of skipped files in a message
LINE_END = re.compile(r"\r\n|\r|\n")  # str.splitlines would also break at U+2028, inside a name


class MachineFault(DuplexError):
    """Raised if the machine prevents reading: little memory, too many open files, a failing disk."""


def machine_fault(place: object, error: BaseException) -> MachineFault | None:
    """The `MachineFault` to raise if the machine caused the `error`; None if the file is at fault."""
    if isinstance(error, MemoryError):
        reason = "there was not enough memory"
    elif isinstance(error, OSError) and error.errno is not None and error.errno not in FILE_ERRORS:
        reason = str(error.strerror or error).lower()
    else:
        return None
    return MachineFault(f"{place} could not be read: {reason}; run the command again (finished work is kept)")


class BadImageFile(Exception):
    """Raised for a file that cannot be read as an image; `reason`: see `features.file.REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ImageBytes(io.BytesIO):
    """The bytes of an image file, with the image's path, which may end in a crop (`#xywh=...`)."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(data)
        self.path = path
        self.crop = CROP.search(path.name)

    @cached_property
    def digest(self) -> str:
        """The sha256 of the bytes, followed by the crop's position if the image is a crop."""
        place = "" if self.crop is None else self.crop[0]
        return hashlib.sha256(self.getvalue() + place.encode()).hexdigest()

    def __str__(self) -> str:
        return str(self.path)


def _cut(image: Image.Image, crop: re.Match[str] | None) -> Image.Image:
    if crop is None:
        return image
    left, top, width, height = map(int, crop.groups())
    if not (0 < width <= image.width - left and 0 < height <= image.height - top):
        raise BadImageFile("crop outside of the image")
    return image.crop((left, top, left + width, top + height))


def uncropped_path(image: str) -> str:
    """The path of an image's file: the image's path without the crop."""
    return CROP.sub("", image)


def read_image(path: Path) -> Image.Image:
    """Read the first frame of an image file as 8-bit RGB; raises `BadImageFile` or `MachineFault`."""
    return decode_image(read_image_bytes(path))


def read_image_bytes(path: Path) -> ImageBytes:
    """Read a regular file, to be hashed and decoded; raises `BadImageFile` or `MachineFault`."""
    file = Path(uncropped_path(str(path)))
    try:
        info = os.stat(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadImageFile("missing") from error
    except (OSError, ValueError) as error:
        raise machine_fault(path, error) or BadImageFile("unreadable") from error
    if not stat.S_ISREG(info.st_mode) or not os.access(file, os.R_OK):
        raise BadImageFile("unreadable")  # opening a pipe would block
    try:
        return ImageBytes(file.read_bytes(), path)
    except (OSError, MemoryError) as error:
        raise machine_fault(path, error) or BadImageFile("unreadable") from error


def decode_image(file: BinaryIO, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image file's first frame as 8-bit RGB; raises `BadImageFile` or `MachineFault`."""
    if isinstance(file, ImageBytes) and not file.getbuffer():
        raise BadImageFile("empty")
    crop = file.crop if isinstance(file, ImageBytes) else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata, and sizes that the next check refuses
            with Image.open(file, formats=READABLE) as image:
                if image.width * image.height > max_pixels:
                    raise BadImageFile("too large")
                return _cut(as_rgb(image), crop)
    except Image.DecompressionBombError as error:
        raise BadImageFile("too large") from error
    except UnidentifiedImageError as error:
        file.seek(0)
        if isinstance(file, ImageBytes) and "HEIF" not in READABLE and HEIF.match(file.read(12)):
            raise MachineFault(f"{file} is a HEIC image; {READ_HEIF}") from error
        raise BadImageFile("not an image") from error
    except BadImageFile:
        raise
    except Exception as error:  # Pillow's decoders raise almost anything for bytes that are no image
        raise machine_fault(file, error) or BadImageFile("damaged") from error


def thumbnail(path: Path, side: int = 128) -> str | None:
    """An image file as a small JPEG, `side` pixels at most, in a data URI; None if it is unreadable."""
    try:
        image = read_image(path)
    except BadImageFile:
        return None
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=72, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def image_fault(path: Path) -> str:
    """What is wrong with an image file, or ""; raises `MachineFault` if memory or disk fail."""
    try:
        read_image(path)
    except BadImageFile as error:
        return error.reason
    return ""


def as_rgb(image: Image.Image) -> Image.Image:
    """An image as upright 8-bit RGB, 16-bit grey scaled; `BadImageFile` for larger pixels."""
    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image)
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise BadImageFile("unsupported pixel type")
        grey = Image.fromarray((values.astype(np.float32) / 257 + 0.5).astype(np.uint8))
        return _upright(grey.convert("RGB"), image)
    if image.mode == "F":
        raise BadImageFile("unsupported pixel type")
    return _upright(image.convert("RGB"), image)


def _upright(pixels: Image.Image, image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ORIENTATION_TAG)
    except Exception:  # unreadable metadata turn nothing
        return pixels
    turn = TURNS.get(orientation) if isinstance(orientation, int) else None
    return pixels if turn is None else pixels.transpose(turn)


def describe_skipped(counts: Mapping[str, int]) -> str:
    """How many files of each kind were skipped: `10 .heic, 2 without a suffix`."""
    common = Counter(counts).most_common(SHOWN)
    rest = sum(counts.values()) - sum(count for _, count in common)
    if rest:
        common.append(("others", rest))
    listed = ", ".join(f"{count:,} {kind}" for kind, count in common)
    return f"{listed}; {READ_HEIF}" if HEIF_SUFFIXES & counts.keys() else listed


class ImageTree:
    """The image files below a root folder; each folder is listed once, so many files are fast."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._real = os.path.realpath(root)
        self._folders: dict[str, dict[str, bool]] = {}  # folder -> name of a file in it -> whether it stays inside
        self.skipped: dict[str, list[str]] = {}  # kind, such as a suffix -> paths skipped by the last `images`
        if not os.path.isdir(self._real):
            raise DuplexError(f"there is no folder {root}; give the path of the folder that holds the images")

    def has(self, path: str) -> bool:
        """Whether a file exists at a path below the root; DuplexError for a link that leads out of it."""
        folder, _, name = uncropped_path(path).rpartition("/")
        if folder not in self._folders:
            self._folders[folder] = self._files(folder)
        inside = self._folders[folder].get(name)
        if inside is False:
            raise self._leaves(path)
        return inside is not None

    def images(self, *, refuse_links: bool = True) -> Iterator[str]:
        """Yield the path of every image, in a fixed order; other files are added to `skipped`."""
        self.skipped = {}
        yield from self._walk("", refuse_links)

    def _walk(self, folder: str, refuse_links: bool) -> Iterator[str]:
        prefix = f"{folder}/" if folder else ""
        for entry in sorted(self._scan(folder), key=lambda entry: entry.name):
            path = prefix + entry.name
            suffix = os.path.splitext(entry.name)[1].lower() or "without a suffix"
            if entry.name.startswith(IGNORED):
                continue
            if entry.is_symlink() and not self._inside(entry.path):
                if refuse_links:
                    raise self._leaves(path)
                self.skipped.setdefault("links out of the folder", []).append(path)
            elif suffix in IMAGE_SUFFIXES and not entry.is_file():
                # but folders, pipes or broken links
                self.skipped.setdefault("that are not files", []).append(path)
            elif entry.is_dir(follow_symlinks=False):
                yield from self._walk(path, refuse_links)
            elif suffix in IMAGE_SUFFIXES:
                yield path
            elif suffix not in DOCUMENTS:
                kind = "linked folders" if entry.is_dir() else suffix
                self.skipped.setdefault(kind, []).append(path)

    def _files(self, folder: str) -> dict[str, bool]:
        if not self._inside(os.path.join(self._real, folder)):
            raise self._leaves(folder)
        listed = {}
        for entry in self._scan(folder):
            inside = not entry.is_symlink() or self._inside(entry.path)
            if not inside or entry.is_file():
                listed[entry.name] = inside
        return listed

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(os.path.join(self._real, folder)) as entries:
                return list(entries)
        except OSError as error:
            if error.errno in ABSENT:
                return []
            raise DuplexError(f"{self.root / folder} cannot be listed: {error.strerror}") from error

    def _inside(self, path: str) -> bool:
        real = os.path.realpath(path)
        return real == self._real or real.startswith(self._real.rstrip(os.sep) + os.sep)

    def _leaves(self, path: str) -> DuplexError:
        return DuplexError(
            f"{self.root / path} is a link that leaves the images' folder; put the files themselves there, "
            "or give the folder that it leads to as the images' folder"
        )


def read_bytes(path: Path) -> bytes:
    """The bytes of a file; raises DuplexError if it is missing or unreadable."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DuplexError(f"{path} does not exist") from error
    except OSError as error:
        raise DuplexError(f"{path} cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str:
    """Read text in UTF-8, or UTF-16 with a byte-order mark; DuplexError for other encodings."""
    data = read_bytes(path)
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DuplexError(f"{path} is not UTF-8 text (bad byte at position {error.start}); save it as UTF-8") from error
    if "\0" in text:
        raise DuplexError(f"{path} is not text: it holds a zero byte; save it as UTF-8")
    return text
