"""Compute metrics of scored images: S, U, best HM and AUC with confidence intervals, state and object accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from duplex.errors import DuplexError, require_whole
from duplex.evaluation.accumulator import TopCompetitors, checked_names
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.uncertainty import ROUNDS, Components, Interval, bootstrap, percentiles
from duplex.labels import GROUPS, Bools, FrequencyGroups, Ints

if TYPE_CHECKING:
    import pandas as pd

NO_PERCENTAGES = {"k", "bias", "images_seen", "images_unseen"}


@dataclass(frozen=True)
class Metrics:
    """Metrics of scored images as fractions: seen accuracy S, unseen accuracy U, best harmonic mean HM, AUC, others.

    A metric is None if the images that it needs are missing (docs/metrics.md).
    """

    k: int
    images_seen: int
    images_unseen: int
    seen: float | None  # S: seen accuracy at bias -inf
    unseen: float | None  # U: unseen accuracy at bias +inf
    hm: float | None  # best harmonic mean on the curve
    auc: float | None
    seen_interval: Interval | None = None  # 95 %
    unseen_interval: Interval | None = None
    hm_interval: Interval | None = None
    auc_interval: Interval | None = None
    bias: float | None = None  # at which HM is reached, in units of the scores
    state_accuracy: float | None = None  # of the prediction at bias 0
    object_accuracy: float | None = None
    tied: float | None = None  # share of images that are wrong only because the label ties with the best of its group

    def to_dict(self) -> dict[str, Any]:
        """The metrics as JSON values, accuracies in percent."""
        return {name: value if name in NO_PERCENTAGES else _percent(value) for name, value in vars(self).items()}


def _percent(value: Any) -> Any:
    if value is None:
        return None
    return [100 * end for end in value] if isinstance(value, tuple) else 100 * value


def measure(
    competitors: TopCompetitors,
    k: int = 1,
    *,
    states: ArrayLike | None = None,
    objects: ArrayLike | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Metrics:
    """Compute S, U, HM, AUC and the accuracies of states and objects from score statistics.

    Args:
        competitors: score statistics, the result of `ScoreAccumulator.competitors`.
        k: an image is right if its pair is among the best k.
        states: state of each column [C], for the accuracy of states.
        objects: object of each column [C], for the accuracy of objects.
        rounds: number of bootstrap rounds over images for the intervals of S, U and HM; 0: none.
    """
    rounds, seed = require_whole(rounds, "rounds", 0), require_whole(seed, "seed", 0)
    margins = Margins.of(competitors, k)
    state_accuracy = _primitive_accuracy(competitors, states, "states")
    object_accuracy = _primitive_accuracy(competitors, objects, "objects")
    curve, parts = Curve.of(margins), Components.of(margins)
    draws = bootstrap([margins], rounds, seed)[0]  # [rounds, 3]
    own_group = np.where(competitors.is_seen[:, None], competitors.seen, competitors.unseen)
    tied = own_group[:, k - 1] == competitors.label
    best = int(curve.harmonic.argmax()) if margins.seen.size and margins.unseen.size else None
    return Metrics(
        k=k,
        images_seen=margins.seen.size,
        images_unseen=margins.unseen.size,
        seen=float(curve.seen_accuracies[0]) if margins.seen.size else None,
        unseen=float(curve.unseen_accuracies[-1]) if margins.unseen.size else None,
        hm=None if best is None else float(curve.harmonic[best]),
        auc=parts.auc,
        seen_interval=percentiles(draws[:, 0]),
        unseen_interval=percentiles(draws[:, 1]),
        hm_interval=percentiles(draws[:, 2]),
        auc_interval=parts.interval,
        bias=None if best is None else curve.bias(best),
        state_accuracy=state_accuracy,
        object_accuracy=object_accuracy,
        tied=float((tied & (competitors.label > -np.inf)).mean()),
    )


def _primitive_accuracy(competitors: TopCompetitors, names: ArrayLike | None, noun: str) -> float | None:
    if names is None:
        return None
    name, predicted = checked_names(names, competitors.columns, noun), competitors.best_columns()
    return float(((predicted >= 0) & (name[predicted] == name[competitors.target])).mean())


def group_table(groups: FrequencyGroups, train: Ints, test: Ints, right: Mapping[str, Bools]) -> pd.DataFrame:
    """A table of accuracies by frequency group: head, medium, tail and unseen compositions.

    Head to tail are the seen compositions by number of training images. A line per group has numbers of compositions,
    of training and of test images, and accuracies in percent (NaN without images).

    Args:
        train, test: composition of each training image and of each test image.
        right: name of an accuracy column of the table -> mask of the test images that are predicted right.
    """
    import pandas as pd

    table = pd.DataFrame({"group": list(GROUPS), "compositions": groups.sizes})
    for split, images in (("train", train), ("test", test)):
        counts = np.bincount(groups.groups_of(images), minlength=len(GROUPS))
        table[f"{split}_images"] = counts
        table[f"{split}_percent"] = 100 * counts / max(images.size, 1)
    for run, hits in right.items():
        if hits.shape != test.shape:
            raise DuplexError(
                f"{run} has results for {hits.size} images, the test split has {test.size}; evaluate it again"
            )
        counted = np.bincount(groups.groups_of(test), weights=hits, minlength=len(GROUPS))
        images = table["test_images"].to_numpy()
        table[run] = np.divide(100 * counted, images, out=np.full(len(GROUPS), np.nan), where=images > 0)
    return table
