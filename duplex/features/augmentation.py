"""Views of a picture: seeded crops, mirrored where the data set allows it.

Which part of a picture a view shows depends on the picture's name and the view's number, and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from PIL import Image

AREA = 0.9, 1.0  # share of a picture that a view shows: open_clip's training transform
ASPECT = 3 / 4, 4 / 3  # width over height of what it shows
TRIES = 10  # to find such a part within the picture
MOST = 100  # views of a picture
Box = tuple[int, int, int, int]  # left, upper, right, lower


@dataclass(frozen=True)
class Augmentation:
    """How many views of a picture there are, and whether half of them are mirrored."""

    count: int
    flip: bool

    @property
    def identity(self) -> dict[str, str]:
        return {"views": str(self.count), "flip": "true" if self.flip else "false"}

    def rows(self, images: Sequence[str]) -> list[str]:
        """Of which image each row of a cache of views is: all views of the first, then those of the next."""
        return [image for image in images for _ in range(self.count)]

    def show(self, picture: Image.Image, name: str, view: int, size: tuple[int, int]) -> Image.Image:
        """One view, as large as the encoder's pixels (height, width): what its transform resizes and crops no more."""
        random = np.random.default_rng([crc32(name.encode("utf-8", "surrogateescape")), view])
        part = picture.crop(box(random, *picture.size)).resize(size[::-1], Image.Resampling.BICUBIC)
        mirrored = self.flip and random.random() < 0.5
        return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else part


def box(random: np.random.Generator, width: int, height: int) -> Box:
    """`area ~ U(AREA) w h`, `log aspect ~ U(log ASPECT)`, anywhere. Where none fits: the middle, as near to an
    aspect of these as it goes."""
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
