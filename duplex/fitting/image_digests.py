"""Digests of image files and of their pixels, by which `duplex fit` and `duplex update` recognise copies of images.

    MODEL.cache/pixels.json    digest of the pixels of each image, by the sha256 of its file

A second fit reads the digests of pixels from this file, and decodes only images that are not listed there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import PIL

from duplex.data.image_errors import MachineFault, machine_fault
from duplex.errors import DuplexError
from duplex.features.image_files import BadImageFile, decode_image
from duplex.system.files import sha256, write_json
from duplex.system.progress import track
from duplex.training.checkpoint import with_checksum

PIXELS = "pixels.json"
DECODER = {"format": "duplex-pixels-1", "decoder": f"Pillow {PIL.__version__}"}  # others may decode other pixels


def content_digests(root: Path, images: Sequence[str]) -> list[str]:
    """Return the sha256 of each image file below `root`; "" for a file that is not there."""

    def digest(image: str) -> str:
        return sha256(root / image) if (root / image).is_file() else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(track(pool.map(digest, images), "reading images", len(images)))


def read_digests(root: Path, images: Sequence[str], known: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the sha256 of each image file, and a dictionary from the sha256 to a digest of the image's pixels.

    Both digests are computed from the bytes of one reading, so that they belong together even if the file is replaced
    meanwhile. Pixels are those that encoders read: RGB, upright. For an unreadable image, the sha256 of its file takes
    the place of the digest of its pixels; for a missing file, both are "".

    known: pixel digests that were computed before, by the sha256 of the file; these images are not decoded.
    """

    def digests(image: str) -> tuple[str, str]:
        path = root / image
        if not path.is_file():
            return "", ""
        data = path.read_bytes()
        file = hashlib.sha256(data).hexdigest()
        return file, known.get(file) or _pixel_digest(path, data) or file

    # every thread changes the warning filters of the process and puts back those that it found
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = list(track(pool.map(digests, images), "reading images", len(images)))
    return [file for file, _ in pairs], dict(pairs)


def _pixel_digest(path: Path, data: bytes) -> str | None:
    """Return a digest of an image's width, height and pixels; None for an unreadable image.

    path: its file, for error messages.
    data: content of the file.
    """
    try:
        image = decode_image(io.BytesIO(data))
    except BadImageFile:
        return None
    except MachineFault as fault:  # names the bytes instead of the file
        raise machine_fault(path, fault.__cause__ or fault) or fault from fault
    return hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()


def changed_images(root: Path, images: Mapping[str, str]) -> list[str]:
    """Return the paths of the images whose file no longer has the sha256 that it had before it was encoded.

    images: sha256 of an image file before the encoding -> its path below `root`.
    """
    names = list(images.values())
    after = content_digests(root, names)
    return [name for name, before, now in zip(names, images, after, strict=True) if now != before]


def change_error(image: Path) -> DuplexError:
    """Return the error for an image file that was replaced between computing its digest and encoding it."""
    return DuplexError(f"{image} changed while it was being encoded; run the command again")


def load_pixel_digests(cache: Path) -> dict[str, str]:
    """Return the pixel digests that a cache folder stores, as a dictionary from the sha256 of the image file.

    It is empty if the file is missing, damaged or of another Pillow version.
    """
    path = cache / PIXELS
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    pixels: object = record.get("pixels") if isinstance(record, dict) else None
    return pixels if isinstance(pixels, dict) and record == with_checksum({**DECODER, "pixels": pixels}) else {}


def save_pixel_digests(cache: Path, pixels: Mapping[str, str]) -> None:
    """Write pixel digests of images to a cache folder; unreadable images are left out.

    pixels: sha256 of an image file -> digest of its pixels.
    """
    decoded = {file: digest for file, digest in sorted(pixels.items()) if digest != file}
    write_json(cache / PIXELS, with_checksum({**DECODER, "pixels": decoded}))
