"""Interactions shared between pairs of like words, against a Gaussian process over pairs written out densely."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from duplex.methods import gaussian
from duplex.methods.gaussian import ClassStatistics, ClosedForm, FitSettings, JointEquations, KernelFactors, PairMeans
from tests.methods.test_gaussian_prototypes import every, seen_means, world

V, TAU, RIDGE = 0.05, 0.3, 0.1


def words(m: int, n: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, 6, generator=g), torch.randn(n, 6, generator=g)


def seen_pairs(m: int = 5, n: int = 4, pairs: int = 13) -> PairMeans:
    return seen_means(*world(m=m, n=n, images=80, pairs=pairs))


def kernel(embedded: torch.Tensor) -> np.ndarray:
    """`exp(-|t - t'|^2 / (2 l median))` of unit vectors, entry by entry."""
    t = [row / np.linalg.norm(row) for row in embedded.double().numpy()]
    apart = np.array([[((a - b) ** 2).sum() for b in t] for a in t])
    median = torch.from_numpy(apart[apart > 1e-12]).median().item()
    return np.exp(-0.5 * apart / (gaussian.LENGTH * median))


def covariances(seen: PairMeans, k_s: np.ndarray, k_o: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return covariances of all pairs' means with the seen ones' [M N, P], and of the observed means [P, P]."""
    m, n = seen.shape
    s, o = seen.states.numpy(), seen.objects.numpy()
    cross = np.array(
        [
            [(a == p) / RIDGE + (b == q) / RIDGE + TAU * k_s[a, p] * k_o[b, q] for p, q in zip(s, o, strict=True)]
            for a in range(m)
            for b in range(n)
        ]
    )
    return cross, cross[s * n + o] + np.diag(V + 1 / seen.counts.numpy())


def test_the_kernel_follows_its_formula() -> None:
    states, _ = words(5, 4)
    u = KernelFactors.of_words(*words(5, 4)).states
    np.testing.assert_allclose((u @ u.T).numpy(), kernel(states), atol=1e-9)


@pytest.mark.parametrize("rank", [1, 3, 6, 9])
def test_a_kernel_of_low_rank_is_the_nearest_one(rank: int) -> None:
    states, _ = words(6, 4)
    values, vectors = np.linalg.eigh(kernel(states))
    nearest = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T
    u = gaussian.kernel_factor(states, rank)
    assert u.shape == (6, min(rank, 6))
    np.testing.assert_allclose((u @ u.T).numpy(), nearest, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_chosen_variances_are_a_maximum_to_an_eighth_of_a_decade(seed: int) -> None:
    seen, kernels = seen_pairs(), KernelFactors.of_words(*words(5, 4, seed))

    def height(v: float, tau: float) -> float:
        return JointEquations(seen, kernels, v, tau, RIDGE).log_likelihood()

    v, tau = gaussian.choose_variances(seen, kernels, RIDGE)
    for step in (10**0.125, 10**-0.125):
        for moved in ((v * step, tau), (v, tau * step)):
            inside = all(1e-6 <= part <= 1e2 for part in moved)
            assert not inside or height(*moved) <= height(v, tau)


def test_means_equal_the_gaussian_processes() -> None:
    seen = seen_pairs()
    m, n = seen.shape
    embedded = words(m, n)
    cross, covariance = covariances(seen, *map(kernel, embedded))
    inverse, x, one = np.linalg.inv(covariance), seen.means.numpy(), np.ones(len(covariance))
    mu = one @ inverse @ x / (one @ inverse @ one)  # a flat prior's mean
    wanted = mu + cross @ inverse @ (x - mu)
    additive, mixed = gaussian.fit_with_interactions(seen, KernelFactors.of_words(*embedded), V, TAU, RIDGE)
    pairs = torch.arange(m * n)
    found = additive.at(pairs // n, pairs % n) + mixed.at(pairs // n, pairs % n)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-8)


def test_the_likelihood_equals_the_gaussian_processes() -> None:
    seen = seen_pairs()
    embedded = words(*seen.shape)
    kernels = KernelFactors.of_words(*embedded)

    def dense(tau: float) -> float:
        s, o = seen.states.numpy(), seen.objects.numpy()
        k_s, k_o = map(kernel, embedded)
        _, covariance = covariances(seen, k_s, k_o)
        covariance = covariance + (tau - TAU) * k_s[np.ix_(s, s)] * k_o[np.ix_(o, o)]
        inverse, one, x = np.linalg.inv(covariance), np.ones((len(covariance), 1)), seen.means.numpy()
        flat = (one.T @ inverse @ one).item()
        left = inverse - inverse @ one @ one.T @ inverse / flat
        determinant = np.linalg.slogdet(covariance)[1] + np.log(flat)
        return float(-0.5 * np.trace(x.T @ left @ x) - x.shape[1] / 2 * determinant)

    difference = [
        JointEquations(seen, kernels, V, tau, RIDGE).log_likelihood() - dense(tau) for tau in (0.01, 0.3, 2.0)
    ]
    assert max(difference) - min(difference) < 1e-7


def test_interactions_are_recovered() -> None:
    """Means drawn from the model: tau within a factor of three, unseen pairs nearer than effects alone bring them."""
    rng, (m, n, d) = np.random.default_rng(0), (14, 12, 64)
    embedded = words(m, n)
    k = np.kron(*map(kernel, embedded))
    gamma = np.sqrt(0.5) * np.linalg.cholesky(k + 1e-9 * np.eye(m * n)) @ rng.standard_normal((m * n, d))
    every_pair = np.arange(m * n)
    truth = rng.standard_normal((m, d))[every_pair // n] + rng.standard_normal((n, d))[every_pair % n] + gamma
    pairs = np.sort(rng.permutation(m * n)[:110])
    counts = rng.integers(5, 60, len(pairs)).astype(float)
    means = truth[pairs] + rng.standard_normal((len(pairs), d)) / np.sqrt(counts)[:, None]
    tensors: Any = [torch.from_numpy(x) for x in (pairs // n, pairs % n, counts, means)]
    seen = PairMeans(*tensors, (m, n))
    kernels = KernelFactors.of_words(*embedded)
    v, tau = gaussian.choose_variances(seen, kernels, RIDGE)
    assert 0.5 / 3 < tau < 0.5 * 3
    assert v < 0.05
    unseen = torch.from_numpy(np.setdiff1d(every_pair, pairs))
    additive, mixed = gaussian.fit_with_interactions(seen, kernels, v, tau, RIDGE)
    alone, _ = gaussian.fit_with_interactions(seen, kernels, v + 0.5, 1e-9, RIDGE)
    target = torch.from_numpy(truth)[unseen]
    near = additive.at(unseen // n, unseen % n) + mixed.at(unseen // n, unseen % n) - target
    far = alone.at(unseen // n, unseen % n) - target
    assert near.norm() < 0.9 * far.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outer_sums_equal_products_with_prototypes(dtype: torch.dtype) -> None:
    z, own, m, n = world(m=6, n=5, d=9, images=200, pairs=17)
    model = ClosedForm.fit(ClassStatistics.of(z, own, m, n), words=words(m, n)).to(dtype)
    assert model.interactions is not None
    wanted = model.scorer(every(model))(z)
    some = torch.tensor([4, 29, 0, 11])
    allowed = (1e-9 if dtype == torch.float64 else 1e-5) * wanted.abs().max()
    assert (model.scorer(every(model), 0)(z) - wanted).abs().max() < allowed
    assert (model.scorer(some, 0)(z) - wanted[:, some]).abs().max() < allowed


def test_without_interactions_words_change_nothing() -> None:
    z, own, m, n = world()
    statistics = ClassStatistics.of(z, own, m, n)
    plain, off = ClosedForm.fit(statistics), ClosedForm.fit(statistics, FitSettings(interactions=0.0), words(m, n))
    assert off.interactions is None
    assert torch.equal(plain.scorer(every(plain))(z), off.scorer(every(off))(z))


THIN = {
    "one image a pair": {"images": 8, "pairs": 8},
    "one pair": {"images": 9, "pairs": 1},
    "one image": {"images": 1, "pairs": 1},
    "one state": {"m": 1, "n": 5, "pairs": 3},
    "one object": {"m": 5, "n": 1, "pairs": 3},
    "one composition in all": {"m": 1, "n": 1, "pairs": 1},
    "fewer images than dimensions": {"images": 12, "d": 40},
    "one dimension": {"d": 1},
}


@pytest.mark.parametrize("case", THIN.values(), ids=THIN.keys())
@pytest.mark.parametrize("shared", [False, True], ids=["effects alone", "interactions"])
def test_few_images_give_finite_scores(case: dict, shared: bool) -> None:
    z, own, m, n = world(**case)
    model = ClosedForm.fit(ClassStatistics.of(z, own, m, n), words=words(m, n) if shared else None)
    assert torch.isfinite(model.scorer(every(model), 0)(world(seed=2, **case)[0])).all()
