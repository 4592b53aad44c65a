"""Calibration on validation images after training: choose a bias and, for the open world, a feasibility threshold.

The bias is a number added to the scores of unseen compositions; unseen compositions whose feasibility (how plausible
they are) is below the threshold are excluded. Both are stored in the checkpoint; test data has no part in them.

Feasibility comes from word vectors (`duplex.layers.word_feasibility`) or from the likelihood of a method that has one.
By default a threshold is used only if it raises the AUC on unseen validation pairs that had no part in choosing it
(`duplex.evaluation.crossfit`). Calibrations by sources not used are kept in `alternatives`.
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
from duplex.evaluation.confidence import Confidence, fit_probabilities, log_probabilities
from duplex.evaluation.crossfit import largest_clear_gain
from duplex.evaluation.curve import Curve, Margins
from duplex.evaluation.feasibility import FeasibilityValues, is_feasible
from duplex.features.examples import Examples
from duplex.labels import Bools, CandidateSet, LabelSpace, World
from duplex.layers.word_feasibility import Feasibility
from duplex.methods.base import Batch, Method, PrimitiveVectors
from duplex.training.scoring import BLOCK_SCORES, FeasibilityChoice, ScoringTask, choose_feasible, score_split

FeasibilitySource = Literal["words", "likelihood"]
FeasibilityRule = Literal["auto", "words", "likelihood", "none"]  # of `evaluation.feasibility`
FEASIBILITY_SOURCES: tuple[FeasibilitySource, ...] = get_args(FeasibilitySource)
FEWEST_PAIRS = 2  # unseen pairs with validation images that `auto` needs
NUMBERS = ("bias", "threshold", "val_auc_all_feasible", "val_auc_at_threshold", "val_auc_gain", "val_auc_gain_se")
LARGEST_BIAS = 1e6  # beyond it float32 scores of about 1 vanish beside the bias


@dataclass(frozen=True)
class Calibration:
    """Bias on unseen scores and threshold that excludes implausible pairs, for one world, chosen by validation."""

    bias: float  # added to the scores of unseen compositions: maximises the validation harmonic mean
    threshold: float | None = None  # of feasibility; None: every composition is feasible
    val_auc_all_feasible: float | None = None  # percent, without a threshold
    val_auc_at_threshold: float | None = None  # percent
    val_auc_gain: float | None = None  # percent, at thresholds chosen without the pairs that they are measured on
    val_auc_gain_se: float | None = None  # standard error of the gain over unseen pairs
    feasibility_source: FeasibilitySource = "words"
    alternatives: tuple[Calibration, ...] = ()  # choices by other sources, or those that `auto` did not adopt

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            if value is None and name != "bias":
                continue
            limit = LARGEST_BIAS if name == "bias" else sys.float_info.max
            if not isinstance(value, float) or not abs(value) <= limit:
                raise ValueError(f"calibration.{name} is {value!r}; expected a number from {-limit:g} to {limit:g}")
        if self.feasibility_source not in FEASIBILITY_SOURCES:
            known = " or ".join(FEASIBILITY_SOURCES)
            raise ValueError(f"calibration.feasibility_source is {self.feasibility_source!r}; expected {known}")
        if any(other.alternatives for other in self.alternatives):
            raise ValueError("calibration.alternatives has nested alternatives; expected none")

    def to_dict(self) -> dict[str, Any]:
        """Return the calibration as a dictionary for JSON, without fields that have their default values."""
        changed = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        values = {name: value for name, value in vars(self).items() if name in changed}
        others = [other.to_dict() for other in self.alternatives]
        return {**values, "alternatives": others} if others else values

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Calibration:
        """Return the calibration in a JSON record of unknown origin; raise `ValueError` or `TypeError` if invalid."""
        values: dict[str, Any] = {
            name: float(value) if type(value) is int else value for name, value in dict(record).items()
        }
        return cls(**{**values, "alternatives": tuple(map(cls.from_dict, values.get("alternatives", ())))})


def calibrate(
    method: Method[Any],
    val: Examples,
    labels: LabelSpace,
    world: World,
    words: PrimitiveVectors | None,
    points: int,
    rule: FeasibilityRule = "auto",
) -> Calibration:
    """Return the `Calibration` (bias on unseen pairs, feasibility threshold) chosen in one pass over validation images.

    val: validation images.
    words: word vectors, from which feasibility (how plausible a composition is) is computed.
    points: number of thresholds tried.
    rule: source of feasibility whose threshold is used. "words" or "likelihood" (words for methods without one) use the
        threshold with the best validation AUC. "auto" uses a threshold only if its cross-fitted gain (gain in AUC on
        pairs that had no part in choosing it) exceeds twice its standard error; of two sources, the one with the larger
        gain. "none" uses no threshold.
    """
    task = ScoringTask.of(method, CandidateSet.of(labels, world, "val"))
    sources: dict[FeasibilitySource, FeasibilityValues] = {}
    if world == "open" and rule != "none" and not (rule == "auto" and unseen_pairs(val, labels) < FEWEST_PAIRS):
        both = feasibility_by_words(labels, words), feasibility_by_likelihood(method)
        sources = {name: values for name, values in zip(FEASIBILITY_SOURCES, both, strict=True) if values is not None}
    if not sources:
        return Calibration(best_bias(Margins.of(score_split(task, val, labels).accumulator.competitors())))
    choices = choose_feasible(task, val, labels, list(sources.values()), points)
    calibrations = {source: _at_threshold(choice, source) for source, choice in zip(sources, choices, strict=True)}
    used: FeasibilitySource | None = "likelihood" if rule == "likelihood" and "likelihood" in sources else "words"
    if rule == "auto":
        place = largest_clear_gain([choice.threshold.gain for choice in choices])
        used = None if place is None else list(sources)[place]
    chosen = calibrations.pop(used, None) if used is not None else None
    if chosen is None:
        chosen = Calibration(best_bias(choices[0].margins_all))
    return replace(chosen, alternatives=tuple(calibrations.values()))


def _at_threshold(choice: FeasibilityChoice, source: FeasibilitySource) -> Calibration:
    """Return the `Calibration` (bias, threshold) chosen for one source of feasibility, word vectors or likelihood."""
    threshold, gain = choice.threshold, choice.threshold.gain
    error = None if gain.standard_error is None else 100 * gain.standard_error
    aucs = 100 * float(threshold.auc[0]), 100 * float(threshold.auc.max()), 100 * gain.value
    return Calibration(best_bias(choice.margins), threshold.value, *aucs, error, source)


def unseen_pairs(val: Examples, labels: LabelSpace) -> int:
    """Return the number of unseen compositions with validation images."""
    compositions = np.unique(val.compositions.cpu().numpy())
    return int((~labels.is_seen(compositions)).sum())


def feasibility_by_words(labels: LabelSpace, words: PrimitiveVectors | None) -> Feasibility | None:
    """Return the plausibility of compositions by word vectors; None without word vectors or unseen compositions."""
    if words is None or len(labels.pairs["train"]) == labels.size:
        return None
    return Feasibility(words.states.cpu().numpy(), words.objects.cpu().numpy(), labels)


def feasibility_by_likelihood(method: Method[Any]) -> Floats | None:
    """Return how plausible each composition is [M*N] by the method's likelihood, +inf for seen compositions.

    None if the method has no likelihood or no composition is unseen. Raises `DuplexError` for likelihoods of a wrong
    shape or that are not finite.
    """
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
    """Return the mask [M*N] of compositions whose feasibility (plausibility) reaches the threshold of `calibration`.

    None if all compositions are feasible. `words`: word vectors, from which feasibility may be computed.
    """
    if calibration.threshold is None:
        return None
    feasible: FeasibilityValues | None
    if calibration.feasibility_source == "words":
        feasible = feasibility_by_words(method.labels, words)
    else:
        feasible = feasibility_by_likelihood(method)
    return None if feasible is None else is_feasible(feasible, calibration.threshold)


def best_bias(margins: Margins) -> float:
    """Return the bias on unseen scores that maximises the harmonic mean of seen and unseen accuracy.

    margins: the bias at which each validation image becomes right or wrong.
    """
    curve = Curve.of(margins)
    bias = curve.bias(int(np.argmax(curve.harmonic)))
    if not abs(bias) <= LARGEST_BIAS:
        raise DuplexError(
            f"the scores are so large that the best bias is {bias:.3g}; expected at most {LARGEST_BIAS:,.0f} in size: "
            "scale the method's scores"
        )
    return bias


def fit_confidence(method: Method[Any], val: Examples, labels: LabelSpace) -> Confidence:
    """Fit the two numbers that turn a method's scores into probabilities: a temperature and log-odds of unseen pairs.

    Log probabilities are divided by the temperature; the log-odds are added to those of pairs without training images.
    Both are fitted on validation images, among the candidates of the closed world. Of many images, evenly spaced ones
    are used, as many as can be scored at once in memory: enough for two numbers.
    """
    candidates = labels.candidates("closed", "val")
    images = len(val.rows)
    rows = np.linspace(0, images - 1, min(images, max(1, BLOCK_SCORES // len(candidates)))).astype(int)
    chosen = Batch(val.inputs, val.compositions)[torch.from_numpy(rows)]
    with torch.no_grad():
        scores = method.eval().scorer(candidates.copy())(chosen.inputs)
        log_p = log_probabilities(method.probabilities, scores).cpu()
    if not log_p.isfinite().all():
        raise DuplexError(
            f"{method.class_name}.probabilities() gives NaN or infinity for validation images; check its scores"
        )
    target = np.searchsorted(candidates, chosen.compositions_np)
    return fit_probabilities(log_p, target, labels.is_seen(candidates))
