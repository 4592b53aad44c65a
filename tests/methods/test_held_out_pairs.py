"""The covariance's shrinkage by held-out pairs equals loops over pairs, and suits pairs without images."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.methods.gaussian import (
    ADDED,
    FOLDS,
    ClassStatistics,
    ClosedForm,
    FitSettings,
    PairMeans,
    choose_added_variance,
    expected_rivals,
    fit_additive,
    folds,
    shared_whitening,
    within_group_covariance,
)


def compose(seen: PairMeans):
    return fit_additive(seen, 0.5, 0.1).at


def prepare_fit(seen: PairMeans):
    return compose


def sample(rng: np.random.Generator, states: int, objects: int, noise: float = 0.0) -> ClassStatistics:
    """Images in six dimensions: additive means; `noise`: random means of pairs along a direction of little variance."""
    pairs = rng.choice(states * objects, states * objects * 3 // 4, replace=False)
    own = np.repeat(pairs, rng.integers(6, 12, pairs.size))
    a, b = rng.standard_normal((states, 6)), rng.standard_normal((objects, 6))
    z = a[own // objects] + b[own % objects] + 0.7 * rng.standard_normal((own.size, 6))
    z[:, 0] = noise * rng.standard_normal(states * objects)[own] + 0.05 * rng.standard_normal(own.size)
    return ClassStatistics.of(torch.from_numpy(z), torch.from_numpy(own), states, objects)


def naive_rivals(statistics: ClassStatistics, added: float) -> float:
    """The same number by loops over folds, pairs and rivals."""
    groups = statistics.by_pair()
    w = shared_whitening(groups, added).numpy()
    covariance, x = within_group_covariance(groups)[0].numpy(), groups.means.numpy() @ w
    total = weight = 0.0
    for held, rest in folds(statistics):
        means = PairMeans(
            statistics.state_of[rest], statistics.object_of[rest], groups.counts[rest], torch.from_numpy(x)[rest],
            (statistics.states, statistics.objects),
        )  # fmt: skip
        h = compose(means)(statistics.state_of[held], statistics.object_of[held]).numpy()
        for i, pair in enumerate(held.tolist()):
            root = math.sqrt(float(groups.counts[pair]))
            weight += root
            for j in range(len(held)):
                if i != j:
                    apart = h[i] - h[j]
                    margin = x[pair] @ apart - (h[i] @ h[i] - h[j] @ h[j]) / 2
                    deviation = math.sqrt(apart @ w.T @ covariance @ w @ apart)
                    total += root * 0.5 * (1 - math.erf(margin / deviation / math.sqrt(2)))
    return total / weight


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), added=st.sampled_from(ADDED))
def test_expected_rivals_are_those_of_loops(seed: int, added: float) -> None:
    statistics = sample(np.random.default_rng(seed), 5, 6, noise=0.3)
    assert expected_rivals(statistics, added, prepare_fit) == pytest.approx(naive_rivals(statistics, added), rel=1e-6)


def test_every_pair_is_held_out_at_most_once_and_its_words_are_in_the_rest() -> None:
    statistics = sample(np.random.default_rng(0), 6, 7)
    seen: list[int] = []
    for held, rest in folds(statistics):
        seen += held.tolist()
        assert not set(held.tolist()) & set(rest.tolist())
        assert set(statistics.state_of[held].tolist()) <= set(statistics.state_of[rest].tolist())
        assert set(statistics.object_of[held].tolist()) <= set(statistics.object_of[rest].tolist())
    assert len(seen) == len(set(seen)) > len(statistics.pairs) - FOLDS


def test_variance_is_added_where_a_sharp_direction_misleads_about_new_pairs_and_else_not() -> None:
    misleading, plain = (sample(np.random.default_rng(1), 8, 9, noise) for noise in (1.0, 0.0))
    assert choose_added_variance(misleading, prepare_fit) > 0
    assert (
        expected_rivals(plain, 0.0, prepare_fit)
        <= min(expected_rivals(plain, added, prepare_fit) for added in ADDED) + 0.02
    )


def test_without_pairs_to_hold_out_nothing_is_added() -> None:
    z = torch.eye(3, dtype=torch.float64).repeat(2, 1)
    statistics = ClassStatistics.of(z, torch.tensor([0, 4, 8, 0, 4, 8]), 3, 3)  # no word occurs twice
    assert choose_added_variance(statistics, prepare_fit) == 0.0


def test_the_fit_uses_the_chosen_variance_and_fixing_it_gives_the_same_model() -> None:
    statistics = sample(np.random.default_rng(1), 8, 9, 1.0)
    chosen = ClosedForm.fit(statistics, FitSettings(added_variance=None))
    assert chosen.added_variance > 0
    again = ClosedForm.fit(statistics, FitSettings(added_variance=chosen.added_variance))
    plain = ClosedForm.fit(statistics)
    assert torch.equal(chosen.whitening, again.whitening) and torch.equal(chosen.rows, again.rows)
    assert plain.added_variance == 0 and not torch.equal(chosen.whitening, plain.whitening)
