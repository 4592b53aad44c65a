"""What validation chooses after training, so that a user need not: a bias on unseen compositions, and in the open world
the feasibility threshold. Both go into the checkpoint; test data has no part in them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from duplex.assessment import Field, assess, choose_feasible
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.feasibility import passing as let_through
from duplex.feasibility import Feasibility
from duplex.features.examples import Examples
from duplex.labels import Bools, LabelSpace, Target, World
from duplex.methods.base import Method, Words


@dataclass(frozen=True)
class Calibration:
    """One world's choices."""

    bias: float  # added to unseen compositions: where validation's best HM lies
    threshold: float | None = None  # of feasibility; None where every composition counts
    val_auc_all_feasible: float | None = None  # percent
    val_auc_at_threshold: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def calibrate(
    method: Method[Any], val: Examples, labels: LabelSpace, world: World, words: Words | None, points: int
) -> Calibration:
    """One pass over validation images; a second one where a threshold was chosen."""
    field = Field.of(method, Target.of(labels, world, "val"))
    feasible = plausible(labels, words) if world == "open" else None
    if feasible is None:
        return Calibration(best_bias(Margins.of(assess(field, val, labels).evidence.rivals())))
    chosen, live = choose_feasible(field, val, labels, feasible, points)
    rivals = assess(field, val, labels, live=live).evidence.rivals()
    return Calibration(
        best_bias(Margins.of(rivals)), chosen.value, 100 * float(chosen.auc[0]), 100 * float(chosen.auc.max())
    )


def plausible(labels: LabelSpace, words: Words | None) -> Feasibility | None:
    """Feasibility of every composition; None where there are no words, or nothing is unseen."""
    if words is None or len(labels.pairs["train"]) == labels.size:
        return None
    return Feasibility(words.states.cpu().numpy(), words.objects.cpu().numpy(), labels)


def passing(labels: LabelSpace, words: Words | None, calibration: Calibration) -> Bools | None:
    """Compositions [M*N] that a calibration lets through; None: all."""
    if calibration.threshold is None:
        return None
    feasible = plausible(labels, words)
    return None if feasible is None else let_through(feasible, calibration.threshold)


def best_bias(margins: Margins) -> float:
    """Where the harmonic mean is best."""
    curve = Curve.of(margins)
    return curve.bias(int(np.argmax(curve.harmonic)))
