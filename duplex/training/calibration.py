"""Calibration on validation images after training: choose a bias on unseen compositions and, in the open world, a
feasibility threshold. Both are stored in the checkpoint; test data has no part in them.

Feasibility comes from word vectors (`duplex.layers.word_feasibility`) or from the likelihood of a method that has one.
One of these sources is used; where both exist, the values by the other source are kept as `alternative`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from duplex.errors import DuplexError
from duplex.evaluation.accumulator import Floats
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.feasibility import FeasibilityValues, is_feasible
from duplex.features.examples import Examples
from duplex.labels import Bools, CandidateSet, LabelSpace, World
from duplex.layers.word_feasibility import Feasibility
from duplex.methods.base import Method, PrimitiveVectors
from duplex.training.scoring import ScoringTask, assess, choose_feasible

FeasibilitySource = Literal["words", "likelihood"]
FEASIBILITY_SOURCES: tuple[FeasibilitySource, ...] = get_args(FeasibilitySource)
LARGEST_BIAS = 1e6  # beyond it float32 scores of about 1 vanish beside the bias


@dataclass(frozen=True)
class Calibration:
    """Bias and feasibility threshold for one world, chosen on validation images."""

    bias: float  # added to the scores of unseen compositions: maximises the validation harmonic mean
    threshold: float | None = None  # of feasibility; None: every composition is feasible
    val_auc_all_feasible: float | None = None  # percent, without a threshold
    val_auc_at_threshold: float | None = None  # percent
    feasibility_source: FeasibilitySource = "words"
    alternative: Calibration | None = None  # by the other source, if there are two

    def __post_init__(self) -> None:
        for name in ("bias", "threshold", "val_auc_all_feasible", "val_auc_at_threshold"):
            value = getattr(self, name)
            if value is None and name != "bias":
                continue
            limit = LARGEST_BIAS if name == "bias" else sys.float_info.max
            if not isinstance(value, float) or not abs(value) <= limit:
                raise ValueError(f"calibration.{name} is {value!r}; expected a number from {-limit:g} to {limit:g}")
        if self.feasibility_source not in FEASIBILITY_SOURCES:
            known = " or ".join(FEASIBILITY_SOURCES)
            raise ValueError(f"calibration.feasibility_source is {self.feasibility_source!r}; expected {known}")
        if self.alternative is not None and self.alternative.alternative is not None:
            raise ValueError("calibration.alternative has a nested alternative; expected none")

    def to_dict(self) -> dict[str, Any]:
        """Return the calibration's fields that differ from their defaults."""
        changed = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        values = {name: value for name, value in vars(self).items() if name in changed}
        return values if self.alternative is None else {**values, "alternative": self.alternative.to_dict()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Calibration:
        """Read a calibration from JSON of unknown origin; raise `ValueError` or `TypeError` for invalid values."""
        values: dict[str, Any] = {
            name: float(value) if type(value) is int else value for name, value in dict(record).items()
        }
        other = values.pop("alternative", None)
        return cls(**values, alternative=None if other is None else cls.from_dict(other))


def calibrate(
    method: Method[Any],
    val: Examples,
    labels: LabelSpace,
    world: World,
    words: PrimitiveVectors | None,
    points: int,
    feasibility_source: FeasibilitySource = "words",
) -> Calibration:
    """Choose bias and feasibility threshold in one pass over validation images, or two per source of feasibility.

    `points`: number of thresholds tried. Methods without likelihood use words, whatever `feasibility_source` is.
    """
    task = ScoringTask.of(method, CandidateSet.of(labels, world, "val"))
    sources: dict[FeasibilitySource, FeasibilityValues | None] = {}
    if world == "open":
        sources = {"words": feasibility_by_words(labels, words), "likelihood": feasibility_by_likelihood(method)}
    choices: dict[str, Calibration] = {}
    for source, feasible in sources.items():
        if feasible is not None:
            threshold, mask = choose_feasible(task, val, labels, feasible, points)
            margins = Margins.of(assess(task, val, labels, feasible_mask=mask).accumulator.competitors())
            aucs = 100 * float(threshold.auc[0]), 100 * float(threshold.auc.max())
            choices[source] = Calibration(best_bias(margins), threshold.value, *aucs, feasibility_source=source)
    chosen = choices.pop(feasibility_source if feasibility_source in choices else "words", None)
    if chosen is None:
        chosen = Calibration(best_bias(Margins.of(assess(task, val, labels).accumulator.competitors())))
    return replace(chosen, alternative=next(iter(choices.values()), None))


def feasibility_by_words(labels: LabelSpace, words: PrimitiveVectors | None) -> Feasibility | None:
    """Return the feasibility of every composition from word vectors; None without vectors or unseen compositions."""
    if words is None or len(labels.pairs["train"]) == labels.size:
        return None
    return Feasibility(words.states.cpu().numpy(), words.objects.cpu().numpy(), labels)


def feasibility_by_likelihood(method: Method[Any]) -> Floats | None:
    """Return the feasibility [M*N] from the method's likelihood, +inf for seen compositions; None without one."""
    labels = method.labels
    likelihood = None if len(labels.pairs["train"]) == labels.size else method.likelihood()
    if likelihood is None:
        return None
    values: Floats = likelihood.detach().to("cpu", torch.float64, copy=True).numpy()
    if values.shape != (labels.size,) or not np.isfinite(values).all():
        raise DuplexError(
            f"the likelihood of {type(method).__name__} has the shape {values.shape} or is not finite; expected a "
            f"finite number for each of the {labels.size} compositions"
        )
    values[labels.pairs["train"]] = np.inf
    return values


def feasible_compositions(
    method: Method[Any], words: PrimitiveVectors | None, calibration: Calibration
) -> Bools | None:
    """Return the mask [M*N] of compositions whose feasibility reaches the threshold; None if all are feasible."""
    if calibration.threshold is None:
        return None
    feasible: FeasibilityValues | None
    if calibration.feasibility_source == "words":
        feasible = feasibility_by_words(method.labels, words)
    else:
        feasible = feasibility_by_likelihood(method)
    return None if feasible is None else is_feasible(feasible, calibration.threshold)


def best_bias(margins: Margins) -> float:
    """Return the bias that maximises the harmonic mean of seen and unseen accuracy."""
    curve = Curve.of(margins)
    bias = curve.bias(int(np.argmax(curve.harmonic)))
    if not abs(bias) <= LARGEST_BIAS:
        raise DuplexError(
            f"the scores are so large that the best bias is {bias:.3g}; expected at most {LARGEST_BIAS:,.0f} in size: "
            "scale the method's scores"
        )
    return bias
