"""Evaluate a trained method on one split in the closed or the open world."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from duplex.config.params import EvaluationParams
from duplex.errors import UsageError
from duplex.evaluation.curve import Curve, Margins, harmonic_mean
from duplex.evaluation.metrics import (
    METRICS,
    Metrics,
    group_table,
    measure,
    sampled_from_margins,
    vocabulary_accuracies,
)
from duplex.features.tokens import Examples
from duplex.labels import Bools, LabelSpace, World, frequency_groups
from duplex.methods.base import Method
from duplex.training.checkpoint import TrainingRecord
from duplex.training.inputs import RunInputs
from duplex.training.scoring import (
    Calibration,
    ScoringResult,
    SplitScorer,
    feasible_compositions,
    score_split,
    term_sum_statistics,
)

FEASIBILITY_METRICS = ("unseen", "hm", "auc", "auc_low", "auc_high")  # which feasibility changes


@dataclass(frozen=True)
class WorldResult:
    """A method's metrics, seen–unseen curve and predictions in one world, closed or open."""

    metrics: dict[str, Any]
    margins: Margins
    curve: pd.DataFrame
    predictions: pd.DataFrame
    right: Bools  # [test images] whether the best candidate is the label, at bias 0
    right_at_ends: Bools  # [test images] the same among candidates of the label's own group


def calibration_for(record: TrainingRecord, world: World, place: object) -> Calibration:
    """The calibration of the run `place` for a world; raises `UsageError` if it has none."""
    calibration = (record.calibration or {}).get(world)
    if calibration is None:
        raise UsageError(f'{place} was not trained for the {world} world; train it again with `world="{world}"`')
    return calibration


def evaluate_world(
    method: Method[Any],
    inputs: RunInputs,
    settings: EvaluationParams,
    world: World,
    calibration: Calibration,
    split: str = "test",
    task: SplitScorer | None = None,
) -> WorldResult:
    """Evaluate a method on one split in one world; `task` (such as a `StreamScorer`) may replace it."""
    labels = inputs.labels
    test = inputs.examples[split]
    task = task or SplitScorer.of(method, labels.candidates(world, split))
    words = inputs.words if world == "open" else None
    feasible_mask = feasible_compositions(method, words, calibration)
    excluded: list[Bools] = []
    if world == "open":
        nothing = np.zeros(len(task.candidates), dtype=bool)
        masks = [feasible_compositions(method, words, other) for other in calibration.alternatives]
        excluded = [nothing, *(nothing if mask is None else ~mask for mask in masks)]
    result = score_split(
        task,
        test,
        labels,
        k=max(settings.k),
        feasible_mask=feasible_mask,
        top=3,
        bias=calibration.bias,
        further=excluded,
    )
    competitors = result.accumulator.competitors()
    margins = Margins.of(competitors)
    compositions = result.candidates.compositions
    states, objects = labels.state_of(compositions), labels.object_of(compositions)
    measured = partial(measure, competitors, states=states, objects=objects, rounds=settings.bootstrap)
    further = {f"top_{k}": flatten(measured(k)) for k in settings.k if k != 1}
    metrics: dict[str, Any] = {**flatten(measured(1)), **further}
    metrics["sampled"] = _sampled_headline(margins)
    metrics |= metrics_at_bias(margins, calibration.bias)
    if not all(mask.all() for mask in labels.trained_words) and "bias" in metrics:
        biases = {"vocabulary": metrics["bias"], "vocabulary_at_val_bias": calibration.bias}
        for name, bias in biases.items():
            metrics[name] = vocabulary_accuracies(competitors, bias, states, objects, labels.trained_words)
    if feasible_mask is not None:
        metrics |= _feasibility(calibration, int(feasible_mask.sum()))
    if world == "open":
        everywhere = flatten(measure(result.further[0].competitors(), rounds=0))
        for end in ("", "_low", "_high"):
            if f"auc{end}" in everywhere:
                metrics[f"auc_all{end}"] = everywhere[f"auc{end}"]
        metrics |= _with_alternatives(result, excluded, calibration)
    return WorldResult(
        metrics,
        margins,
        Curve.of(margins).table().assign(world=world),
        _predictions(result, margins, test, labels, inputs.manifest, calibration.bias).assign(world=world),
        margins.right(0.0),
        np.where(margins.is_seen, margins.right(-np.inf), margins.right(np.inf)),
    )


def _feasibility(calibration: Calibration, feasible: int) -> dict[str, Any]:
    validation = {key: value for key, value in calibration.to_dict().items() if key.startswith("val_")}
    return {"threshold": calibration.threshold, "feasible": feasible, **validation}


def _with_alternatives(result: ScoringResult, excluded: list[Bools], calibration: Calibration) -> dict[str, Any]:
    records: dict[str, Any] = {}
    for other, mask, accumulator in zip(calibration.alternatives, excluded[1:], result.further[1:], strict=True):
        competitors = accumulator.competitors(1)
        metrics = flatten(measure(competitors, rounds=0))
        records["words"] = {
            **{name: metrics[name] for name in FEASIBILITY_METRICS if name in metrics},
            "sampled": _sampled_headline(Margins.of(competitors)),
            **_feasibility(other, int((~mask).sum())),
        }
    return records


def metrics_at_bias(margins: Margins, bias: float) -> dict[str, float]:
    """Seen and unseen accuracy and their harmonic mean in percent, at validation's bias."""
    ends = [float(np.mean(right)) for right in (bias < margins.seen, bias > margins.unseen) if right.size]
    record = {"val_bias": bias}
    if len(ends) == 2:
        seen, unseen = ends
        hm = float(harmonic_mean(np.array(seen), np.array(unseen)))
        at_bias = {"seen": seen, "unseen": unseen, "hm": hm}
        record |= {f"{name}_at_val_bias": 100 * value for name, value in at_bias.items()}
    return record


def _sampled_headline(margins: Margins) -> dict[str, float]:
    metrics = flatten(sampled_from_margins(margins))
    return {name: metrics[name] for name in METRICS if name in metrics}


def flatten(metrics: Metrics) -> dict[str, Any]:
    """Metrics as a flat dict; an interval becomes two numbers, as DVC ignores lists."""
    record: dict[str, Any] = {}
    for key, value in metrics.to_dict().items():
        if value is not None and key.endswith("_interval"):
            name = key.removesuffix("_interval")
            record[f"{name}_low"], record[f"{name}_high"] = value
        elif value is not None:
            record[key] = value
    return record


def frequency_accuracies(result: WorldResult, inputs: RunInputs) -> dict[str, dict[str, float]]:
    """Closed-world accuracies (%) by group: head, medium, tail (by training images), unseen.

    `accuracy`: at bias 0 with all candidates; `accuracy_at_ends`: only seen candidates (for unseen
    pairs, only unseen).
    """
    train = inputs.examples["train"].compositions.cpu().numpy()
    train = train[train >= 0]
    test = inputs.examples["test"].compositions.cpu().numpy()
    groups = frequency_groups(train, inputs.labels.size)
    right = {"accuracy": result.right, "accuracy_at_ends": result.right_at_ends}
    table = group_table(groups, train, test, right).set_index("group")
    return {
        str(group): {str(key): float(value) for key, value in row.items() if not np.isnan(value)}
        for group, row in table.iterrows()
    }


def term_metrics(method: Method[Any], inputs: RunInputs) -> dict[str, dict[str, Any]]:
    """Closed-world metrics of each score term and sums of some: keys `terms_visual+semantic`."""
    labels = inputs.labels
    test = inputs.examples["test"]
    sums = term_sum_statistics(method, labels.candidates("closed", "test"), test, labels)
    records = {}
    for names, accumulator in sums.items():
        metrics = flatten(measure(accumulator.competitors(), rounds=0))
        records[f"terms_{'+'.join(names)}"] = {key: metrics[key] for key in METRICS if key in metrics}
    return records


def _predictions(
    result: ScoringResult, margins: Margins, test: Examples, labels: LabelSpace, manifest: pd.DataFrame, bias: float
) -> pd.DataFrame:
    margin = np.empty(len(test))
    margin[margins.is_seen] = margins.seen
    margin[~margins.is_seen] = margins.unseen
    return pd.DataFrame(
        {
            "row": test.rows,
            "image": manifest["image"].to_numpy()[test.rows],
            "label": labels.names(test.compositions.cpu().numpy()),
            "seen": margins.is_seen.astype(int),
            "right": margins.right(bias).astype(int),
            "margin": margin,
            **{f"top{place + 1}": labels.names(result.top[:, place]) for place in range(result.top.shape[1])},
        }
    )
