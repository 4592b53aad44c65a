"""What validation chooses after training, so that a user need not: a bias on unseen compositions, and in the open world
the feasibility threshold. Both go into the checkpoint; test data has no part in them.

How feasible a composition is, words say (`duplex.layers.word_feasibility`), and the likelihood of a method that has one. One of
the two decides; where there are both, what the other would decide is kept beside it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from duplex.errors import DuplexError
from duplex.evaluation.accumulator import Floats
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.feasibility import Feasible
from duplex.evaluation.feasibility import passing as let_through
from duplex.features.examples import Examples
from duplex.labels import Bools, LabelSpace, Target, World
from duplex.layers.word_feasibility import Feasibility
from duplex.methods.base import Method, Words
from duplex.training.scoring import Field, assess, choose_feasible

Judge = Literal["words", "likelihood"]
JUDGES: tuple[Judge, ...] = get_args(Judge)


@dataclass(frozen=True)
class Calibration:
    """One world's choices."""

    bias: float  # added to unseen compositions: where validation's best HM lies
    threshold: float | None = None  # of feasibility; None where every composition counts
    val_auc_all_feasible: float | None = None  # percent
    val_auc_at_threshold: float | None = None
    judge: Judge = "words"  # who says how feasible a composition is
    beside: Calibration | None = None  # by the other judge, where there are two

    def to_dict(self) -> dict[str, Any]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        told = {field.name for field in fields(self) if found[field.name] != field.default}
        nested = {} if self.beside is None else {"beside": self.beside.to_dict()}
        return {name: found[name] for name in found if name in told} | nested

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Calibration:
        beside = values.get("beside")
        return cls(**{**values, "beside": None if beside is None else cls.from_dict(beside)})


def calibrate(
    method: Method[Any],
    val: Examples,
    labels: LabelSpace,
    world: World,
    words: Words | None,
    points: int,
    judge: Judge = "words",
) -> Calibration:
    """One pass over validation images, or two for each judge of feasibility. A method without a likelihood leaves
    feasibility to words whoever is asked."""
    field = Field.of(method, Target.of(labels, world, "val"))
    judged: dict[Judge, Feasible | None] = {}
    if world == "open":
        judged = {"words": plausible(labels, words), "likelihood": likely(method)}
    found = {
        name: _under(field, val, labels, feasible, points, name)
        for name, feasible in judged.items()
        if feasible is not None
    }
    own = found.pop(judge if judge in found else "words", None)
    if own is None:
        own = Calibration(best_bias(Margins.of(assess(field, val, labels).evidence.rivals())))
    return replace(own, beside=next(iter(found.values()), None))


def _under(
    field: Field, val: Examples, labels: LabelSpace, feasible: Feasible, points: int, judge: Judge
) -> Calibration:
    chosen, live = choose_feasible(field, val, labels, feasible, points)
    rivals = assess(field, val, labels, feasible_mask=live).evidence.rivals()
    aucs = 100 * float(chosen.auc[0]), 100 * float(chosen.auc.max())
    return Calibration(best_bias(Margins.of(rivals)), chosen.value, *aucs, judge=judge)


def plausible(labels: LabelSpace, words: Words | None) -> Feasibility | None:
    """Feasibility of every composition; None where there are no words, or nothing is unseen."""
    if words is None or len(labels.pairs["train"]) == labels.size:
        return None
    return Feasibility(words.states.cpu().numpy(), words.objects.cpu().numpy(), labels)


def likely(method: Method[Any]) -> Floats | None:
    """The same by the method's own likelihood; None where it has none, or nothing is unseen."""
    labels = method.labels
    found = None if len(labels.pairs["train"]) == labels.size else method.likelihood()
    if found is None:
        return None
    values: Floats = found.detach().to("cpu", torch.float64, copy=True).numpy()
    if values.shape != (labels.size,) or not np.isfinite(values).all():
        raise DuplexError(
            f"the likelihood of {type(method).__name__} has the shape {values.shape} or is not finite; it gives a "
            f"finite number for each of the {labels.size} compositions"
        )
    values[labels.pairs["train"]] = np.inf
    return values


def passing(method: Method[Any], words: Words | None, calibration: Calibration) -> Bools | None:
    """Compositions [M*N] that a calibration of the method lets through; None: all."""
    if calibration.threshold is None:
        return None
    feasible = plausible(method.labels, words) if calibration.judge == "words" else likely(method)
    return None if feasible is None else let_through(feasible, calibration.threshold)


def best_bias(margins: Margins) -> float:
    """Where the harmonic mean is best."""
    curve = Curve.of(margins)
    return curve.bias(int(np.argmax(curve.harmonic)))
