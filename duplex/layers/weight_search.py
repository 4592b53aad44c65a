"""Search for the weights of the summands of a score with the best validation AUC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

STEPS = (4.0, 2.0, 2**0.5)  # factors by which a weight is tried larger and smaller, in turn
LARGEST_WEIGHT = 64

Weights = tuple[float, ...]


def search_weights(first: Weights, auc_with: Callable[[Weights], float]) -> Weights:
    """Weights of a score's summands with the best AUC, by coordinate search from the weights `first`.

    Each weight in turn is multiplied and divided by factors that shrink towards 1. The last weight is fixed, because a
    common factor of all weights changes no ranking.
    """
    best, best_auc = first, auc_with(first)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for place, factor in product(range(len(best) - 1), (step, 1 / step)):
                trial = tuple(w * factor if i == place else w for i, w in enumerate(best))
                if max(trial) < LARGEST_WEIGHT and (trial_auc := auc_with(trial)) > best_auc:
                    best, best_auc = trial, trial_auc
                    improved = True
    return best


def tuned_weights(
    first: Tensor, weighted: Callable[[Weights], Sequence[Tensor]], auc: Callable[[Tensor], float]
) -> Tensor:
    """The K weights from `first` [K] for which the sum of the `weighted` summands [B, C] has the best `auc`."""
    return torch.tensor(
        search_weights(tuple(first.tolist()), lambda weights: auc(torch.stack([*weighted(weights)]).sum(0)))
    )
