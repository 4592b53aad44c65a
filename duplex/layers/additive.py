"""Effects of states and of objects on mean features, fitted by weighted least squares (a two-way layout).

The mean feature of a pair is observed with noise, in coordinates where images spread by 1 about their pair's mean:

    x_c = mu + a_m + b_n + gamma_c + noise,   Var(noise) = 1 / n_c,   Var(gamma_c) = v    (in every direction)

`gamma` is the interaction of state and object. Least squares over pairs then weights a pair by

    w_c = 1 / (v + 1 / n_c)

which is about `n_c` for few images and levels off at `1 / v`: further images of a frequent pair add little about its
state. `mean_s + mean_o - mean_all`, in contrast, confounds the two wherever they occur together unevenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PairMeans:
    """Mean features and image counts of the pairs with images."""

    states: Tensor  # m of each pair [P]
    objects: Tensor  # n of each pair [P]
    counts: Tensor  # n_c [P]
    means: Tensor  # x_c [P, d]
    shape: tuple[int, int]  # M, N


@dataclass(frozen=True)
class AdditiveEffects:
    """Overall mean, effects of M states and effects of N objects, which compose `mu_mn = mu + a_m + b_n`."""

    mean: Tensor  # mu [d]
    state: Tensor  # a [M, d]
    object: Tensor  # b [N, d]

    @classmethod
    def of(cls, beta: Tensor, states: int) -> AdditiveEffects:
        """Build the effects from stacked coefficients `beta = (mu, a, b)` [1 + M + N, d]; `states`: M."""
        return cls(beta[0], beta[1 : 1 + states], beta[1 + states :])

    def at(self, states: Tensor, objects: Tensor) -> Tensor:
        """Return the composed means `mu_mn` [C, d] of pairs with the indices `states` [C] and `objects` [C]."""
        return self.mean + self.state[states] + self.object[objects]


class NormalEquations:
    """The normal equations `H beta = r` for `beta = (mu, a, b)`, with a ridge on `a` and `b`.

    With `w` the pairs' weights as an `M x N` table,

        H = [[sum w, w 1, 1 w], [., diag(w 1) + ridge, w], [., ., diag(1 w) + ridge]]

    seen: means of the pairs with images. v: interaction variance, from which the weights are computed.
    """

    def __init__(self, seen: PairMeans, v: float, ridge: float) -> None:
        self.seen, self.ridge = seen, ridge
        self.w = 1 / (v + 1 / seen.counts)  # w_c [P]
        m, n = seen.shape
        self.w_s = self.w.new_zeros(m).index_add_(0, seen.states, self.w)
        self.w_o = self.w.new_zeros(n).index_add_(0, seen.objects, self.w)

    def gather(self, rows: Tensor) -> Tensor:
        """Return `X^T rows` [1 + M + N, d]: sums of the pairs' `rows` [P, d] over all pairs, by state and by object."""
        m, n = self.seen.shape
        zeros = rows.new_zeros
        by_s = zeros(m, rows.shape[1]).index_add_(0, self.seen.states, rows)
        by_o = zeros(n, rows.shape[1]).index_add_(0, self.seen.objects, rows)
        return torch.cat([rows.sum(0, keepdim=True), by_s, by_o])

    @property
    def right(self) -> Tensor:
        """The right-hand side `r` [1 + M + N, d] of the normal equations."""
        return self.gather(self.w[:, None] * self.seen.means)

    def matrix(self) -> Tensor:
        m, n = self.seen.shape
        h = self.w.new_zeros(1 + m + n, 1 + m + n)
        h[0, 0] = self.w.sum()
        h[0, 1 : 1 + m], h[0, 1 + m :] = self.w_s, self.w_o
        h[1 : 1 + m, 1 + m :].index_put_((self.seen.states, self.seen.objects), self.w)
        h = h + h.triu(1).T
        h.diagonal()[1:] += torch.cat([self.w_s, self.w_o]) + self.ridge
        return h


def fit_additive(seen: PairMeans, v: float, ridge: float) -> AdditiveEffects:
    """Fit mean and effects by least squares; the effect of a state or object without images is 0.

    v: interaction variance. ridge: number of images at which an effect is shrunk by half.
    """
    normal = NormalEquations(seen, v, ridge)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(normal.matrix()))
    return AdditiveEffects.of(inverse @ normal.right, seen.shape[0])


def log_likelihood(seen: PairMeans, v: float, ridge: float) -> float:
    """Return the log-likelihood of the pairs' means for the interaction variance `v`, up to a constant.

    The coefficients `mu`, `a` and `b` are integrated out, with the prior variance `1/ridge` for effects.
    """
    normal = NormalEquations(seen, v, ridge)
    return marginal_log_likelihood(normal, normal.matrix(), normal.right)


def marginal_log_likelihood(normal: NormalEquations, matrix: Tensor, right: Tensor, log_prior: float = 0.0) -> float:
    """Return the log-likelihood of a linear model with the normal equations `H beta = r`, beta integrated out:

        -1/2 [ sum_c w_c |x_c|^2 - r . H^-1 r  +  d (log|H| - sum_c log w_c + log_prior) ]

    for the pairs' means `x_c [d]` of weight `w_c`.

    matrix, right: H and r. normal: the equations of the effects alone, which hold w_c and x_c.
    log_prior: log-determinant of the prior covariance of further coefficients in H, such as interactions.
    """
    seen, w = normal.seen, normal.w
    factor = torch.linalg.cholesky(matrix)
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    quadratic = float((w[:, None] * seen.means**2).sum() - (half * half).sum())
    determinant = float(2 * factor.diagonal().log().sum() - w.log().sum() + log_prior)
    return -0.5 * (quadratic + seen.means.shape[1] * determinant)


def interaction_variance(seen: PairMeans, ridge: float) -> float:
    """Return the interaction variance `v` of highest marginal likelihood, among `10^(k/8)` for whole k.

    A seen pair's prototype is a weighted mean of the pair's mean feature and the prediction `mu + a_m + b_n`; both
    weigh the same for a pair with `1 / v` images.
    """
    heights = {float(e): log_likelihood(seen, 10.0**e, ridge) for e in range(-4, 2)}  # whole decades, then halves
    step = 0.5
    while step > 0.1:
        best = max(heights, key=heights.__getitem__)
        for exponent in (best - step, best + step):
            heights[exponent] = log_likelihood(seen, 10.0**exponent, ridge)
        step /= 2
    return float(10.0 ** max(heights, key=heights.__getitem__))
