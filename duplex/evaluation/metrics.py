"""The numbers of one run in one world: S, U, best HM and AUC with intervals, state and object accuracy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from duplex.evaluation.accumulator import Rivals
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.uncertainty import ROUNDS, Components, Interval, bootstrap, percentiles

AS_THEY_ARE = {"k", "bias", "images_seen", "images_unseen"}


@dataclass(frozen=True)
class Metrics:
    """Fractions; `to_dict` gives percent. None where the images do not define a number (docs/metrics.md)."""

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
    bias: float | None = None  # where the best HM is reached; in units of the scores
    state_accuracy: float | None = None  # of the prediction at b = 0
    object_accuracy: float | None = None
    tied: float | None = None  # images whose label ties with the best of its own group, and is wrong for that alone

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, accuracies in percent."""
        return {field.name: _percent(field.name, getattr(self, field.name)) for field in fields(self)}


def _percent(name: str, value: Any) -> Any:
    if value is None or name in AS_THEY_ARE:
        return value
    return [100 * end for end in value] if isinstance(value, tuple) else 100 * value


def measure(
    rivals: Rivals,
    k: int = 1,
    *,
    states: ArrayLike | None = None,
    objects: ArrayLike | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Metrics:
    """All metrics of a pass. `states`, `objects` [C] are the columns' primitives; `rounds=0`: no bootstrap."""
    margins = Margins.of(rivals, k)
    curve, parts = Curve.of(margins), Components.of(margins)
    draws = bootstrap([margins], rounds, seed)[0]  # [rounds, 3]
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
        state_accuracy=_part_accuracy(rivals, states),
        object_accuracy=_part_accuracy(rivals, objects),
        tied=_tied(rivals, k),
    )


def _part_accuracy(rivals: Rivals, names: ArrayLike | None) -> float | None:
    if names is None:
        return None
    name, predicted = np.asarray(names), rivals.prediction()
    return float(((predicted >= 0) & (name[predicted] == name[rivals.target])).mean())


def _tied(rivals: Rivals, k: int) -> float:
    own = np.where(rivals.is_seen[:, None], rivals.seen, rivals.unseen)
    return float(((own[:, k - 1] == rivals.label) & (rivals.label > -np.inf)).mean())
