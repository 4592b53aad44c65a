"""Find copies of images.

Two files are copies if their bytes are equal, or if an encoder sees the same pixels in both: the RGB pixels of
`decode_image`, upright and with 16-bit grey scaled to 8 bits.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from numpy.typing import NDArray
from PIL import Image

from duplex.data.image_errors import MachineFault, machine_fault
from duplex.data.image_files import READABLE, BadImageFile, decode_image
from duplex.errors import DuplexError
from duplex.system.files import sha256
from duplex.system.progress import track


@dataclass(frozen=True)
class FileHead:
    """What is known of an image file without decoding its pixels."""

    path: Path
    digest: str  # sha256 of its bytes; "" for a missing file
    size: tuple[int, int] | None = None  # smaller side first, since EXIF may swap them; None: not an image
    is_jpeg: bool = False


def content_keys(root: Path, images: Sequence[str]) -> list[str]:
    """One key per image below `root`: equal for copies, different for all other images.

    Only images of equal width and height can have equal pixels; the others are not decoded. JPEGs are first compared
    at an eighth of their size, which is several times as fast, and completely only where that is equal.
    """
    # every thread changes the warning filters of the process and puts back those that it found
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        heads = list(track(pool.map(lambda image: _head(root / image), images), "comparing images", len(images)))
        files = {head.digest: head for head in heads if head.size is not None}
        times = Counter(head.size for head in files.values())
        compared = [head for head in files.values() if times[head.size] > 1]
        mixed = {head.size for head in compared if not head.is_jpeg}
        coarse = list(pool.map(lambda head: _file_pixels(head, draft=head.size not in mixed), compared))
        repeats = Counter(coarse)
        alike = [head for head, pixels in zip(compared, coarse, strict=True) if repeats[pixels] > 1]
        fine = pool.map(lambda head: _file_pixels(head, draft=False), alike)
        keys = dict(zip((head.digest for head in alike), fine, strict=True))
    return [keys.get(head.digest, head.digest) or image for head, image in zip(heads, images, strict=True)]


def _head(path: Path) -> FileHead:
    digest = ""
    try:
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        with Image.open(io.BytesIO(data), formats=READABLE) as image:
            width, height = sorted(image.size)
            return FileHead(path, digest, (width, height), image.format == "JPEG")
    except Exception as error:  # Pillow's decoders raise almost anything for bytes that are no image
        if fault := machine_fault(path, error):
            raise fault from error
        return FileHead(path, digest)


def _file_pixels(head: FileHead, *, draft: bool) -> str:
    return _pixel_digest(head.path, head.path.read_bytes(), draft=draft) or head.digest


def _pixel_digest(path: Path, data: bytes, *, draft: bool = False) -> str | None:
    """Digest of an image's size and pixels; None if `data`, the content of the file `path`, is not readable."""
    try:
        image = decode_image(io.BytesIO(data), draft=draft)
    except BadImageFile:
        return None
    except MachineFault as fault:  # names the bytes instead of the file
        raise machine_fault(path, fault.__cause__ or fault) or fault from fault
    return hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()


def read_digests(root: Path, images: Sequence[str], known: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The sha256 of each image file, and a dictionary from it to a digest of the pixels; both "" for a missing file.

    The two are of the bytes of one reading, so that they belong together even if the file is replaced meanwhile. For
    an unreadable image, the sha256 of the file also stands for its pixels.

    Args:
        known: digests of pixels from before, by the sha256 of the file; these images are not decoded.
    """

    def digests(image: str) -> tuple[str, str]:
        path = root / image
        if not path.is_file():
            return "", ""
        data = path.read_bytes()
        file = hashlib.sha256(data).hexdigest()
        return file, known.get(file) or _pixel_digest(path, data) or file

    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = list(track(pool.map(digests, images), "reading images", len(images)))
    return [file for file, _ in pairs], dict(pairs)


def file_digests(root: Path, images: Sequence[str]) -> list[str]:
    """The sha256 of each image file below `root`; "" for a missing one."""

    def digest(image: str) -> str:
        return sha256(root / image) if (root / image).is_file() else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(track(pool.map(digest, images), "reading images", len(images)))


def changed_images(root: Path, images: Mapping[str, str]) -> list[str]:
    """The paths of images whose file has another sha256 than before it was encoded.

    Args:
        images: sha256 of an image file before the encoding -> its path below `root`.
    """
    names = list(images.values())
    after = file_digests(root, names)
    return [name for name, before, now in zip(names, images, after, strict=True) if now != before]


def change_error(image: Path) -> DuplexError:
    return DuplexError(f"{image} changed while it was being encoded; run the command again")


def row_keys(values: NDArray[Any]) -> list[str]:
    """One key per row of features [N, d], equal for rows of equal numbers."""
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in values]


def join_keys(keys: Sequence[str], others: Sequence[str]) -> list[str]:
    """One key per image from two lists of keys, equal for images that are equal by either list.

    Images that are equal to the same third image have equal keys too. Without equal keys in `others`, the result is
    `keys`.
    """
    first = pd.Series(range(len(keys)))  # the first image that is known to be equal to each
    while True:
        joined = first.groupby(list(keys)).transform("min").groupby(list(others)).transform("min")
        if joined.equals(first):
            return [keys[place] for place in first]
        first = joined
