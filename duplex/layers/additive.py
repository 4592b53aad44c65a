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
    """Mean feature and number of images per state-object pair with images, to fit effects of states and objects."""

    states: Tensor  # m of each pair [P]
    objects: Tensor  # n of each pair [P]
    counts: Tensor  # n_c [P]
    means: Tensor  # x_c [P, d]
    shape: tuple[int, int]  # M, N


@dataclass(frozen=True)
class AdditiveEffects:
    """Fitted overall mean, state and object effects; their sum `mu + a_m + b_n` predicts a pair's mean feature."""

    mean: Tensor  # mu [d]
    state: Tensor  # a [M, d]
    object: Tensor  # b [N, d]

    @classmethod
    def of(cls, beta: Tensor, states: int) -> AdditiveEffects:
        """Split stacked coefficients [1 + M + N, d] into overall mean, effects of states and effects of objects.

        beta: the coefficients, in this order. states: number of states M.
        """
        return cls(beta[0], beta[1 : 1 + states], beta[1 + states :])

    def at(self, states: Tensor, objects: Tensor) -> Tensor:
        """Return the predicted mean features `mu + a_m + b_n` [C, d] of pairs, given state and object indices [C]."""
        return self.mean + self.state[states] + self.object[objects]


class NormalEquations:
    """Normal equations `H beta = r` of the least-squares fit of overall mean, state effects and object effects.

    `beta = (mu, a, b)` stacks the mean and the effects; `a` and `b` have a ridge penalty. With the pairs' weights as an
    `M x N` table `w` (0 for pairs without images), `H` is symmetric:

        H = [[sum w, w 1, 1 w], [., diag(w 1) + ridge, w], [., ., diag(1 w) + ridge]]

    seen: mean features of the pairs with images.
    v: variance of the state-object interaction, from which the weights are computed.
    ridge: number of images at which an effect is shrunk by half.
    """

    def __init__(self, seen: PairMeans, v: float, ridge: float) -> None:
        self.seen, self.ridge = seen, ridge
        self.w = 1 / (v + 1 / seen.counts)  # w_c [P]
        m, n = seen.shape
        self.w_s = self.w.new_zeros(m).index_add_(0, seen.states, self.w)
        self.w_o = self.w.new_zeros(n).index_add_(0, seen.objects, self.w)

    def gather(self, rows: Tensor) -> Tensor:
        """Sum vectors `rows` [P, d], one per pair, over all pairs, per state and per object: [1 + M + N, d].

        The result is `X^T rows` with the design matrix X of the fit.
        """
        m, n = self.seen.shape
        zeros = rows.new_zeros
        by_s = zeros(m, rows.shape[1]).index_add_(0, self.seen.states, rows)
        by_o = zeros(n, rows.shape[1]).index_add_(0, self.seen.objects, rows)
        return torch.cat([rows.sum(0, keepdim=True), by_s, by_o])

    @property
    def right(self) -> Tensor:
        """Right-hand side `r` [1 + M + N, d] of the normal equations `H beta = r`: weighted sums of mean features."""
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
    """Fit overall mean, state effects and object effects to the pairs' mean features, by weighted least squares.

    A state or object without images gets the effect 0.

    v: variance of the state-object interaction. ridge: number of images at which an effect is shrunk by half.
    """
    normal = NormalEquations(seen, v, ridge)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(normal.matrix()))
    return AdditiveEffects.of(inverse @ normal.right, seen.shape[0])


def log_likelihood(seen: PairMeans, v: float, ridge: float) -> float:
    """Return the log-likelihood of the pairs' mean features for an interaction variance `v`, up to a constant.

    Overall mean, state effects and object effects are integrated out; the effects have the prior variance `1/ridge`.
    """
    normal = NormalEquations(seen, v, ridge)
    return marginal_log_likelihood(normal, normal.matrix(), normal.right)


def marginal_log_likelihood(normal: NormalEquations, matrix: Tensor, right: Tensor, log_prior: float = 0.0) -> float:
    """Return the log-likelihood of a linear model of pairs' mean features, with its coefficients `beta` integrated out:

        -1/2 [ sum_c w_c |x_c|^2 - r . H^-1 r  +  d (log|H| - sum_c log w_c + log_prior) ]

    for mean features `x_c` [d] of pairs c with weights `w_c`, and the normal equations `H beta = r` of least squares.

    matrix, right: H and r.
    normal: the equations of the state and object effects alone, which hold w_c and x_c.
    log_prior: log-determinant of the prior covariance of further coefficients in H, such as interactions.
    """
    seen, w = normal.seen, normal.w
    factor = torch.linalg.cholesky(matrix)
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    quadratic = float((w[:, None] * seen.means**2).sum() - (half * half).sum())
    determinant = float(2 * factor.diagonal().log().sum() - w.log().sum() + log_prior)
    return -0.5 * (quadratic + seen.means.shape[1] * determinant)


def interaction_variance(seen: PairMeans, ridge: float) -> float:
    """Return the variance `v` of the state-object interaction with the highest marginal likelihood.

    Values `10^(k/8)` for whole k are tried. `v` sets how much a seen pair's prototype relies on the pair's images: the
    prototype is a weighted mean of the pair's mean feature and the prediction from state and object, with equal weights
    for a pair with `1 / v` images.
    """
    heights = {float(e): log_likelihood(seen, 10.0**e, ridge) for e in range(-4, 2)}  # whole decades, then halves
    step = 0.5
    while step > 0.1:
        best = max(heights, key=heights.__getitem__)
        for exponent in (best - step, best + step):
            heights[exponent] = log_likelihood(seen, 10.0**exponent, ridge)
        step /= 2
    return float(10.0 ** max(heights, key=heights.__getitem__))
