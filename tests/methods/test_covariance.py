from __future__ import annotations

import numpy as np
import pytest
import torch

from duplex.methods.gaussian import ClassStatistics, oas_shrinkage, shared_whitening
from tests.methods import twin_closed_form as twin
from tests.methods.test_gaussian_prototypes import close, world


def test_oas_approaches_scikit_learns_in_many_dimensions() -> None:
    """scikit-learn drops the `2 / d` of Eq. 23, which matters for small d."""
    from sklearn.covariance import oas as theirs

    x = np.random.default_rng(0).standard_normal((150, 100)) * np.linspace(0.2, 2, 100)
    sample = torch.from_numpy(x.T @ x / len(x))
    assert oas_shrinkage(sample, len(x)) == pytest.approx(theirs(x, assume_centered=True)[1], abs=0.005)


@pytest.mark.parametrize("images", [400, 12, 10, 9, 8, 5, 3], ids=lambda images: f"{images} images of 8 pairs")
def test_whitening_gives_an_identity_covariance(images: int) -> None:
    """The covariance is about each pair's mean if any pair has two images, else about the mean of all."""
    z, own, m, n = world(images=images, pairs=min(images, 8))
    whitening = shared_whitening(ClassStatistics.of(z, own, m, n).by_pair())
    close(whitening.T @ torch.from_numpy(twin.covariance(z.numpy(), own.numpy())) @ whitening, np.eye(5), 1e-7)


@pytest.mark.parametrize("images", [1, 20])
def test_identical_images_get_the_largest_variance_of_unit_features(images: int) -> None:
    z, own, m, n = world(images=images, pairs=1)
    whitening = shared_whitening(ClassStatistics.of(z[:1].expand(images, -1), own, m, n).by_pair())
    close(whitening.T @ whitening, 5 * np.eye(5))
