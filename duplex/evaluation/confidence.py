"""Probabilities of answers: a temperature and a prior, fitted on validation images by likelihood.

With `l_c = log p(c|x)` of the method, an answer's probability among the candidates is

    q(c|x) = exp(l_c / T + log prior(c)) / Z,    prior(c) = r e^k / n_u  if c is unseen,  (1 - r) / n_s  if it is seen,

`n_u` and `n_s` the numbers of candidates and `r` the share of new images to be expected of unseen pairs, so that unseen
pairs have the odds r / (1 - r) before an image is looked at. Methods are trained on seen pairs alone and prefer them in
`p(c|x)` itself; `k` (log-odds) undoes that preference. Validation has another share of unseen images than `r`: so each
seen validation image has the weight (1 - r) / N_s, each unseen one r / N_u. With these weights,

    min  -sum_i w_i log q(c_i|x_i)    over a = 1 / T and k,

is convex, as `log q` is that of an exponential family with the statistics `(l_c, [c unseen])`. At its minimum the mean
mass of unseen pairs is `r`: the derivative by `k` is that difference. For another share `r'` only `r` is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duplex.evaluation.accumulator import Floats
from duplex.labels import Bools

NEW_SHARE = 0.1
LEAST = 1e-300  # smallest probability whose logarithm is taken
LIMITS = (1e-3, 1e3), (-30.0, 30.0)  # of 1/T and of k
STARTS = tuple(10.0**power for power in range(-3, 4))  # 1/T from which the fit may start
STEPS, HALVINGS = 200, 40


@dataclass(frozen=True)
class Confidence:
    """Temperature and prior that turn a method's scores into probabilities of answers."""

    temperature: float = 1.0  # T, by which log probabilities are divided
    unseen_log_odds: float = 0.0  # k, log-odds added to unseen pairs
    new_share: float = NEW_SHARE  # r, expected share of images of unseen pairs

    def __post_init__(self) -> None:
        if not (1e-6 <= self.temperature <= 1e6 and abs(self.unseen_log_odds) <= 1e3 and 0 < self.new_share < 1):
            limits = "1e-6 <= temperature <= 1e6, |unseen_log_odds| <= 1000, 0 < new_share < 1"
            raise ValueError(f"{self}: expected {limits}")

    def log_prior(self, seen: Bools, feasible: Bools) -> Floats:
        """Return the log prior probabilities [C] of candidates; -inf for infeasible candidates."""
        prior = np.where(seen, np.log1p(-self.new_share), np.log(self.new_share) + self.unseen_log_odds)
        for group in (seen & feasible, ~seen & feasible):
            prior[group] -= math.log(max(1, group.sum()))
        return np.where(feasible, prior, -np.inf)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Confidence:
        """Read temperature and prior from untrusted JSON; raise `ValueError` or `TypeError` for invalid values."""
        return cls(**{name: float(value) for name, value in record.items()})


UNFITTED = Confidence()  # leaves the probabilities of a method as they are, besides the prior


def log_probabilities(probabilities: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    """Return the candidates' log probabilities [B, C] in float64; a score of -inf excludes a candidate.

    probabilities: the method's function from scores [B, C] to probabilities.
    """
    return probabilities(scores.double()).clamp(min=LEAST).log()


def fit_probabilities(log_p: Tensor, target: Any, seen: Bools, new_share: float = NEW_SHARE) -> Confidence:
    """Fit the temperature and the log-odds added to unseen pairs, by weighted maximum likelihood.

    log_p: log probabilities of the candidates [N, C], in float64.
    target: column of each image's label [N].
    seen: mask of the seen candidates [C].
    new_share: expected share of images of unseen pairs; it sets the prior and the weights of the images.

    `unseen_log_odds` is 0 unless there are images of both seen and unseen pairs. Newton's method starts from the best
    of several temperatures, and its steps are limited in length: the loss of overconfident scores is flat far from its
    minimum, where a longer step could end. Steps that would raise the loss are halved.
    """
    start = Confidence(new_share=new_share)
    unseen, label = torch.from_numpy(~seen).double(), torch.as_tensor(target)
    prior = torch.from_numpy(start.log_prior(seen, np.ones_like(seen)))
    weights, both = _weights(unseen[label], new_share)
    starts = [torch.tensor([a, 0.0], dtype=torch.float64) for a in STARTS]
    theta = min(starts, key=lambda each: _loss(each, log_p, unseen, prior, label, weights)[0])
    loss, gradient, hessian = _loss(theta, log_p, unseen, prior, label, weights)
    for _ in range(STEPS):
        if not both:
            gradient[1], hessian[0, 1], hessian[1, 0], hessian[1, 1] = 0.0, 0.0, 0.0, 1.0
        step = torch.linalg.solve(hessian + 1e-12 * torch.eye(2, dtype=torch.float64), gradient)
        longest = torch.stack([theta[0] / 2, torch.ones_like(theta[1])])  # of a step in 1/T and in k
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
        change, theta = float((trial - theta).abs().max()), trial
        loss, gradient, hessian = result
        if change < 1e-9:
            break
    return Confidence(1 / float(theta[0]), float(theta[1]), new_share)


def _weights(unseen: Tensor, new_share: float) -> tuple[Tensor, bool]:
    """Return the weight of each image in the loss [N], and whether there are images of both seen and unseen pairs.

    The weights of images of unseen pairs sum to `new_share`. Without seen or without unseen pairs all are equal.
    """
    count = float(unseen.sum())
    if count in (0, len(unseen)):
        return torch.full_like(unseen, 1 / max(1, len(unseen))), False
    return unseen * new_share / count + (1 - unseen) * (1 - new_share) / (len(unseen) - count), True


def _loss(
    theta: Tensor, log_p: Tensor, unseen: Tensor, prior: Tensor, label: Tensor, weights: Tensor
) -> tuple[float, Tensor, Tensor]:
    """Return the weighted negative log-likelihood, its gradient [2] and its Hessian [2, 2] by `theta`: 1/T and k."""
    log_q = (theta[0] * log_p + theta[1] * unseen + prior).log_softmax(1)
    q = log_q.exp()
    mean = torch.stack([(q * log_p).sum(1), q @ unseen], dim=1)  # [N, 2]
    own = torch.stack([log_p.gather(1, label[:, None])[:, 0], unseen[label]], dim=1)
    squares = torch.stack([(q * log_p**2).sum(1), (q * log_p) @ unseen, q @ unseen], dim=1)  # aa, ak, kk
    aa, ak, kk = weights @ torch.stack(
        [squares[:, 0] - mean[:, 0] ** 2, squares[:, 1] - mean[:, 0] * mean[:, 1], squares[:, 2] - mean[:, 1] ** 2], 1
    )
    loss = -float(weights @ log_q.gather(1, label[:, None])[:, 0])
    return loss, weights @ (mean - own), torch.stack([torch.stack([aa, ak]), torch.stack([ak, kk])])
