"""Two methods over several splits of a data set: a hierarchical bootstrap over splits, seeds and images.

Which pairs are unseen moves every run on a split together, and is the same for both methods. So a round draws splits,
and in each drawn one, apart, seeds and images as for a comparison on a single split; the change is averaged over seeds,
then over splits. One split drawn twice has its seeds and images drawn twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duplex.errors import UsageError
from duplex.evaluation.accumulator import Floats
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.seeds import NAMES, differences, mean_change, redrawn, whole
from duplex.evaluation.uncertainty import ROUNDS, Difference

Runs = Sequence[Margins]  # a method's on one split, one a seed


@dataclass(frozen=True)
class OverSplits:
    """`second - first` for `seen, unseen, hm, auc`; undefined ones are left out."""

    difference: dict[str, Difference]  # mean over splits
    by_split: list[dict[str, float]]
    deviation: dict[str, float]  # standard deviation between the splits' differences


def compare_splits(first: Sequence[Runs], second: Sequence[Runs], rounds: int = ROUNDS, seed: int = 0) -> OverSplits:
    """Runs of two methods, split by split, paired by seed and image within each."""
    if len(first) != len(second) or len(first) < 2:
        raise UsageError(f"{len(first)} splits cannot be paired with {len(second)}; compare the same two or more")
    for one, other in zip(first, second, strict=True):
        if len(one) != len(other) or not one:
            raise UsageError(f"{len(one)} runs cannot be paired with {len(other)}; compare the same seeds")
    curves = [
        [[Curve.of(margins) for margins in runs] for runs in pair] for pair in zip(first, second, strict=True)
    ]  # [splits][2][seeds]
    apart = np.array([mean_change(pair, *whole(runs)) for pair, runs in zip(curves, first, strict=True)])  # [splits, 4]
    rng = np.random.default_rng(seed)
    draws = np.array([_round(curves, first, rng) for _ in range(rounds)]).reshape(rounds, len(NAMES))
    found = differences(apart.mean(axis=0), draws)
    return OverSplits(
        found,
        [{name: float(row[NAMES.index(name)]) for name in found} for row in apart],
        {name: float(apart[:, NAMES.index(name)].std(ddof=1)) for name in found},
    )


def _round(curves: Sequence[Sequence[Sequence[Curve]]], runs: Sequence[Runs], rng: np.random.Generator) -> Floats:
    """[4] the change of one round."""
    splits = rng.integers(0, len(runs), len(runs))
    mean: Floats = np.mean([mean_change(curves[split], *redrawn(runs[split], rng)) for split in splits], axis=0)
    return mean
