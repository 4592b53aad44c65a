"""Crops and views of an image, compared with the formula written out."""

from __future__ import annotations

import math
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

from duplex.features.augmentation import Augmentation, Box, box


class GivenNumbers:
    """A generator with given numbers, each a position between the bounds of the call."""

    def __init__(self, *places: float) -> None:
        self.places = list(places)
        self.ends: list[tuple[float, float]] = []

    def uniform(self, low: float, high: float) -> float:
        self.ends.append((low, high))
        return low + self.places.pop(0) * (high - low)

    def integers(self, stop: int) -> int:
        self.ends.append((0, stop))
        return int(self.places.pop(0) * stop)


def crop(width: int, height: int, *places: float) -> tuple[Box, list[tuple[float, float]]]:
    numbers = GivenNumbers(*places)
    return box(numbers, width, height), numbers.ends  # type: ignore[arg-type]


def test_a_crop_has_nine_tenths_of_the_image_and_an_aspect_up_to_four_to_three() -> None:
    """Area 0.9 of 1000 x 900, as wide as it is high: a side of sqrt(810,000) = 900, 101 places across and one down."""
    (left, upper, right, lower), ends = crop(1000, 900, 0.0, 0.5, 0.5, 0.0)
    assert (left, upper, right, lower) == (50, 0, 950, 900)
    assert ends[0] == (0.9, 1.0)
    assert ends[1] == (pytest.approx(math.log(3 / 4)), pytest.approx(math.log(4 / 3)))
    assert ends[2:] == [(0, 101), (0, 1)]


def test_a_crop_may_touch_every_side() -> None:
    """The whole of an image of four to three, and its lower right corner."""
    assert crop(400, 300, 1.0, 1.0, 0.0, 0.0)[0] == (0, 0, 400, 300)
    found, ends = crop(1000, 1000, 0.0, 0.5, 0.999, 0.999)
    side = round(math.sqrt(0.9) * 1000)
    assert found == (1000 - side, 1000 - side, 1000, 1000) and ends[2:] == [(0, 1001 - side)] * 2


def test_a_crop_that_does_not_fit_is_drawn_again_ten_times() -> None:
    """A crop of four to three is wider than a square image; then a square one is drawn."""
    found, ends = crop(100, 100, 1.0, 1.0, *[0.0, 1.0] * 8, 0.0, 0.5, 0.0, 0.0)
    assert found == (0, 0, 95, 95) and len(ends) == 2 * 10 + 2
    found, ends = crop(100, 100, *[1.0, 1.0] * 10)
    assert found == (0, 0, 100, 100) and len(ends) == 2 * 10
    assert crop(100, 100, *[1.0, 0.0] * 10)[0] == (0, 0, 100, 100)  # higher than the picture


@pytest.mark.parametrize(
    ("size", "middle"),
    [((400, 3), (198, 0, 202, 3)), ((3, 400), (0, 198, 3, 202)), ((9, 1), (4, 0, 5, 1)), ((1, 9), (0, 4, 1, 5))],
)
def test_the_crop_of_a_strip_is_its_middle(size: tuple[int, int], middle: Box) -> None:
    assert box(np.random.default_rng(0), *size) == middle


def test_the_crop_of_one_pixel_is_that_pixel() -> None:
    assert box(np.random.default_rng(0), 1, 1) == (0, 0, 1, 1)


def test_a_view_depends_on_the_images_name_and_the_views_number() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (72, 80, 3), dtype=np.uint8))
    shown = {(name, view): np.asarray(Augmentation(4, True).view(picture, name, view, (20, 30)))
             for name in ("a.png", "b.png") for view in range(4)}  # fmt: skip
    assert all(one.shape == (20, 30, 3) for one in shown.values())
    assert len({one.tobytes() for one in shown.values()}) == 8
    for (name, view), one in shown.items():
        random = np.random.default_rng([crc32(name.encode()), view])
        part = picture.crop(box(random, 80, 72)).resize((30, 20), Image.Resampling.BICUBIC)
        mirrored = random.random() < 0.5
        assert np.array_equal(one, np.asarray(part)[:, ::-1] if mirrored else np.asarray(part))


def test_the_views_of_one_image_are_neighbours() -> None:
    assert Augmentation(2, False).rows(["a", "b"]) == ["a", "a", "b", "b"]
    assert Augmentation(2, False).identity == {"views": "2", "flip": "false"}
    assert Augmentation(3, True).identity == {"views": "3", "flip": "true"}
