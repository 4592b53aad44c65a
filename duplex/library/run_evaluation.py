"""Evaluate a trained method on one split: the code that `duplex.evaluate` and the pipeline stage `evaluate` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from duplex.config.params import EvaluationParams
from duplex.errors import UsageError
from duplex.evaluation.accumulator import TopCompetitors
from duplex.evaluation.curve import Curve, Margins, harmonic_mean
from duplex.evaluation.metrics import Metrics, group_table, measure
from duplex.evaluation.sampled import sampled_metrics
from duplex.features.examples import Examples
from duplex.labels import Bools, LabelSpace, World, frequency_groups
from duplex.library.inputs import RunInputs
from duplex.methods.base import Method, PrimitiveVectors
from duplex.metric_table import METRICS
from duplex.training.calibration import Calibration, feasible_compositions
from duplex.training.checkpoint import Record
from duplex.training.scoring import ScoringResult, ScoringTask, score_split, score_term_sums

FEASIBILITY_METRICS = ("unseen", "hm", "auc", "auc_low", "auc_high")  # seen accuracy does not depend on feasibility


@dataclass(frozen=True)
class WorldResult:
    """Result of evaluating a method in one world, closed or open: metrics, seen–unseen curve and predictions."""

    metrics: dict[str, Any]
    margins: Margins
    curve: pd.DataFrame
    predictions: pd.DataFrame
    right: Bools  # [test images] whether the best candidate is the label, at bias 0
    right_at_ends: Bools  # [test images] the same with only seen candidates for seen images, only unseen for unseen


def calibration_for(record: Record, world: World, place: object) -> Calibration:
    """Return the bias and feasibility threshold that a run's validation chose for a world, closed or open.

    Raises `UsageError` if the run was not trained for that world.

    record: metadata of the run's checkpoint.
    place: name of the run for the message.
    """
    calibration = (record.calibration or {}).get(world)
    if calibration is None:
        raise UsageError(f"{place} was not trained for the {world} world; train again, or change `world` of the method")
    return calibration


def evaluate_world(
    method: Method[Any],
    inputs: RunInputs,
    settings: EvaluationParams,
    world: World,
    calibration: Calibration,
    split: str = "test",
) -> WorldResult:
    """Return a method's metrics, curve and predictions on one split in one world, closed or open.

    In the open world, compositions below the feasibility threshold chosen on validation data score -inf, if there is
    one; the metric `auc_all` is the AUC with every composition a candidate.

    inputs: data set with the split's features on the method's device.
    calibration: bias and threshold that validation chose.
    """
    labels, test = inputs.labels, inputs.examples[split]
    task = ScoringTask.of(method, labels.candidates(world, split))
    words = inputs.words if world == "open" else None
    feasible_mask = feasible_compositions(method, words, calibration)
    excluded = _excluded(task, method, words, calibration) if world == "open" else []
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
    metrics = _metrics(result, competitors, labels, settings)
    if settings.protocol == "sampled":
        exact = {name: metrics[name] for name in ("state_accuracy", "object_accuracy")}
        metrics = {**_sampled(task, test, result, feasible_mask, settings), **exact}
    metrics |= metrics_at_bias(margins, calibration.bias)
    if feasible_mask is not None:
        metrics |= _feasibility(calibration, int(feasible_mask.sum()))
        metrics |= {"by_likelihood": 1} if calibration.feasibility_source == "likelihood" else {}
    if world == "open":
        metrics |= _auc_all(task, test, result, settings)
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
    """Return how implausible compositions are excluded: threshold, number of compositions left, validation AUCs.

    feasible: number of compositions above the threshold.
    """
    validation = {key: value for key, value in calibration.to_dict().items() if key.startswith("val_")}
    return {"threshold": calibration.threshold, "feasible": feasible, **validation}


def _excluded(
    task: ScoringTask, method: Method[Any], words: PrimitiveVectors | None, calibration: Calibration
) -> list[Bools]:
    """Return masks [C] of candidates to leave out, each for one more AUC that the same pass over the images computes.

    The first mask leaves none out. Others exclude compositions by a feasibility threshold that the run does not use.
    """
    masks = [feasible_compositions(method, words, other) for other in calibration.alternatives]
    nothing = np.zeros(len(task.candidates), dtype=bool)
    return [nothing, *(nothing if mask is None else ~mask for mask in masks)]


def _auc_all(task: ScoringTask, test: Examples, result: ScoringResult, settings: EvaluationParams) -> dict[str, float]:
    """Return the AUC in percent with every composition a candidate, by the evaluation protocol in `settings`.

    The protocol `exact` adds a 95 % interval, `auc_all_low` and `auc_all_high`; `sampled` tries about 20 biases on
    unseen pairs.
    """
    if settings.protocol == "sampled":
        metrics = _sampled(task, test, result, None, settings)
    else:
        metrics = flatten(measure(result.further[0].competitors(), rounds=0))
    return {f"auc_all{end}": metrics[f"auc{end}"] for end in ("", "_low", "_high") if f"auc{end}" in metrics}


def _with_alternatives(result: ScoringResult, excluded: list[Bools], calibration: Calibration) -> dict[str, Any]:
    """Return open-world metrics for the sources of feasibility that a run does not use, as source -> metrics.

    A source is `words` (similarity of words) or `likelihood`; its threshold excludes implausible compositions.
    """
    records: dict[str, Any] = {}
    for other, mask, accumulator in zip(calibration.alternatives, excluded[1:], result.further[1:], strict=True):
        metrics = flatten(measure(accumulator.competitors(1), rounds=0))
        records[other.feasibility_source] = {
            **{name: metrics[name] for name in FEASIBILITY_METRICS if name in metrics},
            **_feasibility(other, int((~mask).sum())),
        }
    return records


def metrics_at_bias(margins: Margins, bias: float) -> dict[str, float]:
    """Return seen and unseen accuracy and their harmonic mean, in percent, at the bias chosen on validation images.

    Predictions use this bias; for the curve's best harmonic mean, the bias is chosen on the test images themselves.

    margins: bias on unseen pairs at which each image becomes right or wrong.
    """
    ends = [float(np.mean(right)) for right in (bias < margins.seen, bias > margins.unseen) if right.size]
    record = {"val_bias": bias}
    if len(ends) == 2:
        seen, unseen = ends
        hm = float(harmonic_mean(np.array(seen), np.array(unseen)))
        record |= {"seen_at_val_bias": 100 * seen, "unseen_at_val_bias": 100 * unseen, "hm_at_val_bias": 100 * hm}
    return record


def _metrics(
    result: ScoringResult, competitors: TopCompetitors, labels: LabelSpace, settings: EvaluationParams
) -> dict[str, Any]:
    """Return S, U (seen, unseen accuracy), HM, AUC with 95 % intervals, state and object accuracy, per k of top-k."""
    compositions = result.candidates.compositions
    states, objects = labels.state_of(compositions), labels.object_of(compositions)
    measured = partial(measure, competitors, states=states, objects=objects, rounds=settings.bootstrap)
    return _for_every_k(settings, measured)


def _sampled(
    task: ScoringTask, test: Examples, result: ScoringResult, feasible_mask: Bools | None, settings: EvaluationParams
) -> dict[str, Any]:
    """Return metrics by the protocol of published tables, with only 20 biases on unseen pairs and no 95 % intervals."""
    target, seen, blocks = result.accumulator.target, result.accumulator.seen, partial(task.blocks, test.inputs)
    return _for_every_k(settings, lambda k: sampled_metrics(blocks, target, seen, feasible_mask, k))


def _for_every_k(settings: EvaluationParams, measured: Callable[[int], Metrics]) -> dict[str, Any]:
    """Return the metrics of top-1 accuracy, and under keys such as `top_3` those of each other k in `settings.k`.

    measured: function that returns the metrics of top-k accuracy for a k.
    """
    further = {f"top_{k}": flatten(measured(k)) for k in dict.fromkeys(settings.k) if k != 1}
    return {**flatten(measured(1)), **further}


def flatten(metrics: Metrics) -> dict[str, Any]:
    """Return metrics as a flat dict; 95 % intervals become numbers such as `auc_low`, because DVC ignores lists."""
    record: dict[str, Any] = {}
    for key, value in metrics.to_dict().items():
        if value is not None and key.endswith("_interval"):
            name = key.removesuffix("_interval")
            record[f"{name}_low"], record[f"{name}_high"] = value
        elif value is not None:
            record[key] = value
    return record


def frequency_accuracies(result: WorldResult, inputs: RunInputs) -> dict[str, dict[str, float]]:
    """Return closed-world accuracies in percent of head, medium, tail and unseen pairs (groups by training frequency).

    They are measured at bias 0, and at the ends of the curve: seen groups with unseen pairs excluded, unseen pairs with
    seen ones excluded.
    """
    train, test = (inputs.examples[split].compositions.cpu().numpy() for split in ("train", "test"))
    groups = frequency_groups(train, inputs.labels.size)
    right = {"accuracy": result.right, "accuracy_at_ends": result.right_at_ends}
    table = group_table(groups, train, test, right).set_index("group")
    return {
        str(group): {str(key): float(value) for key, value in row.items() if not np.isnan(value)}
        for group, row in table.iterrows()
    }


def term_metrics(method: Method[Any], inputs: RunInputs) -> dict[str, dict[str, Any]]:
    """Return closed-world metrics of each score term (summand of the score) alone, and of partial sums of terms."""
    labels, test = inputs.labels, inputs.examples["test"]
    sums = score_term_sums(method, labels.candidates("closed", "test"), test, labels)
    records = {}
    for names, accumulator in sums.items():
        metrics = flatten(measure(accumulator.competitors(), rounds=0))
        records[f"terms_{'+'.join(names)}"] = {key: metrics[key] for key in METRICS if key in metrics}
    return records


def _predictions(
    result: ScoringResult, margins: Margins, test: Examples, labels: LabelSpace, manifest: pd.DataFrame, bias: float
) -> pd.DataFrame:
    """Return a table of images: label, best three compositions, whether the best is right, and margin.

    The bias on unseen pairs is the one chosen on validation images. The margin is the bias at which the image turns
    from right to wrong or back.
    """
    margin = np.empty(len(test))
    margin[margins.is_seen], margin[~margins.is_seen] = margins.seen, margins.unseen
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
