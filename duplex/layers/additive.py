"""The two-way layout: what a state adds to the mean image and what an object adds, by weighted least squares.

A pair's mean feature is seen through noise, in coordinates where images spread by 1 about their pair's mean:

    x_c = mu + a_m + b_n + gamma_c + noise,   Var(noise) = 1 / n_c,   Var(gamma_c) = v    (in every direction)

`gamma` is what makes a pair more than the sum of its parts. Least squares over pairs then weighs a pair by

    w_c = 1 / (v + 1 / n_c)

which is `n_c` while images are the scarcer and levels off at `1 / v`: the thousandth picture of a frequent pair says
nothing more about its state. `mean_s + mean_o - mean_all` confounds the two wherever they occur together unevenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DIRECT = 4096  # largest M + N whose normal equations are factored; beyond it, conjugate gradients


@dataclass(frozen=True)
class Observations:
    """Mean features of the pairs with images."""

    states: Tensor  # m of each pair [P]
    objects: Tensor  # n of each pair [P]
    counts: Tensor  # n_c [P]
    means: Tensor  # x_c [P, d]
    shape: tuple[int, int]  # M, N

    def weights(self, v: float) -> Tensor:
        """`w_c` [P]"""
        return 1 / (v + 1 / self.counts)


@dataclass(frozen=True)
class Additive:
    """`mu_mn = mu + a_m + b_n`, of which `M + N + 1` vectors are kept."""

    mean: Tensor  # mu [d]
    state: Tensor  # a [M, d]
    object: Tensor  # b [N, d]
    variance: Tensor  # of mu_mn in each direction, as far as the images leave it open [M, N]

    @classmethod
    def of(cls, beta: Tensor, inverse: Tensor, shape: tuple[int, int]) -> Additive:
        """From `beta = (mu, a, b)` [1 + M + N, d] and its covariance `V`."""
        of_s, of_o = slice(1, 1 + shape[0]), slice(1 + shape[0], None)
        own = inverse.diagonal()
        # Var(mu + a_m + b_n) = V_00 + V_mm + V_nn + 2 (V_0m + V_0n + V_mn)
        alone = (own[of_s] + 2 * inverse[0, of_s])[:, None] + (own[of_o] + 2 * inverse[0, of_o])
        variance = inverse[0, 0] + alone + 2 * inverse[of_s, of_o]
        return cls(beta[0], beta[of_s], beta[of_o], variance.clamp(min=0))

    def at(self, states: Tensor, objects: Tensor) -> Tensor:
        """`mu_mn` of some pairs [C, d]."""
        return self.mean + self.state[states] + self.object[objects]


class Normal:
    """The normal equations `H beta = r` for `beta = (mu, a, b)`, unpenalised `mu`, ridge on `a` and `b`.

    With `w` the weights as an `M x N` table,

        H = [[sum w, w 1, 1 w], [., diag(w 1) + ridge, w], [., ., diag(1 w) + ridge]]
    """

    def __init__(self, seen: Observations, v: float, ridge: float) -> None:
        self.seen, self.w, self.ridge = seen, seen.weights(v), ridge
        m, n = seen.shape
        self.w_s = self.w.new_zeros(m).index_add_(0, seen.states, self.w)
        self.w_o = self.w.new_zeros(n).index_add_(0, seen.objects, self.w)

    def gather(self, rows: Tensor) -> Tensor:
        """`X^T rows`: rows of pairs [P, d] summed over all, by state and by object [1 + M + N, d]."""
        m, n = self.seen.shape
        zeros = rows.new_zeros
        by_s = zeros(m, rows.shape[1]).index_add_(0, self.seen.states, rows)
        by_o = zeros(n, rows.shape[1]).index_add_(0, self.seen.objects, rows)
        return torch.cat([rows.sum(0, keepdim=True), by_s, by_o])

    @property
    def right(self) -> Tensor:
        return self.gather(self.w[:, None] * self.seen.means)  # r [1 + M + N, d]

    def matrix(self) -> Tensor:
        """`H`, dense."""
        m, n = self.seen.shape
        h = self.w.new_zeros(1 + m + n, 1 + m + n)
        h[0, 0] = self.w.sum()
        h[0, 1 : 1 + m], h[0, 1 + m :] = self.w_s, self.w_o
        h[1 : 1 + m, 1 + m :].index_put_((self.seen.states, self.seen.objects), self.w)
        h = h + h.triu(1).T
        h.diagonal()[1:] += torch.cat([self.w_s, self.w_o]) + self.ridge
        return h

    def times(self, beta: Tensor) -> Tensor:
        """`H beta` without `H`."""
        m, _ = self.seen.shape
        mu, a, b = beta[:1], beta[1 : 1 + m], beta[1 + m :]
        fitted = self.w[:, None] * (mu + a[self.seen.states] + b[self.seen.objects])
        return self.gather(fitted) + torch.cat([torch.zeros_like(mu), self.ridge * a, self.ridge * b])

    @property
    def diagonal(self) -> Tensor:
        return torch.cat([self.w.sum()[None], self.w_s + self.ridge, self.w_o + self.ridge])


def fit(seen: Observations, v: float, ridge: float, direct: int = DIRECT) -> Additive:
    """`a`, `b` by least squares; a state or object without images gets 0 and its prior variance `1 / ridge`."""
    m, n = seen.shape
    normal = Normal(seen, v, ridge)
    if m + n <= direct:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(normal.matrix()))
        return Additive.of(inverse @ normal.right, inverse, seen.shape)
    beta = conjugate_gradients(normal)
    variance = 1 / normal.diagonal[1 : 1 + m, None] + 1 / normal.diagonal[1 + m :]  # as if effects were apart
    return Additive(beta[0], beta[1 : 1 + m], beta[1 + m :], variance)


def conjugate_gradients(normal: Normal, tolerance: float = 1e-12, limit: int = 2000) -> Tensor:
    """`beta` of all dimensions at once, preconditioned by the diagonal; each column has its own step."""
    scale = 1 / normal.diagonal[:, None]
    right = normal.right
    beta = torch.zeros_like(right)
    left = right.clone()
    step = z = scale * left
    size = (left * z).sum(0)
    goal = tolerance * (right * scale * right).sum(0).clamp(min=1e-300)
    for _ in range(limit):
        if (size <= tolerance * goal).all():
            break
        image = normal.times(step)
        along = (step * image).sum(0)
        rate = torch.where(along > 0, size / along.clamp(min=1e-300), torch.zeros_like(size))
        beta = beta + rate * step
        left = left - rate * image
        z = scale * left
        size, before = (left * z).sum(0), size
        step = z + (size / before.clamp(min=1e-300)) * step
    return beta


def log_likelihood(seen: Observations, v: float, ridge: float) -> float:
    """Marginal likelihood of the pairs' means, up to a constant: `mu`, `a` and `b` integrated out, `1/ridge` being the
    prior variance of effects.

        -1/2 [ sum_c w_c |x_c|^2 - r . H^-1 r  +  d (log|H| - sum_c log w_c) ]
    """
    normal = Normal(seen, v, ridge)
    factor = torch.linalg.cholesky(normal.matrix())
    half = torch.linalg.solve_triangular(factor, normal.right, upper=False)
    quadratic = float((normal.w[:, None] * seen.means**2).sum() - (half * half).sum())
    determinant = float(2 * factor.diagonal().log().sum() - normal.w.log().sum())
    return -0.5 * (quadratic + seen.means.shape[1] * determinant)


def interaction_variance(seen: Observations, ridge: float, direct: int = DIRECT) -> float:
    """`v`: where the marginal likelihood is highest, to an eighth of a decade; by moments where `H` is too large to
    factor. `1 / v` images is where a seen pair's own mean weighs as much as the fit."""
    if sum(seen.shape) > direct:
        return _by_moments(seen, ridge, direct)
    found = {
        float(e): log_likelihood(seen, 10.0**e, ridge) for e in range(-4, 2)
    }  # whole decades, then halves of halves
    step = 0.5
    while step > 0.1:
        best = max(found, key=found.__getitem__)
        for exponent in (best - step, best + step):
            found[exponent] = log_likelihood(seen, 10.0**exponent, ridge)
        step /= 2
    return float(10.0 ** max(found, key=found.__getitem__))


def _by_moments(seen: Observations, ridge: float, direct: int) -> float:
    """Mean square of residuals less what the means' own noise explains, both counted per degree of freedom."""
    found = fit(seen, 1.0, ridge, direct)
    residual = ((seen.means - found.at(seen.states, seen.objects)) ** 2).mean(1)
    free = max(len(residual) - sum(seen.shape) + 1, 1) / len(residual)
    return max(float(residual.mean() / free - (1 / seen.counts).mean()), 1e-4)
