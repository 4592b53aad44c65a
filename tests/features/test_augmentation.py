"""Crops and views of an image, compared with the formula written out."""

from __future__ import annotations

import math
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from duplex.features.augmentation import Augmentation, Box, box


@pytest.mark.parametrize(
    ("size", "middle"),
    [
        *(((400, 3), (198, 0, 202, 3)), ((3, 400), (0, 198, 3, 202))),
        *(((9, 1), (4, 0, 5, 1)), ((1, 9), (0, 4, 1, 5)), ((1, 1), (0, 0, 1, 1))),
    ],
)
def test_the_crop_of_a_strip_is_its_middle(size: tuple[int, int], middle: Box) -> None:
    assert box(np.random.default_rng(0), *size) == middle


def naive(random: np.random.Generator, width: int, height: int) -> Box | None:
    """The formula, ten times; None if no crop fits."""
    for _ in range(10):
        area = random.uniform(0.9, 1.0) * width * height
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if w <= width and h <= height:
            left, upper = int(random.integers(0, width - w + 1)), int(random.integers(0, height - h + 1))
            return left, upper, left + w, upper + h
    return None


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 400))
def test_a_crop_equals_the_naive_one_or_is_the_middle(seed: int, width: int, height: int) -> None:
    left, upper, right, lower = box(np.random.default_rng(seed), width, height)
    expected = naive(np.random.default_rng(seed), width, height)
    if expected is not None:
        assert (left, upper, right, lower) == expected
    else:
        w, h = right - left, lower - upper
        assert (left, upper) == ((width - w) // 2, (height - h) // 2) and (w == width or h == height)
    assert 0 <= left < right <= width and 0 <= upper < lower <= height


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
    assert Augmentation(3, True).identity == {"views": "3", "flip": "true"}
