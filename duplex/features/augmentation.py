"""Views of an image: seeded crops, mirrored where the data set allows it.

A view depends only on the image's name and the view's number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from PIL import Image

AREA = 0.9, 1.0  # crop's share of the image, as in open_clip's training transform
ASPECT = 3 / 4, 4 / 3  # crop's width over height
TRIES = 10  # random crops before falling back to the middle
MOST = 100  # views of an image
Box = tuple[int, int, int, int]  # left, upper, right, lower


@dataclass(frozen=True)
class Augmentation:
    """The views to make of each image: `count` random crops, a random half of them mirrored if `flip`."""

    count: int
    flip: bool

    @property
    def identity(self) -> dict[str, str]:
        return {"views": str(self.count), "flip": "true" if self.flip else "false"}

    def rows(self, images: Sequence[str]) -> list[str]:
        """Return each image `count` times, one after another: the image of every row of a cache of views."""
        return [image for image in images for _ in range(self.count)]

    def view(self, image: Image.Image, name: str, number: int, size: tuple[int, int]) -> Image.Image:
        """Return view `number` of the image called `name`, resized to the encoder's input `size` (height, width), so
        that the encoder's transform neither resizes nor crops further."""
        random = np.random.default_rng([crc32(name.encode("utf-8", "surrogateescape")), number])
        crop = image.crop(box(random, *image.size)).resize(size[::-1], Image.Resampling.BICUBIC)
        mirrored = self.flip and random.random() < 0.5
        return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else crop


def box(random: np.random.Generator, width: int, height: int) -> Box:
    """Return a random crop box, uniform in area (a share AREA) and log aspect ratio (ASPECT), anywhere in the image; if
    none of `TRIES` tries fits, the largest centred box with an aspect ratio within ASPECT."""
    for _ in range(TRIES):
        area = width * height * random.uniform(*AREA)
        aspect = math.exp(random.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if w <= width and h <= height:
            left, upper = int(random.integers(width - w + 1)), int(random.integers(height - h + 1))
            return left, upper, left + w, upper + h
    w = min(width, max(1, round(height * ASPECT[1])))
    h = min(height, max(1, round(width / ASPECT[0])))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h
