"""Validation of each epoch, and the metric among its results that chooses the epoch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from duplex.errors import DuplexError
from duplex.evaluation.curve import Curve
from duplex.features.examples import Examples
from duplex.labels import LabelSpace
from duplex.methods.base import Method
from duplex.training.scoring import defined_auc, validation_margins

ChooseBy = Callable[[Mapping[str, float]], float]  # seen, unseen, hm and auc as fractions -> number to maximise


@dataclass(frozen=True)
class Validation:
    """Callable that returns the closed-world validation metrics of a method which its history keeps.

    `name` is that of the metric that chooses the epoch; `choose_by` computes it where it is the caller's own.
    """

    examples: Examples
    labels: LabelSpace
    name: str = "auc"
    choose_by: ChooseBy | None = None

    def __call__(self, method: Method[Any]) -> dict[str, float]:
        margins = validation_margins(method, self.examples, self.labels)
        auc = defined_auc(margins)
        if self.name == "auc":
            return {"auc": auc}
        curve = Curve.of(margins)
        metrics = {
            "seen": float(curve.seen_accuracy[0]),  # S, at a bias of -inf
            "unseen": float(curve.unseen_accuracy[-1]),  # U, at a bias of +inf
            "hm": float(curve.harmonic.max()),
            "auc": auc,
        }
        value: Any = metrics[self.name] if self.choose_by is None else self.choose_by(metrics)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise DuplexError(f"select: {self.name} returned {value!r} for {metrics}; expected a finite number")
        return {"auc": auc, self.name: float(value)}


def metric_name(choose_by: ChooseBy) -> str:
    """Return the name under which a history keeps the results of a caller's own metric."""
    name = getattr(choose_by, "__name__", "")
    return name if name.isidentifier() and name not in ("auc", "hm") else "selection"
