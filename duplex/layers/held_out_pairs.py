"""Choose how much variance to add to the closed-form classifier's covariance, by how well it predicts held-out pairs.

    e_cc' = Phi(-m / s),   m = x_c . (h_c - h_c') - (|h_c|^2 - |h_c'|^2) / 2,
    s^2 = (h_c - h_c')^T W^T S W (h_c - h_c')
    chosen: the least expected rivals, sum_c sqrt(n_c) sum_c' e_cc' / sum_c sqrt(n_c)

* c, c': pairs of a held-out fold;  e_cc': share of the images of c on which the rival c' scores higher
* x_c, n_c: mean and number of the images of c, in the coordinates `x = z W` of the metric tried
* h_c: prototype composed from the pairs of all other folds;  S: sample covariance

The classifier (gaussian_prototypes.py) composes prototypes of pairs without images, so its metric should suit such
pairs. Images are assumed to be normally distributed about `x_c`. All numbers follow from counts, means and the
covariance; no image is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from duplex.layers.additive import PairMeans
from duplex.layers.class_statistics import ClassStatistics, shared_whitening, within_group_covariance

FOLDS = 8
ADDED = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0)  # shares of the mean variance that are tried
Compose = Callable[[Tensor, Tensor], Tensor]  # states [K], objects [K] -> prototypes [K, d]
Fit = Callable[[PairMeans], Compose]  # means of some pairs -> the function that composes prototypes


def choose_added_variance(statistics: ClassStatistics, prepare_fit: Callable[[PairMeans], Fit]) -> float:
    """The share of the mean variance to add by which held-out pairs are predicted best; 0 if no pair can be held out.

    prepare_fit: function from the means of all pairs to the fitting function that is called for each fold; it chooses
    settings that all folds use, such as variances by likelihood, and is called once per share tried.
    """
    rivals = [expected_rivals(statistics, added, prepare_fit) for added in ADDED]
    return ADDED[min(range(len(ADDED)), key=rivals.__getitem__)]


def expected_rivals(statistics: ClassStatistics, added: float, prepare_fit: Callable[[PairMeans], Fit]) -> float:
    """How many held-out pairs are expected to score higher on an image than its label; 0 if none is held out."""
    groups = statistics.by_pair()
    whitening = shared_whitening(groups, added)
    spread = whitening.T @ within_group_covariance(groups)[0] @ whitening  # W^T S W [d, d]
    means, shape = groups.means @ whitening, (statistics.states, statistics.objects)
    states, objects = statistics.state_of, statistics.object_of
    total = weight = 0.0
    fit = prepare_fit(PairMeans(states, objects, groups.counts, means, shape))
    for held, rest in folds(statistics):
        compose = fit(PairMeans(states[rest], objects[rest], groups.counts[rest], means[rest], shape))
        errors = _errors(means[held], compose(states[held], objects[held]), spread)  # [K, K]
        weights = groups.counts[held].sqrt()
        total += float(weights @ errors.sum(1))
        weight += float(weights.sum())
    return total / weight if weight else 0.0


def folds(statistics: ClassStatistics) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, per cross-validation fold over the seen pairs, the positions of held-out pairs and of pairs to fit.

    The states and objects of all held-out pairs occur among the pairs to fit.
    """
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(statistics.pairs))).to(statistics.pairs.device)
    states, objects = statistics.state_of, statistics.object_of
    for first in range(FOLDS):
        held = order[first::FOLDS]
        rest = order[torch.arange(len(order), device=order.device) % FOLDS != first].sort().values
        known = torch.isin(states[held], states[rest]) & torch.isin(objects[held], objects[rest])
        if int(known.sum()) > 1:
            yield held[known], rest


def _errors(means: Tensor, prototypes: Tensor, spread: Tensor) -> Tensor:
    """e_cc' [K, K] of K held-out pairs; diagonal 0."""
    scores = means @ prototypes.T - 0.5 * (prototypes * prototypes).sum(1)  # x_c . h_c' - |h_c'|^2 / 2
    inner = prototypes @ spread @ prototypes.T
    variance = inner.diagonal()[:, None] + inner.diagonal() - 2 * inner
    ratio = (scores.diagonal()[:, None] - scores) / variance.clamp(min=1e-12).sqrt()
    return (0.5 * torch.erfc(ratio / 2**0.5)).fill_diagonal_(0.0)
