"""The spread within groups against a twin with plain loops, however few the images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from duplex.layers.covariance import oas, spread
from duplex.layers.statistics import Statistics
from tests.layers import twin_closed_form as twin
from tests.layers.test_gaussian_prototypes import close, world


def test_oas_nears_scikit_learns_where_dimensions_are_many() -> None:
    """scikit-learn drops the `2 / d` of Eq. 23, which matters where d is small."""
    from sklearn.covariance import oas as theirs

    x = np.random.default_rng(0).standard_normal((150, 100)) * np.linspace(0.2, 2, 100)
    sample = torch.from_numpy(x.T @ x / len(x))
    assert oas(sample, len(x)) == pytest.approx(theirs(x, assume_centered=True)[1], abs=0.005)


def test_a_round_sample_is_taken_for_round() -> None:
    assert oas(torch.eye(4, dtype=torch.float64), 50) == 1.0
    nearly = torch.diag(torch.tensor([1.0, 1.0, 1.0, 1.001], dtype=torch.float64))
    assert oas(nearly, 50) == 1.0


@pytest.mark.parametrize("images", [400, 12, 10, 9, 8, 5, 3], ids=lambda images: f"{images} images of 8 pairs")
def test_whitening_makes_the_spread_round(images: int) -> None:
    """About each pair's mean while any pair has two images, else about the mean of all."""
    z, own, m, n = world(images=images, pairs=min(images, 8))
    found = spread(Statistics.of(z, own, m, n).by_pair())
    close(found.covariance, twin.covariance(z.numpy(), own.numpy()))
    close(found.whitening.T @ found.covariance @ found.whitening, np.eye(5), 1e-7)


@pytest.mark.parametrize("images", [1, 20])
def test_pictures_that_are_all_the_same_spread_as_far_as_unit_features_can(images: int) -> None:
    z, own, m, n = world(images=images, pairs=1)
    found = spread(Statistics.of(z[:1].expand(images, -1), own, m, n).by_pair())
    close(found.covariance, np.eye(5) / 5)
    close(found.whitening.T @ found.whitening, 5 * np.eye(5))


def test_the_spread_of_features_of_any_length_is_found() -> None:
    """Features a thousand times as short have a millionth of the spread; nothing is taken for no spread at all."""
    z, own, m, n = world(images=100)
    plain, short = (spread(Statistics.of(x, own, m, n).by_pair()).covariance for x in (z, z / 1000))
    close(short * 1e6, plain, 1e-7)
