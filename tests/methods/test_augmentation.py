"""Augmented pixels against a naive twin that looks up every output pixel alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from duplex.methods.augmentation import (
    DRAWN,
    draw_crops,
    draw_flips,
    draw_matrices,
    draw_perspectives,
    draw_rotations,
    homographies,
    warp,
)

CPU = torch.device("cpu")
CORNERS = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], float)


def pictures(size: int = 14) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8, generator=generator)


def naive(picture: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """One image [3, R, R] through one homography, pixel by pixel, before rounding."""
    size = picture.shape[1]
    seen = np.zeros(picture.shape)
    for row in range(size):
        for column in range(size):
            u, v, w = matrix @ [(2 * column + 1) / size - 1, (2 * row + 1) / size - 1, 1]
            x, y = ((u / w + 1) * size - 1) / 2, ((v / w + 1) * size - 1) / 2
            for j in (math.floor(y), math.floor(y) + 1):
                for i in (math.floor(x), math.floor(x) + 1):
                    if 0 <= i < size and 0 <= j < size:
                        seen[:, row, column] += (1 - abs(x - i)) * (1 - abs(y - j)) * picture[:, j, i]
    return seen


@pytest.mark.parametrize("names", [("crop",), ("perspective",), ("rotation",), tuple(DRAWN)])
def test_pixels_equal_those_of_the_naive_twin(names) -> None:
    torch.manual_seed(1)
    matrices = torch.eye(3, dtype=torch.float64).repeat(3, 1, 1)
    for name in names:
        matrices = matrices @ DRAWN[name](3, CPU)
    torch.manual_seed(1)
    seen = warp(pictures(), draw_matrices(3, names, CPU))
    assert not torch.equal(seen, pictures())
    for picture, matrix, found in zip(pictures(), matrices, seen, strict=True):
        error = np.abs(naive(picture.numpy().astype(float), matrix.numpy()) - found.numpy())
        assert error.max() < 0.502  # of rounding


@pytest.mark.parametrize("size", [14, 48, 224])
def test_an_identity_changes_nothing_and_a_flip_is_exact(size: int) -> None:
    images, identity = pictures(size), torch.eye(3, dtype=torch.float64).repeat(3, 1, 1)
    assert torch.equal(warp(images, identity), images)
    assert torch.equal(draw_matrices(3, (), CPU), identity)
    flip = identity.clone()
    flip[:, 0, 0] = -1
    assert torch.equal(warp(images, flip), images.flip(-1))
    torch.manual_seed(0)
    flipped = warp(images, draw_matrices(3, ["flip"], CPU))
    kept = [torch.equal(*pair) for pair in zip(flipped, images, strict=True)]
    assert True in kept and False in kept


def test_strengths_are_the_published_ones() -> None:
    torch.manual_seed(0)
    count = 4000
    flips = draw_flips(count, CPU)[:, 0, 0]
    assert set(flips.tolist()) == {-1.0, 1.0} and abs(float(flips.mean())) < 0.05
    angles = torch.rad2deg(draw_rotations(count, CPU)[:, 1, 0].asin())
    assert float(angles.abs().max()) <= 5 and float(angles.std()) == pytest.approx(5 / 3**0.5, abs=0.1)
    crops = draw_crops(count, CPU)
    width, height = crops[:, 0, 0], crops[:, 1, 1]
    area, ratio = width * height, width / height
    assert 0.08 <= float(area.min()) < 0.1 and 1.3 < float(ratio.max()) <= 4 / 3 + 1e-9 and float(area.max()) < 1
    outer = crops[:, :2, 2].abs() + torch.stack([width, height], 1)
    assert float(outer.max()) <= 1 + 1e-9  # within the image
    moved = homographies(torch.from_numpy(CORNERS).expand(1, 4, 2) * 0.5, torch.from_numpy(CORNERS))
    torch.testing.assert_close(moved[0], torch.diag(torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64)))


def test_perspective_moves_corners_inwards_for_half_of_the_images() -> None:
    torch.manual_seed(0)
    places = []
    for matrix in draw_perspectives(1000, CPU).numpy():
        back = np.linalg.inv(matrix) @ np.c_[CORNERS, np.ones(4)].T
        places.append((back[:2] / back[2]).T)
    inwards = 1 - np.stack(places) * CORNERS  # 0: the corner stays
    assert inwards.min() > -1e-9 and inwards.max() <= 0.5 + 1e-9
    warped = inwards.max(axis=(1, 2)) > 1e-9
    assert 0.45 < warped.mean() < 0.55
    assert inwards[warped].mean() == pytest.approx(0.25, abs=0.01)
