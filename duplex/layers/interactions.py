"""What a pair is beyond the sum of its parts, shared between pairs whose words are alike.

A wet dog and a wet cat depart from `mu + a_m + b_n` in similar ways. As a Gaussian process over pairs,

    Cov(gamma_mn, gamma_m'n') = tau K_s(m, m') K_o(n, n'),   K(t, t') = exp(-|t - t'|^2 / (2 l median |t - t'|^2)),

with kernels of the words' text embeddings, of low rank: K_s = U U^T, K_o = V V^T. Then

    gamma_mn = sum_rs U_mr V_ns G_rs,   G_rs ~ N(0, tau I),

is one more block of the least squares that fit the effects, `r s` further columns `phi_mn = U_m (x) V_n` whose ridge is
`1 / tau`. An unseen pair gets the interactions of its neighbours; `tau` and `v` come from the marginal likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.layers.additive import Additive, Normal, Observations

RANK = 12  # of each kernel; 16 and 24 gave the same validation AUC to 0.3
LENGTH = 0.5  # l
PAIRS = 1024  # the most frequent pairs, by which tau and v are chosen
Guess = tuple[float, float]  # log10 v, log10 tau


@dataclass(frozen=True)
class Kernels:
    """`K_s = U U^T`, `K_o = V V^T`."""

    states: Tensor  # U [M, r]
    objects: Tensor  # V [N, s]

    @classmethod
    def of(cls, states: Tensor, objects: Tensor) -> Kernels:
        """From text embeddings of the words, [M, w] and [N, w]."""
        return cls(factor(states), factor(objects))

    def features(self, seen: Observations) -> Tensor:
        """`phi` of pairs [P, r s]"""
        u, v = self.states[seen.states], self.objects[seen.objects]
        return (u[:, :, None] * v[:, None]).flatten(1)


def factor(words: Tensor, rank: int = RANK) -> Tensor:
    """The leading columns `U [M, r]` of a kernel of word embeddings `[M, w]`."""
    unit = torch.nn.functional.normalize(words.double(), dim=-1)
    apart = torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    different = apart[apart > 1e-12]
    median = different.median() if len(different) else apart.new_ones(())
    values, vectors = torch.linalg.eigh(torch.exp(-0.5 * apart / (LENGTH * median)))
    kept = values[-rank:].clamp(min=0)
    columns: Tensor = vectors[:, -rank:] * kept.sqrt()
    return columns


@dataclass(frozen=True)
class Interactions:
    """`gamma_mn`, of which `r s` vectors are kept."""

    states: Tensor  # U [M, r]
    objects: Tensor  # V [N, s]
    core: Tensor  # G [r, s, d]

    def at(self, states: Tensor, objects: Tensor) -> Tensor:
        """[C, d]"""
        phi = (self.states[states][:, :, None] * self.objects[objects][:, None]).flatten(1)
        return phi @ self.core.flatten(0, 1)

    def along(self, x: Tensor) -> Tensor:
        """`x . gamma_mn = U (x . G) V^T`, all but its last factor: [B, d] -> [B, M, s]."""
        return self.states @ (x @ self.core.flatten(0, 1).T).view(len(x), *self.core.shape[:2])


class Joint:
    """The normal equations of effects and interactions together."""

    def __init__(self, seen: Observations, kernels: Kernels, v: float, tau: float, ridge: float) -> None:
        self.normal, phi = Normal(seen, v, ridge), kernels.features(seen)
        weighed = self.normal.w[:, None] * phi
        corner = phi.T @ weighed
        corner.diagonal().add_(1 / tau)
        side = self.normal.gather(weighed)
        top = torch.cat([self.normal.matrix(), side], dim=1)
        self.matrix = torch.cat([top, torch.cat([side.T, corner], dim=1)])
        self.right = torch.cat([self.normal.right, weighed.T @ seen.means])
        self.columns, self.tau = phi.shape[1], tau

    def log_likelihood(self) -> float:
        """As additive.log_likelihood, with the interactions integrated out as well."""
        seen, w = self.normal.seen, self.normal.w
        cholesky = torch.linalg.cholesky(self.matrix)
        half = torch.linalg.solve_triangular(cholesky, self.right, upper=False)
        quadratic = float((w[:, None] * seen.means**2).sum() - (half * half).sum())
        spread = self.columns * math.log(self.tau)
        determinant = float(2 * cholesky.diagonal().log().sum() - w.log().sum() + spread)
        return -0.5 * (quadratic + seen.means.shape[1] * determinant)


def fit(seen: Observations, kernels: Kernels, v: float, tau: float, ridge: float) -> tuple[Additive, Interactions]:
    """Effects and interactions, by one solve of size `1 + M + N + r s`."""
    m, n = seen.shape
    joint = Joint(seen, kernels, v, tau, ridge)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(joint.matrix))
    beta, effects = inverse @ joint.right, 1 + m + n
    core = beta[effects:].view(kernels.states.shape[1], kernels.objects.shape[1], -1)
    additive = Additive.of(beta[:effects], inverse[:effects, :effects], (m, n))
    return additive, Interactions(kernels.states, kernels.objects, core)


def choose(seen: Observations, kernels: Kernels, ridge: float) -> tuple[float, float]:
    """`v` and `tau` by marginal likelihood of the most frequent pairs: a compass search, to an eighth of a decade."""
    often = seen.counts.argsort(descending=True, stable=True)[:PAIRS]
    some = Observations(seen.states[often], seen.objects[often], seen.counts[often], seen.means[often], seen.shape)

    def likelihood(guess: Guess) -> float:
        return Joint(some, kernels, 10 ** guess[0], 10 ** guess[1], ridge).log_likelihood()

    v, tau = _climb(likelihood, (-2.0, -1.0))
    return 10**v, 10**tau


def _climb(height: Callable[[Guess], float], start: Guess, step: float = 1.0) -> Guess:
    """The best point that steps of ever half the size reach, within four decades about 0.01."""
    found = {start: height(start)}
    best = start
    while step > 0.1:
        for move in ((step, 0.0), (-step, 0.0), (0.0, step), (0.0, -step)):
            guess = best[0] + move[0], best[1] + move[1]
            if guess not in found and all(-6 <= part <= 2 for part in guess):
                found[guess] = height(guess)
        top = max(found, key=found.__getitem__)
        best, step = (top, step) if top != best else (best, step / 2)
    return best
