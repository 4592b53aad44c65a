"""Temperature and unseen_log_odds minimise the weighted likelihood; a grid search and scipy find the same."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from duplex.evaluation.probabilities import Confidence, fit_probabilities

C, N = 12, 400
SEEN = np.arange(C) < 8


def drawn(sharpness: float, unseen_log_odds: float, unseen_share: float, seed: int = 0):
    """Draw log-probabilities whose labels follow `sharpness * log p - unseen_log_odds [seen]`."""
    random = np.random.default_rng(seed)
    log_p = np.log(random.dirichlet(np.full(C, 0.3), N) + 1e-12)
    target = np.empty(N, dtype=np.int64)
    for row in range(N):
        group = ~SEEN if random.random() < unseen_share else SEEN
        p = np.where(group, np.exp(sharpness * log_p[row]), 0)
        target[row] = random.choice(C, p=p / p.sum())
    log_p = log_p + unseen_log_odds * SEEN
    return torch.from_numpy(log_p).log_softmax(1), target


def loss(log_p: torch.Tensor, target: np.ndarray, temperature: float, unseen_log_odds: float, share: float) -> float:
    """The weighted negative log-likelihood, image by image."""
    prior = np.where(SEEN, (1 - share) / SEEN.sum(), share * np.exp(unseen_log_odds) / (~SEEN).sum())
    total, unseen = 0.0, ~SEEN[target]
    for row, label in zip(log_p.numpy(), target, strict=True):
        q = np.exp(row / temperature) * prior
        weight = (1 - share) / (~unseen).sum() if SEEN[label] else share / unseen.sum()
        total -= weight * np.log(q[label] / q.sum())
    return total


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize(("sharpness", "unseen_log_odds"), [(1.0, 0.0), (0.3, 1.5), (2.0, -1.0)])
def test_the_fit_is_the_minimum_that_scipy_finds(sharpness, unseen_log_odds, share) -> None:
    log_p, target = drawn(sharpness, unseen_log_odds, 0.5)
    fitted = fit_probabilities(log_p, target, SEEN, share)
    found = minimize(
        lambda x: loss(log_p, target, float(np.exp(x[0])), float(x[1]), share), [0.0, 0.0], method="Nelder-Mead"
    )
    reached = loss(log_p, target, fitted.temperature, fitted.unseen_log_odds, share)
    assert reached <= found.fun + 1e-9
    assert [np.log(fitted.temperature), fitted.unseen_log_odds] == pytest.approx(found.x, abs=2e-3)


def test_without_unseen_images_only_the_temperature_is_fitted() -> None:
    log_p, target = drawn(0.5, 0.0, 0.0)
    fitted = fit_probabilities(log_p, target, SEEN)
    grid = np.geomspace(0.2, 20, 400)
    prior = torch.from_numpy(fitted.log_prior(SEEN, np.ones(C, dtype=bool)))
    losses = [-float((log_p / t + prior).log_softmax(1)[torch.arange(N), target].mean()) for t in grid]
    assert fitted.unseen_log_odds == 0
    assert fitted.temperature == pytest.approx(grid[int(np.argmin(losses))], rel=0.02)


@pytest.mark.parametrize(
    ("scale", "raised", "by", "name", "limit"),
    [(1e-4, SEEN, 0.0, "temperature", 1e-3), (-1e5, SEEN, 0.0, "temperature", 1e3),
     (5.0, SEEN, 100.0, "unseen_log_odds", 30.0), (5.0, ~SEEN, 100.0, "unseen_log_odds", -30.0)],
)  # fmt: skip
def test_perfect_and_hopeless_answers_give_finite_numbers(scale, raised, by, name, limit) -> None:
    log_p = torch.eye(C, dtype=torch.float64).mul(scale)
    log_p[:, torch.from_numpy(raised)] += by
    assert getattr(fit_probabilities(log_p.log_softmax(1), np.arange(C), SEEN), name) == pytest.approx(limit, rel=1e-9)


def test_the_prior_gives_each_group_its_mass_among_feasible_candidates() -> None:
    feasible = np.arange(C) != 9
    prior = np.exp(Confidence(new_share=0.3).log_prior(SEEN, feasible))
    assert prior[SEEN].sum() == pytest.approx(0.7) and prior[~SEEN].sum() == pytest.approx(0.3) and prior[9] == 0


@pytest.mark.parametrize("factor", [0.02, 5.0, 30.0, 150.0])
@pytest.mark.parametrize("unseen_log_odds", [0.0, 1.5])
def test_scores_that_are_too_sure_are_as_good_as_others(factor, unseen_log_odds) -> None:
    """Scaled logarithms have the same distributions at a temperature as much higher, from wherever the fit starts."""
    log_p, target = drawn(0.7, unseen_log_odds, 0.5)
    fitted, scaled = (
        fit_probabilities(log_p, target, SEEN),
        fit_probabilities((factor * log_p).log_softmax(1), target, SEEN),
    )
    assert scaled.temperature == pytest.approx(factor * fitted.temperature, rel=1e-4)
    assert scaled.unseen_log_odds == pytest.approx(fitted.unseen_log_odds, abs=1e-4)
