"""Validation after each epoch, and the metric that chooses the epoch whose tensors are kept."""

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
    """Callable that validates a method in the closed world and returns metrics by name; the last chooses the epoch.

    examples: validation images.
    name: name of the metric that chooses the epoch, such as "auc" or "hm".
    choose_by: the caller's function that computes this metric from seen and unseen accuracy, HM and AUC; None: `name`
        is "auc" or "hm".
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
            "seen": float(curve.seen_accuracies[0]),  # S, at a bias of -inf
            "unseen": float(curve.unseen_accuracies[-1]),  # U, at a bias of +inf
            "hm": float(curve.harmonic.max()),
            "auc": auc,
        }
        value: Any = metrics[self.name] if self.choose_by is None else self.choose_by(metrics)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise DuplexError(f"select: {self.name} returned {value!r} for {metrics}; expected a finite number")
        return {"auc": auc, self.name: float(value)}


def metric_name(choose_by: ChooseBy) -> str:
    """Return the name of a caller's metric in the training history: its function's name if usable, else 'selection'."""
    name = getattr(choose_by, "__name__", "")
    return name if name.isidentifier() and name not in ("auc", "hm") else "selection"
