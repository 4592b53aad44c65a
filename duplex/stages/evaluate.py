"""Checkpoint and feature cache -> metrics of the test split, its curve, its predictions."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from duplex.config.artifacts import ArtifactPaths, RunPaths
from duplex.config.params import EvaluationParams, Params
from duplex.encoders import resolve_device
from duplex.errors import DuplexError
from duplex.evaluation.accumulator import Rivals
from duplex.evaluation.curve import Curve, Margins, harmonic_mean
from duplex.evaluation.groups import group_table
from duplex.evaluation.metrics import Metrics, measure
from duplex.evaluation.sampled import sampled
from duplex.features.examples import Examples
from duplex.labels import Bools, LabelSpace, World, frequency_groups
from duplex.methods.base import Method, Words
from duplex.methods.registry import find
from duplex.stages.inputs import Inputs, LoadInputs, load_inputs, make_deterministic
from duplex.system.files import write_text
from duplex.system.threads import threads
from duplex.training.calibration import Calibration, passing
from duplex.training.checkpoint import Record, load_checkpoint, read_record
from duplex.training.scoring import Field, Pass, assess, assess_sums


def run(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    paths: ArtifactPaths | None = None,
    out: RunPaths | None = None,
    load: LoadInputs = load_inputs,
) -> dict[str, Any]:
    """Evaluate a trained run on the test split, in every world that params.yaml names."""
    paths = paths or ArtifactPaths()
    out, trained_with = out or paths.run(dataset, method, seed), params.training(dataset, method)
    worlds = params.worlds(method)
    record = read_record(out.checkpoint)
    make_deterministic()
    with threads(trained_with.threads):
        needs = find(record.kind).needs(record.options)
        inputs = load(params, dataset, paths, needs, trained_with.precision, record.tail, trained_with.memory)
        return _run(params, worlds, inputs, record, out)


def _run(params: Params, worlds: Collection[World], inputs: Inputs, record: Record, out: RunPaths) -> dict[str, Any]:
    settings = params.evaluation
    device = torch.device(resolve_device(params.device))
    inputs.examples["test"] = inputs.examples["test"].to(device)
    trained = load_checkpoint(out.checkpoint, inputs.setting(), inputs.encoder).to(device)
    start = time.perf_counter()
    found = [
        _evaluate_world(trained, inputs, settings, world, _calibration(out.checkpoint, record, world))
        for world in worlds
    ]
    timing = {"test_seconds": time.perf_counter() - start, "images": len(inputs.examples["test"])}
    closed = [part for part in found if part.world == "closed"]
    metrics = {
        **{part.world: part.metrics for part in found},
        **({"groups": _groups(closed[0], inputs)} if closed else {}),
        **(_terms(trained, inputs) if closed and settings.terms and settings.protocol == "exact" else {}),
        "val_auc": 100 * record.val_auc,
        "epoch": record.epoch,
        "bad_images": inputs.bad,
    }
    write_text(out.metrics, json.dumps(metrics, indent=2) + "\n")
    write_text(out.evaluation_timing, json.dumps(timing, indent=2) + "\n")
    _write(pd.concat([part.curve for part in found]), out.curve)
    _write(pd.concat([part.predictions for part in found]), out.predictions)
    return metrics


def _write(table: pd.DataFrame, path: Path) -> None:
    write_text(path, table.to_csv(index=False, lineterminator="\n", float_format="%.9g"))


BESIDE = ("unseen", "hm", "auc", "auc_low", "auc_high")  # seen accuracy asks seen columns alone
OF_TERMS = ("seen", "unseen", "hm", "auc")


@dataclass(frozen=True)
class WorldResult:
    world: str
    metrics: dict[str, Any]
    curve: pd.DataFrame
    predictions: pd.DataFrame
    right: Bools  # [test images] at b = 0
    at_ends: Bools  # at that end of the curve where its own kind alone competes


def _calibration(path: Path, record: Record, world: str) -> Calibration:
    found = (record.calibration or {}).get(world)
    if found is None:
        raise DuplexError(f"{path} was not trained for the {world} world; train again, or correct the row's `world`")
    return found


def _evaluate_world(
    method: Method[Any], inputs: Inputs, settings: EvaluationParams, world: str, calibration: Calibration
) -> WorldResult:
    """One world's numbers. Open world: compositions below the threshold that validation chose score -inf."""
    labels, test = inputs.labels, inputs.examples["test"]
    field = Field.of(method, labels.target(world, "test"))
    words = inputs.words if world == "open" else None
    live = passing(method, words, calibration)
    found = assess(field, test, labels, k=max(settings.k), feasible_mask=live, top=3, bias=calibration.bias)
    rivals = found.evidence.rivals()
    margins = Margins.of(rivals)
    metrics = _metrics(found, rivals, labels, settings)
    if settings.protocol == "sampled":
        named = {name: metrics[name] for name in ("state_accuracy", "object_accuracy")}
        metrics = {**_sampled(field, test, found, live, settings), **named}
    metrics |= at_bias(margins, calibration.bias)
    if live is not None:
        chosen = {key: value for key, value in calibration.to_dict().items() if key.startswith("val_")}
        metrics |= {"threshold": calibration.threshold, "feasible": int(live.sum()), **chosen}
        metrics |= {"by_likelihood": 1} if calibration.judge == "likelihood" else {}
    if calibration.beside is not None:
        metrics[calibration.beside.judge] = _beside(field, test, method, words, calibration.beside)
    return WorldResult(
        world,
        metrics,
        Curve.of(margins).table().assign(world=world),
        _predictions(found, margins, test, labels, inputs.manifest, calibration.bias).assign(world=world),
        margins.right(0.0),
        np.where(margins.is_seen, margins.right(-np.inf), margins.right(np.inf)),
    )


def _beside(
    field: Field, test: Examples, method: Method[Any], words: Words | None, calibration: Calibration
) -> dict[str, Any]:
    """The same world with feasibility by the other judge: what it rules out, and the numbers that this changes."""
    live = passing(method, words, calibration)
    rivals = assess(field, test, method.labels, feasible_mask=live).evidence.rivals()
    found = flat(measure(rivals, rounds=0))
    named = {name: found[name] for name in BESIDE if name in found}
    chosen = {key: value for key, value in calibration.to_dict().items() if key.startswith("val_")}
    feasible = len(field.columns) if live is None else int(live.sum())
    return {**named, "threshold": calibration.threshold, "feasible": feasible, **chosen}


def at_bias(margins: Margins, bias: float) -> dict[str, float]:
    """What a user gets, in percent: accuracies at the bias that validation chose. The best HM of the curve is read from
    the test images themselves."""
    ends = [float(np.mean(right)) for right in (bias < margins.seen, bias > margins.unseen) if right.size]
    record = {"val_bias": bias}
    if len(ends) == 2:
        values = (*ends, float(harmonic_mean(np.array(ends[0]), np.array(ends[1]))))
        record |= {
            f"{name}_at_val_bias": 100 * value for name, value in zip(("seen", "unseen", "hm"), values, strict=True)
        }
    return record


def _metrics(found: Pass, rivals: Rivals, labels: LabelSpace, settings: EvaluationParams) -> dict[str, Any]:
    """S, U, HM, AUC and their intervals for k = 1; the same under `top_k` for every further k."""
    states, objects = labels.state_of(found.columns), labels.object_of(found.columns)
    wanted = dict.fromkeys((1, *settings.k))
    results = {k: measure(rivals, k, states=states, objects=objects, rounds=settings.bootstrap) for k in wanted}
    return {**flat(results.pop(1)), **{f"top_{k}": flat(result) for k, result in results.items()}}


def _sampled(
    field: Field, test: Examples, found: Pass, live: Bools | None, settings: EvaluationParams
) -> dict[str, Any]:
    """What the literature's 20-point sweep says in place of the exact numbers; it has no intervals."""
    evidence = found.evidence

    def blocks() -> Iterator[tuple[slice, Tensor]]:
        return field.blocks(test.inputs)

    results = {k: sampled(blocks, evidence.target, evidence.seen, live, k) for k in dict.fromkeys((1, *settings.k))}
    return {**flat(results.pop(1)), **{f"top_{k}": flat(result) for k, result in results.items()}}


def flat(metrics: Metrics) -> dict[str, Any]:
    """Intervals as `auc_low`, `auc_high`, because DVC drops lists; what is undefined is left out."""
    record: dict[str, Any] = {}
    for key, value in metrics.to_dict().items():
        if value is not None and key.endswith("_interval"):
            name = key.removesuffix("_interval")
            record[f"{name}_low"], record[f"{name}_high"] = value
        elif value is not None:
            record[key] = value
    return record


def _groups(result: WorldResult, inputs: Inputs) -> dict[str, dict[str, float]]:
    """Closed-world accuracy by training frequency, in percent: at b = 0, and where the paper's appendix reads it, seen
    groups at the curve's seen end and unseen pairs at the other."""
    train, test = (inputs.examples[split].compositions.cpu().numpy() for split in ("train", "test"))
    groups = frequency_groups(train, inputs.labels.size)
    results = {"accuracy": result.right, "accuracy_at_ends": result.at_ends}
    parts = [group_table(groups, train, test, {name: right}).set_index("group") for name, right in results.items()]
    table = parts[0].join(parts[1]["accuracy_at_ends"])
    return {
        str(group): {str(key): float(value) for key, value in row.items() if not np.isnan(value)}
        for group, row in table.iterrows()
    }


def _terms(method: Method[Any], inputs: Inputs) -> dict[str, dict[str, Any]]:
    """The closed world by parts of the score alone: what each adds, of this one model."""
    labels = inputs.labels
    sums = assess_sums(method, labels.target("closed", "test"), inputs.examples["test"], labels)
    found = {"+".join(names): flat(measure(evidence.rivals(), rounds=0)) for names, evidence in sums.items()}
    return {f"terms_{name}": {key: values[key] for key in OF_TERMS if key in values} for name, values in found.items()}


def _predictions(
    found: Pass, margins: Margins, examples: Examples, labels: LabelSpace, manifest: pd.DataFrame, bias: float
) -> pd.DataFrame:
    """One row an image: its label, whether it is right and the best three compositions at the bias that validation
    chose, and the bias at which it turns."""
    margin = np.empty(len(examples))
    margin[margins.is_seen], margin[~margins.is_seen] = margins.seen, margins.unseen
    own = examples.compositions.cpu().numpy()
    return pd.DataFrame(
        {
            "row": examples.rows,
            "image": manifest["image"].to_numpy()[examples.rows],
            "label": labels.names(own),
            "seen": margins.is_seen.astype(int),
            "right": margins.right(bias).astype(int),
            "margin": margin,
            **{f"top{place + 1}": labels.names(found.top[:, place]) for place in range(found.top.shape[1])},
        }
    )
