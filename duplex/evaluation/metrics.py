"""Metrics of one run in one world: S, U, best HM and AUC with intervals, state and object accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from duplex.evaluation.accumulator import TopCompetitors
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.uncertainty import ROUNDS, Components, Interval, bootstrap, percentiles

NO_PERCENTAGES = {"k", "bias", "images_seen", "images_unseen"}


@dataclass(frozen=True)
class Metrics:
    """Metrics as fractions (`to_dict`: percent); None where the images leave a number undefined (docs/metrics.md)."""

    k: int
    images_seen: int
    images_unseen: int
    seen: float | None  # S: seen accuracy at b = -inf
    unseen: float | None  # U: unseen accuracy at b = +inf
    hm: float | None  # best harmonic mean on the curve
    auc: float | None
    seen_interval: Interval | None = None  # 95 %
    unseen_interval: Interval | None = None
    hm_interval: Interval | None = None
    auc_interval: Interval | None = None
    bias: float | None = None  # at which HM is reached, in units of the scores
    state_accuracy: float | None = None  # of the prediction at b = 0
    object_accuracy: float | None = None
    tied: float | None = None  # share of images that are wrong only because the label ties with the best of its group

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, accuracies in percent."""
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
    """Return all metrics of score statistics at top-`k`.

    `states`, `objects` [C]: state and object of each column, for their accuracies. `rounds`: of the bootstrap over
    images that gives the intervals of S, U and HM (0: none), started from `seed`.
    """
    margins = Margins.of(competitors, k)
    curve, parts = Curve.of(margins), Components.of(margins)
    draws = bootstrap([margins], rounds, seed)[0]  # [rounds, 3]
    own_group = np.where(competitors.is_seen[:, None], competitors.seen, competitors.unseen)
    tied = own_group[:, k - 1] == competitors.label
    best = int(curve.harmonic.argmax()) if margins.seen.size and margins.unseen.size else None
    return Metrics(
        k=k,
        images_seen=margins.seen.size,
        images_unseen=margins.unseen.size,
        seen=float(curve.seen_accuracy[0]) if margins.seen.size else None,
        unseen=float(curve.unseen_accuracy[-1]) if margins.unseen.size else None,
        hm=None if best is None else float(curve.harmonic[best]),
        auc=parts.auc,
        seen_interval=percentiles(draws[:, 0]),
        unseen_interval=percentiles(draws[:, 1]),
        hm_interval=percentiles(draws[:, 2]),
        auc_interval=parts.interval,
        bias=None if best is None else curve.bias(best),
        state_accuracy=_primitive_accuracy(competitors, states),
        object_accuracy=_primitive_accuracy(competitors, objects),
        tied=float((tied & (competitors.label > -np.inf)).mean()),
    )


def _primitive_accuracy(competitors: TopCompetitors, names: ArrayLike | None) -> float | None:
    if names is None:
        return None
    name, predicted = np.asarray(names), competitors.predictions()
    return float(((predicted >= 0) & (name[predicted] == name[competitors.target])).mean())
