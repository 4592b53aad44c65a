"""Calibrate the probabilities of methods' answers.

From `l_c = log p(c|x)`, a method's log probability of pair `c` for image `x`, the calibrated
probability is

    q(c|x) = exp(l_c / T + log prior(c)) / Z,
    prior(c) = r e^k / n_u  if c is unseen,  (1 - r) / n_s  if it is seen,

`T` is the temperature, `Z` the sum over candidates, `n_u` and `n_s` the numbers of unseen and seen
candidates, and `r` the expected share of unseen-pair images among the images to recognise. Methods
trained on seen pairs prefer these in `p(c|x)`; the log-odds `k` correct for that. The N_s
validation images of seen pairs have the weight (1 - r) / N_s each, the N_u of unseen pairs r /
N_u. With these weights w_i and the labels c_i, T and k are fitted by

    min  -sum_i w_i log q(c_i|x_i)    over a = 1 / T and k

This is convex, as `q` is an exponential family with the statistics `(l_c, [c unseen])`. At the
minimum, the mean probability of unseen pairs equals `r`, because the derivative with respect to
`k` is their difference. If another share is expected later, `r` alone is replaced. The share of a
set of images can be estimated (`new_share`) from the probability of all unseen candidates at
r = 1/2, whose means over validation images are kept (`UnseenMass`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, field, replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from duplex.evaluation.accumulate import Floats
from duplex.labels import Bools, Ints, World

NEW_SHARE = 0.1  # r unless another is given: the share of new (unseen) pairs' images to expect
LEAST = 1e-300  # smallest probability whose logarithm is taken
LIMITS = (1e-3, 1e3), (-30.0, 30.0)  # of 1/T and of k
STARTS = tuple(10.0**power for power in range(-3, 4))  # 1/T from which the fit may start
STEPS, HALVINGS = 200, 40


@checked_dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class UnseenMass:
    """Mean probability of all unseen candidates at r = 1/2, over validation images."""

    seen: Annotated[float, Field(ge=0, le=1)]  # m_s, over images of seen pairs
    unseen: Annotated[float, Field(ge=0, le=1)]  # m_u, over images of unseen pairs
    seen_error: Annotated[float, Field(ge=0, le=1)]  # standard errors
    unseen_error: Annotated[float, Field(ge=0, le=1)]

    @classmethod
    def of(cls, q: Floats, compositions: Ints, is_seen: Bools) -> UnseenMass | None:
        """The means of `q` [N], given labels [N]; None with fewer than two images of a kind."""
        if min(is_seen.sum(), (~is_seen).sum()) < 2:
            return None
        m_s, e_s = _mean_and_error(q[is_seen], compositions[is_seen])
        m_u, e_u = _mean_and_error(q[~is_seen], compositions[~is_seen])
        # the last bits depend on where arrays lie in memory, and equal models have equal files
        return cls(*(round(value, 6) for value in (m_s, m_u, e_s, e_u)))


def _mean_and_error(q: Floats, compositions: Ints) -> tuple[float, float]:
    # images of a pair resemble each other, so the error over pairs is used if it is the larger one
    d = q - q.mean()
    sums = np.bincount(np.unique(compositions, return_inverse=True)[1], d)
    by_image = float((d**2).sum()) / (1 - 1 / len(q))
    by_pair = float((sums**2).sum()) / (1 - 1 / len(sums)) if len(sums) > 1 else 0.0
    return float(q.mean()), min(1.0, math.sqrt(max(by_image, by_pair)) / len(q))


@checked_dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class Confidence:
    """Calibration of log probabilities."""

    temperature: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0  # T, divides log probabilities
    unseen_log_odds: Annotated[float, Field(ge=-1e3, le=1e3)] = 0.0  # k, added to unseen pairs
    new_share: Annotated[float, Field(gt=0, lt=1)] = NEW_SHARE  # r, expected of unseen pairs
    unseen_mass: Mapping[World, UnseenMass] = field(default_factory=dict)  # by world of the candidates

    def log_prior(self, seen: Bools, feasible: Bools) -> Floats:
        """The candidates' log prior [C], from masks of candidates; -inf for infeasible ones."""
        prior = np.where(seen, np.log1p(-self.new_share), np.log(self.new_share) + self.unseen_log_odds)
        for group in (seen & feasible, ~seen & feasible):
            prior[group] -= math.log(max(1, group.sum()))
        return np.where(feasible, prior, -np.inf)

    def log_posteriors(
        self, probabilities: Callable[[Tensor], Tensor], scores: Tensor, seen: Bools, feasible: Bools
    ) -> Tensor:
        """Log probabilities log q(c|x) [B, C] in float64, from a method's scores [B, C]."""
        excluded = torch.as_tensor(~feasible, device=scores.device)
        log_p = log_probabilities(probabilities, scores.masked_fill(excluded, -torch.inf))
        prior = torch.from_numpy(self.log_prior(seen, feasible)).to(scores.device)
        return (log_p / self.temperature + prior).log_softmax(1)

    @property
    def even(self) -> Confidence:
        """The same with r = 1/2, from which probabilities at any share follow."""
        return replace(self, new_share=0.5)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


UNFITTED = Confidence()  # leaves the probabilities of a method as they are, besides the prior


def log_probabilities(probabilities: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    """Logarithms [B, C] of a method's probabilities, in float64; at least log 1e-300."""
    return probabilities(scores.double()).clamp(min=LEAST).log()


def fit_probabilities(log_p: Tensor, target: Any, seen: Bools, new_share: float = NEW_SHARE) -> Confidence:
    """Fit temperature and log-odds to labelled images, by weighted maximum likelihood."""
    start = Confidence(new_share=new_share)
    unseen = torch.from_numpy(~seen).double()
    label = torch.as_tensor(target)
    prior = torch.from_numpy(start.log_prior(seen, np.ones_like(seen)))
    is_seen = seen[label.numpy()]
    weights = torch.from_numpy(image_weights(is_seen, new_share))
    both = is_seen.any() and not is_seen.all()
    starts = [torch.tensor([a, 0.0], dtype=torch.float64) for a in STARTS]
    theta = min(starts, key=lambda each: _loss(each, log_p, unseen, prior, label, weights)[0])
    loss, gradient, hessian = _loss(theta, log_p, unseen, prior, label, weights)
    for _ in range(STEPS):
        if not both:
            gradient[1] = 0.0
            hessian[0, 1] = hessian[1, 0] = 0.0
            hessian[1, 1] = 1.0
        step = torch.linalg.solve(hessian + 1e-12 * torch.eye(2, dtype=torch.float64), gradient)
        # longest step in 1/T and in k
        longest = torch.stack([theta[0] / 2, torch.ones_like(theta[1])])
        step = step * min(1.0, float((longest / step.abs().clamp(min=LEAST)).min()))
        for halvings in range(HALVINGS):
            trial = torch.stack(
                [x.clamp(*limits) for x, limits in zip(theta - step / 2**halvings, LIMITS, strict=True)]
            )
            result = _loss(trial, log_p, unseen, prior, label, weights)
            if result[0] <= loss:
                break
        else:
            break  # rounding: no step along the gradient lowers the loss
        change = float((trial - theta).abs().max())
        theta = trial
        loss, gradient, hessian = result
        if change < 1e-9:
            break
    return Confidence(1 / float(theta[0]), float(theta[1]), new_share)


def _loss(
    theta: Tensor, log_p: Tensor, unseen: Tensor, prior: Tensor, label: Tensor, weights: Tensor
) -> tuple[float, Tensor, Tensor]:
    # with the gradient [2] and the Hessian [2, 2] by (1/T, k)
    log_q = (theta[0] * log_p + theta[1] * unseen + prior).log_softmax(1)
    q = log_q.exp()
    mean = torch.stack([(q * log_p).sum(1), q @ unseen], dim=1)  # [N, 2]
    own = torch.stack([log_p.gather(1, label[:, None])[:, 0], unseen[label]], dim=1)
    # aa, ak, kk
    squares = torch.stack([(q * log_p**2).sum(1), (q * log_p) @ unseen, q @ unseen], dim=1)
    products = [mean[:, 0] ** 2, mean[:, 0] * mean[:, 1], mean[:, 1] ** 2]
    aa, ak, kk = weights @ (squares - torch.stack(products, 1))
    loss = -float(weights @ log_q.gather(1, label[:, None])[:, 0])
    return loss, weights @ (mean - own), torch.stack([torch.stack([aa, ak]), torch.stack([ak, kk])])


def image_weights(is_seen: Bools, new_share: float) -> Floats:
    """Weights [N] with sum 1; images of unseen pairs, if both kinds exist, sum to `new_share`."""
    unseen = int((~is_seen).sum())
    if unseen in (0, len(is_seen)):
        return np.full(len(is_seen), 1 / max(1, len(is_seen)))
    return np.where(is_seen, (1 - new_share) / (len(is_seen) - unseen), new_share / unseen)
