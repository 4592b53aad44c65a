"""Which part of a picture a view shows: a plain twin of the formula, and what its numbers mean."""

from __future__ import annotations

import math
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from duplex.config.params import ExtractionParams
from duplex.features.augmentation import Augmentation, Box, box


class Stated:
    """Random numbers that are told beforehand, each as its place between the two ends it is asked for."""

    def __init__(self, *places: float) -> None:
        self.places = list(places)
        self.ends: list[tuple[float, float]] = []

    def uniform(self, low: float, high: float) -> float:
        self.ends.append((low, high))
        return low + self.places.pop(0) * (high - low)

    def integers(self, stop: int) -> int:
        self.ends.append((0, stop))
        return int(self.places.pop(0) * stop)


def stated(width: int, height: int, *places: float) -> tuple[Box, list[tuple[float, float]]]:
    told = Stated(*places)
    return box(told, width, height), told.ends  # type: ignore[arg-type]


def test_a_part_is_nine_tenths_of_a_picture_or_more_and_no_longer_than_four_to_three() -> None:
    """Area 0.9 of 1000 x 900, as wide as it is high: a side of sqrt(810,000) = 900, 101 places across and one down."""
    (left, upper, right, lower), ends = stated(1000, 900, 0.0, 0.5, 0.5, 0.0)
    assert (left, upper, right, lower) == (50, 0, 950, 900)
    assert ends[0] == (0.9, 1.0)
    assert ends[1] == (pytest.approx(math.log(3 / 4)), pytest.approx(math.log(4 / 3)))
    assert ends[2:] == [(0, 101), (0, 1)]


def test_a_part_may_touch_every_side() -> None:
    """The whole of a picture of four to three, and its lowest right part."""
    assert stated(400, 300, 1.0, 1.0, 0.0, 0.0)[0] == (0, 0, 400, 300)
    found, ends = stated(1000, 1000, 0.0, 0.5, 0.999, 0.999)
    side = round(math.sqrt(0.9) * 1000)
    assert found == (1000 - side, 1000 - side, 1000, 1000) and ends[2:] == [(0, 1001 - side)] * 2


def test_what_does_not_fit_is_drawn_again_ten_times() -> None:
    """A part of four to three is wider than a square picture; then it is drawn square."""
    found, ends = stated(100, 100, 1.0, 1.0, *[0.0, 1.0] * 8, 0.0, 0.5, 0.0, 0.0)
    assert found == (0, 0, 95, 95) and len(ends) == 2 * 10 + 2
    found, ends = stated(100, 100, *[1.0, 1.0] * 10)
    assert found == (0, 0, 100, 100) and len(ends) == 2 * 10
    assert stated(100, 100, *[1.0, 0.0] * 10)[0] == (0, 0, 100, 100)  # higher than the picture


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_where_nothing_fits_it_is_the_middle_as_near_to_the_aspect_as_it_goes(width: int, height: int) -> None:
    never = Stated(*[1.0, 1.0 if width < height * 4 / 3 else 0.0] * 10, 0.0, 0.0)
    found = box(never, width, height)  # type: ignore[arg-type]
    if len(never.ends) == 2 * 10 + 2 or len(never.ends) < 2 * 10:
        return  # one fitted after all
    w = min(width, max(1, round(height * 4 / 3)))
    h = min(height, max(1, round(width * 4 / 3)))
    assert found == ((width - w) // 2, (height - h) // 2, (width - w) // 2 + w, (height - h) // 2 + h)


@pytest.mark.parametrize(
    ("size", "middle"),
    [((400, 3), (198, 0, 202, 3)), ((3, 400), (0, 198, 3, 202)), ((9, 1), (4, 0, 5, 1)), ((1, 9), (0, 4, 1, 5))],
)
def test_a_strip_shows_its_middle(size: tuple[int, int], middle: Box) -> None:
    assert box(np.random.default_rng(0), *size) == middle


def test_a_single_pixel_is_shown() -> None:
    assert box(np.random.default_rng(0), 1, 1) == (0, 0, 1, 1)


def test_a_view_follows_the_pictures_name_and_its_own_number() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (72, 80, 3), dtype=np.uint8))
    shown = {(name, view): np.asarray(Augmentation(4, True).show(picture, name, view, (20, 30)))
             for name in ("a.png", "b.png") for view in range(4)}  # fmt: skip
    assert all(one.shape == (20, 30, 3) for one in shown.values())
    assert len({one.tobytes() for one in shown.values()}) == 8
    for (name, view), one in shown.items():
        random = np.random.default_rng([crc32(name.encode()), view])
        part = picture.crop(box(random, 80, 72)).resize((30, 20), Image.Resampling.BICUBIC)
        mirrored = random.random() < 0.5
        assert np.array_equal(one, np.asarray(part)[:, ::-1] if mirrored else np.asarray(part))


def test_rows_are_all_views_of_one_picture_after_those_of_another() -> None:
    assert Augmentation(2, False).rows(["a", "b"]) == ["a", "a", "b", "b"]
    assert Augmentation(2, False).identity == {"views": "2", "flip": "false"}
    assert Augmentation(3, True).identity == {"views": "3", "flip": "true"}


def test_a_picture_has_a_hundred_views_at_most() -> None:
    assert ExtractionParams(views=100).views == 100
    with pytest.raises(ValidationError):
        ExtractionParams(views=101)
