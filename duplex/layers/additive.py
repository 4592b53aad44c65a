"""Effects of states and of objects on mean features, fitted by weighted least squares (a two-way layout).

The closed-form classifier uses them to predict the mean feature of pairs without images. The n_c images of pair c
(state m, object n) have the mean x_c, in coordinates where images spread by 1 about their pair's mean:

    x_c = mu + a_m + b_n + gamma_c + noise,   Var(noise) = 1 / n_c,   Var(gamma_c) = v    (in every direction)

`mu` is the overall mean, `a_m` and `b_n` are the effects of state and object, `gamma_c` is their interaction. Least
squares over pairs then weights a pair by

    w_c = 1 / (v + 1 / n_c)

which is about `n_c` for few images and levels off at `1 / v`: further images of a frequent pair add little about its
state. The simpler prediction `mean_s + mean_o - mean_all` from the mean features of the state, of the object and of all
images confounds the effects of states and objects where they occur together unevenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PairMeans:
    """Mean feature and number of images of each pair with images."""

    states: Tensor  # m of each pair [P]
    objects: Tensor  # n of each pair [P]
    counts: Tensor  # n_c [P]
    means: Tensor  # x_c [P, d]
    shape: tuple[int, int]  # M, N


@dataclass(frozen=True)
class AdditiveEffects:
    """Overall mean, state and object effects; `mu + a_m + b_n` predicts a pair's mean feature."""

    mean: Tensor  # mu [d]
    state: Tensor  # a [M, d]
    object: Tensor  # b [N, d]

    @classmethod
    def of(cls, beta: Tensor, states: int) -> AdditiveEffects:
        """Split coefficients [1 + M + N, d] into overall mean, effects of M states and effects of objects."""
        return cls(beta[0], beta[1 : 1 + states], beta[1 + states :])

    def at(self, states: Tensor, objects: Tensor) -> Tensor:
        """Predicted mean features `mu + a_m + b_n` [C, d] of pairs with these indices [C]."""
        return self.mean + self.state[states] + self.object[objects]


class NormalEquations:
    """Normal equations `H beta = r` of the least-squares fit; `beta` stacks mu, a and b.

    `a` and `b` have a ridge penalty. With the pairs' weights as an `M x N` table `w` (0 for pairs without images),

        H = [[sum w, w 1, 1 w], [., diag(w 1) + ridge, w], [., ., diag(1 w) + ridge]]

    v: variance of the interaction, from which the weights are computed.
    ridge: number of images at which an effect is shrunk by half.
    """

    def __init__(self, seen: PairMeans, v: float, ridge: float) -> None:
        self.seen, self.ridge = seen, ridge
        self.w = 1 / (v + 1 / seen.counts)  # w_c [P]
        m, n = seen.shape
        self.w_s = self.w.new_zeros(m).index_add_(0, seen.states, self.w)
        self.w_o = self.w.new_zeros(n).index_add_(0, seen.objects, self.w)

    def gather(self, rows: Tensor) -> Tensor:
        """Sums of `rows` [P, d] over all pairs, by state and by object: `X^T rows` [1 + M + N, d]."""
        m, n = self.seen.shape
        by_s = rows.new_zeros(m, rows.shape[1]).index_add_(0, self.seen.states, rows)
        by_o = rows.new_zeros(n, rows.shape[1]).index_add_(0, self.seen.objects, rows)
        return torch.cat([rows.sum(0, keepdim=True), by_s, by_o])

    @property
    def right(self) -> Tensor:
        """r [1 + M + N, d]: weighted sums of mean features."""
        return self.gather(self.w[:, None] * self.seen.means)

    def matrix(self) -> Tensor:
        """H."""
        m, n = self.seen.shape
        h = self.w.new_zeros(1 + m + n, 1 + m + n)
        h[0, 0] = self.w.sum()
        h[0, 1:] = torch.cat([self.w_s, self.w_o])
        h[1 : 1 + m, 1 + m :].index_put_((self.seen.states, self.seen.objects), self.w)
        h = h + h.triu(1).T
        h.diagonal()[1:] += torch.cat([self.w_s, self.w_o]) + self.ridge
        return h


def fit_additive(seen: PairMeans, v: float, ridge: float) -> AdditiveEffects:
    """Fit mean and effects by weighted least squares; a state or object without images gets the effect 0."""
    normal = NormalEquations(seen, v, ridge)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(normal.matrix()))
    return AdditiveEffects.of(inverse @ normal.right, seen.shape[0])


def log_likelihood(seen: PairMeans, v: float, ridge: float) -> float:
    """Log-likelihood of the pairs' mean features for an interaction variance `v`, up to a constant.

    Mean and effects are integrated out; the effects have the prior variance `1/ridge`.
    """
    normal = NormalEquations(seen, v, ridge)
    return marginal_log_likelihood(normal, normal.matrix(), normal.right)


def marginal_log_likelihood(normal: NormalEquations, matrix: Tensor, right: Tensor, log_prior: float = 0.0) -> float:
    """Log-likelihood of a linear model of pairs' mean features, with its coefficients `beta` integrated out:

        -1/2 [ sum_c w_c |x_c|^2 - r . H^-1 r  +  d (log|H| - sum_c log w_c + log_prior) ]

    normal: the equations of the effects alone, which hold w_c and x_c.
    matrix, right: H and r of the whole model.
    log_prior: log-determinant of the prior covariance of further coefficients in H, such as interactions.
    """
    seen, w = normal.seen, normal.w
    factor = torch.linalg.cholesky(matrix)
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    quadratic = float((w[:, None] * seen.means**2).sum() - (half * half).sum())
    determinant = float(2 * factor.diagonal().log().sum() - w.log().sum() + log_prior)
    return -0.5 * (quadratic + seen.means.shape[1] * determinant)


def interaction_variance(seen: PairMeans, ridge: float) -> float:
    """The interaction variance `v` with the highest marginal likelihood, of `10^(k/8)` for whole k.

    `v` sets how much a seen pair's prototype relies on its images: the prototype is a weighted mean of their mean and
    the prediction, with equal weights for a pair with `1 / v` images.
    """
    heights = {float(e): log_likelihood(seen, 10.0**e, ridge) for e in range(-4, 2)}  # whole decades, then halves
    step = 0.5
    while step > 0.1:
        best = max(heights, key=heights.__getitem__)
        for exponent in (best - step, best + step):
            heights[exponent] = log_likelihood(seen, 10.0**exponent, ridge)
        step /= 2
    return float(10.0 ** max(heights, key=heights.__getitem__))
