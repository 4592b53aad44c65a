"""The comparison of added variances: halves of the pairs, and the spread of new images by loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.added_variance import FEWEST, pair_halves, spread


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_spread_is_that_of_loops_over_images(seed: int) -> None:
    random = np.random.default_rng(seed)
    train, new = random.standard_normal((60, 3)), random.standard_normal((40, 3))
    labels, others = random.integers(0, 6, 60), random.integers(0, 8, 40)
    own, other, images, count = 0.0, 0.0, 0, 0
    for pair in range(8):
        members = [z for z, label in zip(train, labels, strict=True) if label == pair]
        strangers = [z for z, label in zip(new, others, strict=True) if label == pair]
        if len(members) < FEWEST or not strangers:
            continue
        mean, n = sum(members) / len(members), len(members)
        own += sum(((z - mean) ** 2).sum() for z in members) * n / (n - 1)
        other += sum(((z - mean) ** 2).sum() for z in strangers) * n / (n + 1)
        images, count = images + n, count + len(strangers)
    tensors = map(torch.from_numpy, (train, labels, new, others))
    assert spread(*tensors) == pytest.approx((other / count) / (own / images))


def test_the_spread_of_images_of_one_distribution_is_one_and_grows_with_their_scale() -> None:
    random = torch.Generator().manual_seed(0)
    z, new = (torch.randn(4000, 8, generator=random, dtype=torch.float64) for _ in range(2))
    labels = torch.arange(4000) % 20
    assert spread(z, labels, new, labels) == pytest.approx(1, abs=0.03)
    assert spread(0.5 * z, labels, new, labels) == pytest.approx(4, abs=0.15)


def test_images_of_a_pair_are_in_one_half_and_halves_have_seen_and_unseen_pairs() -> None:
    compositions = np.repeat(np.arange(10), 3)
    halves = pair_halves(compositions, np.arange(6))
    for pair in range(10):
        assert len(set(halves[compositions == pair])) == 1
    of_pairs = halves[::3]
    assert of_pairs[:6].sum() == 3 and of_pairs[6:].sum() == 2
