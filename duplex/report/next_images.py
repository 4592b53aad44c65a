"""Rank pairs by how much one more labelled image would help.

The measure combines the variance of a pair's mean feature in the closed-form classifier with the pair's validation
errors. In coordinates where images spread by 1 about their pair's mean, the mean is `theta_c = u_c . beta + gamma_c`:
effects of state and object, and an interaction of variance `v` (duplex/layers/additive.py). With `n_c` images of pair
`c`, `H` the matrix of the normal equations for `beta`, and `k = 1/v`,

    V_c = 1 / (n_c + k) + (k / (n_c + k))^2 u_c' H^-1 u_c        variance of theta_c in every direction
    V_c / (1 + V_c)                                              share by which one more image reduces V_c
    e_c = (wrong_c + e) / (validated_c + 1)                      share of errors, shrunk to the share e of all pairs
    gain_c = e_c V_c / (1 + V_c)

where `wrong_c` of the `validated_c` validation images of the pair are answered wrongly. The order of `gain` is a
heuristic: it assumes that errors of a pair fall in proportion to the variance of its mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duplex.evaluation.accumulator import Floats
from duplex.features.examples import Examples
from duplex.labels import Bools, Ints, LabelSpace
from duplex.layers.additive import NormalEquations, PairMeans
from duplex.report.learning_curve import ClosedFormAnswers


@dataclass(frozen=True)
class NextImages:
    """Labelled pairs of a data set, ranked by the expected gain from one more image of the pair."""

    pairs: Ints  # [P] compositions, the largest gain first
    images: Ints  # [P] labelled images, of all splits
    variance: Floats  # V [P]
    validated: Ints  # [P] validation images of pairs that training shows
    wrong: Ints  # [P] of these
    gain: Floats  # [P]
    shrinkage: float  # k
    errors: tuple[float, float] | None  # percent wrong on validation images of pairs of larger and smaller variance

    @classmethod
    def of(cls, examples: Mapping[str, Examples], labels: LabelSpace) -> NextImages:
        """Rank the labelled pairs by expected gain, from image counts of all splits and errors on validation images.

        The errors are those of a closed-form classifier, fitted to the training images.

        examples: split -> frozen features with compositions.
        """
        answers = ClosedFormAnswers.of(examples, labels, np.arange(len(examples["train"])), "val")
        shape, k, ridge = answers.model.shape, answers.model.shrinkage, answers.model.settings.ridge
        counts = pair_counts(examples, labels, ("train", "val", "test"))
        pairs = np.flatnonzero(counts)
        variance = mean_variances(counts, k, ridge, shape)[pairs]
        right = answers.answer == answers.target
        seen, size = answers.is_seen, labels.size
        validated = np.bincount(answers.target[seen], minlength=size)[pairs]
        wrong = np.bincount(answers.target[seen & ~right], minlength=size)[pairs]
        gain = expected_gain(variance, wrong, validated)
        order = np.argsort(-gain, kind="stable")
        before = mean_variances(pair_counts(examples, labels, ("train",)), k, ridge, shape)[answers.target]
        pairs, variance, validated, wrong = pairs[order], variance[order], validated[order], wrong[order]
        errors = _errors_by_variance(before, right)
        return cls(pairs, counts[pairs], variance, validated, wrong, gain[order], k, errors)


def pair_counts(examples: Mapping[str, Examples], labels: LabelSpace, splits: tuple[str, ...]) -> Ints:
    """Return the number of images of every composition [M*N], summed over `splits`, for M states and N objects."""
    compositions = np.concatenate([examples[split].compositions.numpy() for split in splits])
    return np.bincount(compositions, minlength=labels.size)


def mean_variances(counts: Ints, k: float, ridge: float, shape: tuple[int, int]) -> Floats:
    """Return the posterior variance of every composition's mean feature [M*N], given its number of images.

    counts: number of images of every composition [M*N].
    k: inverse variance of the pairs' interactions (deviations from state + object effect); weighs like k images.
    ridge: penalty on the effects of states and objects.
    shape: (M, N), numbers of states and of objects.
    """
    m, n = shape
    seen = torch.from_numpy(np.flatnonzero(counts))
    number = torch.from_numpy(counts).double()
    nothing = torch.zeros(len(seen), 0, dtype=torch.float64)
    normal = NormalEquations(PairMeans(seen // n, seen % n, number[seen], nothing, shape), 1 / k, ridge)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(normal.matrix()))  # H^-1 [1 + M + N, 1 + M + N]
    of_effects = _quadratic(inverse, m)  # u_c' H^-1 u_c [M, N]
    rest = k / (number + k)
    variance: Floats = (1 / (number + k) + rest**2 * of_effects.flatten()).numpy()
    return variance


def _quadratic(inverse: Tensor, states: int) -> Tensor:
    """Return `u' H^-1 u` [M, N], the variance that a pair's mean has from the estimates of state and object effects.

    u: design row of the pair (1, one-hot state, one-hot object).
    inverse: H^-1, inverse matrix of the normal equations.
    states: number of states, M.
    """
    own = inverse.diagonal()
    s, o = slice(1, 1 + states), slice(1 + states, None)
    by_state = own[s] + 2 * inverse[0, s]
    by_object = own[o] + 2 * inverse[0, o]
    return inverse[0, 0] + by_state[:, None] + by_object + 2 * inverse[s, o]


def expected_gain(variance: Floats, wrong: Ints, validated: Ints) -> Floats:
    """Return the expected gain [P] from one more labelled image of each pair, as a number to rank pairs by.

    variance: of the pair's mean feature [P].
    wrong, validated: numbers of wrong and of all validation images of the pair [P].
    """
    overall = wrong.sum() / max(1, validated.sum())
    errors = (wrong + overall) / (validated + 1)
    gain: Floats = errors * variance / (1 + variance)
    return gain


def _errors_by_variance(variance: Floats, right: Bools) -> tuple[float, float] | None:
    """Return the percentage of wrong answers on images whose pair has a variance above the median, and on the others.

    The comparison shows whether variance predicts errors. None if a group is empty.

    variance: for each image, the posterior variance of its pair's mean feature [N].
    right: whether the answer is right [N].
    """
    larger = variance > np.median(variance)
    if larger.all() or not larger.any():
        return None
    return 100 * float((~right[larger]).mean()), 100 * float((~right[~larger]).mean())
