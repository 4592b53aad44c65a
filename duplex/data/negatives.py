"""Draw images that show no pair of any data set: noise, waves and flat shapes, from fixed seeds.

The detector of unknown images is fitted with them (`training.novelty`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIDE = 96  # pixels
PER_KIND = 80
MOST_SHAPES, MOST_WAVES = 7, 4
Generator = np.random.Generator


@cache
def draw_negatives() -> tuple[Image.Image, ...]:
    """`PER_KIND` RGB images of each of `KINDS`, in this order."""
    images = []
    for kind, draw in enumerate(KINDS.values()):
        images += [draw(np.random.default_rng([kind, number])) for number in range(PER_KIND)]
    return tuple(images)


def _noise(random: Generator) -> Image.Image:
    """Coloured noise whose amplitude falls with frequency f as 1 / f^a, from white noise to clouds."""
    f = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE)))
    f[0, 0] = 1 / SIDE
    spectrum = np.fft.fft2(random.normal(size=(3, SIDE, SIDE))) * f ** -random.uniform(0, 3)
    planes = np.fft.ifft2(spectrum).real  # [3, SIDE, SIDE]
    planes = (planes - planes.mean((1, 2), keepdims=True)) / planes.std((1, 2), keepdims=True)
    mix = random.normal(0, 0.6, (3, 3)) + random.normal(size=(3, 1))  # colours vary together
    mix /= np.linalg.norm(mix, axis=1, keepdims=True)
    level = random.uniform(0.2, 0.8, 3)
    contrast = random.uniform(0.03, 0.3)
    return _image(level + contrast * np.einsum("cp,pyx->yxc", mix, planes))


def _waves(random: Generator) -> Image.Image:
    """A sum of plane waves in two colours, smooth or with edges."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE - 0.5
    total = np.zeros((SIDE, SIDE))
    for _ in range(random.integers(1, MOST_WAVES + 1)):
        turn = random.uniform(0, 2 * np.pi)
        rate = random.uniform(0.3, 14)
        along = np.cos(turn) * x + np.sin(turn) * y
        total += np.sin(2 * np.pi * (rate * along + random.random()))
    if random.random() < 0.4:
        total = np.sign(total)
    share = (total - total.min()) / max(np.ptp(total), 1e-9)
    first, second = random.random((2, 3))
    grain = random.normal(0, random.uniform(0, 0.04), (SIDE, SIDE, 1))
    return _image(first + (second - first) * share[..., None] + grain)


def _shapes(random: Generator) -> Image.Image:
    """Ellipses, polygons and lines of random colours on a plain ground."""

    def colour() -> tuple[int, ...]:
        return tuple(random.integers(0, 256, 3).tolist())

    image = Image.new("RGB", (SIDE, SIDE), colour())
    pen = ImageDraw.Draw(image)
    for _ in range(random.integers(1, MOST_SHAPES + 1)):
        centre = random.uniform(0, SIDE, 2)
        radius = random.uniform(5, SIDE / 2)
        form = random.integers(3)
        if form == 0:
            reach = radius * random.uniform(0.3, 1, 2)
            pen.ellipse([*(centre - reach), *(centre + reach)], fill=colour())
        elif form == 1:
            angle = np.sort(random.uniform(0, 2 * np.pi, random.integers(3, 9)))
            corners = radius * random.uniform(0.5, 1, (len(angle), 1)) * np.stack([np.cos(angle), np.sin(angle)], 1)
            pen.polygon([tuple(corner) for corner in (centre + corners).tolist()], fill=colour())
        else:
            end = centre + random.uniform(-radius, radius, 2)
            pen.line([*centre, *end], fill=colour(), width=int(random.integers(1, 9)))
    return image


def _image(canvas: NDArray[Any]) -> Image.Image:
    return Image.fromarray((255 * np.clip(canvas, 0, 1)).astype(np.uint8))


KINDS: dict[str, Callable[[Generator], Image.Image]] = {"noise": _noise, "waves": _waves, "shapes": _shapes}
