"""Interactions of states and objects, shared between pairs whose words are alike.

    Cov(gamma_mn, gamma_m'n') = tau K_s(m, m') K_o(n, n'),   K(t, t') = exp(-|t - t'|^2 / (2 l median |t - t'|^2))
    gamma_mn = sum_rs U_mr V_ns G_rs,   G_rs ~ N(0, tau I),   K_s = U U^T, K_o = V V^T

* gamma_mn: departure of the mean feature of state m and object n from `mu + a_m + b_n`, the overall mean plus effects,
  a Gaussian process over pairs: a wet dog and a wet cat depart in similar ways
* t: text embeddings of the words;  K: kernels of low rank

This adds `r s` columns `phi_mn = U_m (x) V_n` with the ridge `1 / tau` to the least squares that fit the effects. An
unseen pair gets the interactions of its neighbours; `tau` and the unexplained variance `v` maximise the marginal
likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.layers.additive import AdditiveEffects, NormalEquations, PairMeans, marginal_log_likelihood

RANK = 12  # of each kernel; 16 and 24 gave the same validation AUC to 0.3
LENGTH = 0.5  # l
PAIRS = 1024  # the most frequent pairs, by which tau and v are chosen
Guess = tuple[float, float]  # log10 v, log10 tau


@dataclass(frozen=True)
class KernelFactors:
    """Low-rank factors of the words' similarities, `U U^T` among states and `V V^T` among objects."""

    states: Tensor  # U [M, r]
    objects: Tensor  # V [N, s]

    @classmethod
    def of_words(cls, states: Tensor, objects: Tensor) -> KernelFactors:
        """The factors, from text embeddings of the states [M, w] and of the objects [N, w]."""
        return cls(kernel_factor(states), kernel_factor(objects))

    def features(self, seen: PairMeans) -> Tensor:
        """The regressors `U_m (x) V_n` of the interactions of P pairs [P, r s]."""
        u, v = self.states[seen.states], self.objects[seen.objects]
        return (u[:, :, None] * v[:, None]).flatten(1)


def kernel_factor(words: Tensor, rank: int = RANK) -> Tensor:
    """Low-rank factor `U` [M, rank] of the similarities `K = U U^T` between words with embeddings [M, w]."""
    unit = normalize(words.double(), dim=-1)
    squares = torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    different = squares[squares > 1e-12]
    median = different.median() if len(different) else squares.new_ones(())
    values, vectors = torch.linalg.eigh(torch.exp(-0.5 * squares / (LENGTH * median)))
    columns: Tensor = vectors[:, -rank:] * values[-rank:].clamp(min=0).sqrt()
    return columns


@dataclass(frozen=True)
class Interactions:
    """Vectors `gamma_mn` [d] by which pairs' mean features depart from the sum of their state and object effects."""

    states: Tensor  # U [M, r], factor of the states' kernel
    objects: Tensor  # V [N, s], factor of the objects' kernel
    core: Tensor  # G [r, s, d], the fitted weights of products of both factors

    def at(self, states: Tensor, objects: Tensor) -> Tensor:
        """Interactions [C, d] of pairs with the given state and object indices [C]."""
        phi = (self.states[states][:, :, None] * self.objects[objects][:, None]).flatten(1)
        return phi @ self.core.flatten(0, 1)

    def project(self, x: Tensor) -> Tensor:
        """`U (x . G)` [B, M, s] of features `x` [B, d]; times `V^T` it is `x . gamma_mn` for all pairs."""
        return self.states @ (x @ self.core.flatten(0, 1).T).view(len(x), *self.core.shape[:2])


class JointEquations:
    """Normal equations of a joint least-squares fit of effects and interactions."""

    def __init__(self, seen: PairMeans, kernels: KernelFactors, v: float, tau: float, ridge: float) -> None:
        self.normal, phi = NormalEquations(seen, v, ridge), kernels.features(seen)
        weighted = self.normal.w[:, None] * phi
        corner = phi.T @ weighted
        corner.diagonal().add_(1 / tau)
        side = self.normal.gather(weighted)
        top = torch.cat([self.normal.matrix(), side], dim=1)
        self.matrix = torch.cat([top, torch.cat([side.T, corner], dim=1)])
        self.right = torch.cat([self.normal.right, weighted.T @ seen.means])
        self.log_prior = phi.shape[1] * math.log(tau)

    def log_likelihood(self) -> float:
        """Log-likelihood of the pairs' mean features, with effects and interactions integrated out."""
        return marginal_log_likelihood(self.normal, self.matrix, self.right, self.log_prior)


def fit_with_interactions(
    seen: PairMeans, kernels: KernelFactors, v: float, tau: float, ridge: float
) -> tuple[AdditiveEffects, Interactions]:
    """Fit effects and interactions to the pairs' mean features, by one linear solve of size `1 + M + N + r s`.

    v: variance of what neither effects nor interactions explain. tau: variance of the interactions.
    """
    m, n = seen.shape
    joint = JointEquations(seen, kernels, v, tau, ridge)
    beta = torch.cholesky_inverse(torch.linalg.cholesky(joint.matrix)) @ joint.right
    core = beta[1 + m + n :].view(kernels.states.shape[1], kernels.objects.shape[1], -1)
    return AdditiveEffects.of(beta[: 1 + m + n], m), Interactions(kernels.states, kernels.objects, core)


def choose_variances(seen: PairMeans, kernels: KernelFactors, ridge: float) -> tuple[float, float]:
    """`v` and `tau` with the highest marginal likelihood, to a factor of `10^(1/8)`, by compass search.

    They are found from the mean features of the most frequent pairs.
    """
    often = seen.counts.argsort(descending=True, stable=True)[:PAIRS]
    some = PairMeans(seen.states[often], seen.objects[often], seen.counts[often], seen.means[often], seen.shape)

    def likelihood(guess: Guess) -> float:
        return JointEquations(some, kernels, 10 ** guess[0], 10 ** guess[1], ridge).log_likelihood()

    v, tau = _climb(likelihood, (-2.0, -1.0))
    return 10**v, 10**tau


def _climb(height: Callable[[Guess], float], start: Guess, step: float = 1.0) -> Guess:
    """The point from -6 to 2 that maximises `height`; the step is halved when no move leads upwards."""
    heights = {start: height(start)}
    best = start
    while step > 0.1:
        for move in ((step, 0.0), (-step, 0.0), (0.0, step), (0.0, -step)):
            guess = best[0] + move[0], best[1] + move[1]
            if guess not in heights and all(-6 <= part <= 2 for part in guess):
                heights[guess] = height(guess)
        top = max(heights, key=heights.__getitem__)
        if top == best:
            step /= 2
        best = top
    return best
