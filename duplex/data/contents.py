"""Find images of equal content, by a key per image: equal for files with the same bytes or the same upright pixels.

Only images of equal width and height can have equal pixels; the others are not decoded. JPEGs are first compared with
each other at an eighth of their size, which is several times as fast, and completely only where that is equal.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from PIL import Image, ImageOps

from duplex.data.image_errors import machine_fault
from duplex.system.progress import track


@dataclass(frozen=True)
class FileHead:
    """The sha256 of an image file, width and height, and whether it is a JPEG: known without decoding pixels."""

    digest: str
    size: tuple[int, int]  # smaller side first: EXIF may swap them
    is_jpeg: bool


def content_keys(root: Path, images: Sequence[str]) -> list[str]:
    """Return one key per image below `root`: equal for images of equal content, unique for unreadable files."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        heads = list(track(pool.map(lambda image: _head(root / image), images), "comparing images", len(images)))
        first = {head.digest: root / image for head, image in zip(heads, images, strict=True) if head is not None}
        by_digest = {head.digest: head for head in heads if head is not None}
        others = {head.size for head in by_digest.values() if not head.is_jpeg}
        sizes = Counter(head.size for head in by_digest.values())
        compared = [head for head in by_digest.values() if sizes[head.size] > 1]
        small = pool.map(lambda head: _pixels(first[head.digest], head.size not in others), compared)
        coarse = dict(zip((head.digest for head in compared), small, strict=True))
        times = Counter(coarse.values())
        alike = [digest for digest, pixels in coarse.items() if times[pixels] > 1]
        fine = dict(zip(alike, pool.map(lambda digest: _pixels(first[digest], False), alike), strict=True))
    own = (image if head is None else head.digest for image, head in zip(images, heads, strict=True))
    return [fine.get(key, key) for key in own]


def join_keys(keys: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return one key per image from two lists of keys, equal for images that are equal by either list.

    Images that are equal to the same third image have equal keys too. Without equal keys in `others`, the result is
    `keys`.
    """
    first = pd.Series(range(len(keys)))  # the first image that is known to be equal to each
    while True:
        joined = first.groupby(list(keys)).transform("min").groupby(list(others)).transform("min")
        if joined.equals(first):
            return [keys[place] for place in first]
        first = joined


def _head(path: Path) -> FileHead | None:
    """Return an image file's sha256, width, height and whether it is a JPEG; None if it is missing or no image."""
    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            width, height = sorted(image.size)
            return FileHead(hashlib.sha256(data).hexdigest(), (width, height), image.format == "JPEG")
    except Exception as error:  # Pillow's decoders raise almost anything for bytes that are no image
        if fault := machine_fault(path, error):
            raise fault from error
        return None


def _pixels(path: Path, draft: bool) -> str:
    """Return the sha256 of an image's shape and upright RGB pixels; for an unreadable image, a text with its path.

    draft: decode a JPEG at an eighth of its size.
    """
    try:
        with Image.open(path) as image:
            if draft:
                image.draft("RGB", (1, 1))
            pixels = ImageOps.exif_transpose(image)
            if not pixels.mode.startswith(("I", "F")):  # wider than 8 bits: conversion would clip them to white
                pixels = pixels.convert("RGB")
    except Exception as error:  # Pillow's decoders raise almost anything for bytes that are no image
        if fault := machine_fault(path, error):
            raise fault from error
        return f"unreadable {path}"
    return hashlib.sha256(f"{pixels.mode} {pixels.size}".encode() + pixels.tobytes()).hexdigest()
