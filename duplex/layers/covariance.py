"""How features spread within a group: a shared covariance, shrunk, and the map under which that spread is round.

Shrinkage is OAS (Chen, Wiesel, Eldar and Hero 2010, Eq. 23): its intensity follows from the sample covariance and the
number of images alone. Ledoit and Wolf's needs fourth moments, a second pass over the images that could neither be
added up from shards nor updated. At these sizes both choose the same (0.009 on the embedded benchmark).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.layers.statistics import Groups


@dataclass(frozen=True)
class Spread:
    """`Sigma`, and `W` with `W W^T = Sigma^-1`: `z W` has unit spread in every direction."""

    covariance: Tensor  # Sigma [d, d]
    whitening: Tensor  # W [d, d]
    shrinkage: float  # share of the identity in Sigma


def within(groups: Groups) -> tuple[Tensor, float]:
    """Sample covariance of `z - mean of its group` [d, d] and its degrees of freedom.

    Where no group has two images, it is taken about the mean of all images.
    """
    counts, means = groups.counts, groups.means
    free = float(counts.sum() - (counts > 0).sum())
    if free < 1:
        total = groups.sums.sum(0, keepdim=True)
        counts, means = counts.sum()[None], total / counts.sum().clamp(min=1)
        free = max(float(counts.sum()) - 1, 1.0)
    scatter = groups.moment - (means * counts[:, None]).T @ means  # sum z z^T - sum n_g m_g m_g^T
    return (scatter + scatter.T) / (2 * free), free


def oas(covariance: Tensor, free: float) -> float:
    """The share of `tr(S)/d I` that OAS gives a sample covariance of `free` degrees of freedom."""
    d = len(covariance)
    trace, squares = float(covariance.trace()), float((covariance * covariance).sum())  # tr S, tr S^2
    above = (1 - 2 / d) * squares + trace**2
    below = (free + 1 - 2 / d) * (squares - trace**2 / d)
    return min(1.0, above / below) if below > 0 else 1.0


def spread(groups: Groups) -> Spread:
    """`Sigma = (1 - rho) S + rho tr(S)/d I`; finite and positive definite for any images, one or none included."""
    sample, free = within(groups)
    d = len(sample)
    eye = torch.eye(d, dtype=sample.dtype, device=sample.device)
    level = float(sample.trace()) / d
    if not level > 1e-12:  # nothing varies: the spread that unit features have at most
        sample, level = eye / d, 1 / d
    rho = oas(sample, free)
    values, vectors = torch.linalg.eigh((1 - rho) * sample + rho * level * eye)
    values = values.clamp(min=1e-9 * level)  # rounding may leave a direction without spread just below zero
    return Spread((vectors * values) @ vectors.T, vectors / values.sqrt(), rho)
