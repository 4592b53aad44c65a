"""Compare rules of feasibility on trained runs: test AUC over all pairs, at thresholds, and with penalties.

python -m benchmarks.feasibility --datasets shapes,shapes-split1 --methods cso,dual --seeds 0,1 [--json]

Reads the checkpoints of these runs in `artifacts/` and trains nothing; missing runs are skipped. A threshold excludes
unseen pairs whose feasibility `f` is below it. A penalty adds `w z` to `log p(c|x)` of unseen pairs, where `z` is `f`
standardised over the unseen pairs. Threshold and weight `w` have the best validation AUC; with `auto` they are used
only if their cross-fitted gain exceeds twice its standard error (duplex/evaluation/crossfit.py). The test split is
scored once per run, for all rules.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.measure import emit, say
from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.evaluation.accumulator import Floats, ScoreAccumulator, TopCompetitors
from duplex.evaluation.confidence import log_probabilities
from duplex.evaluation.crossfit import CrossFitGain, crossfit_gain, largest_clear_gain, wins_by_pair
from duplex.evaluation.curve import Margins
from duplex.evaluation.feasibility import FeasibilityValues, buckets, choose_threshold, thresholds
from duplex.evaluation.uncertainty import Components
from duplex.features.examples import Examples
from duplex.labels import LabelSpace
from duplex.library.inputs import InputRequest, InputsCache
from duplex.methods.base import Method
from duplex.methods.registry import find_method
from duplex.training.calibration import feasibility_by_likelihood, feasibility_by_words
from duplex.training.checkpoint import load_checkpoint, read_record
from duplex.training.scoring import ScoringTask

WEIGHTS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
SOURCES = ("words", "likelihood")


@dataclass(frozen=True)
class Accumulators:
    """Score statistics of one split: by bucket of each source's thresholds, and by weight of each source's penalty."""

    by_bucket: dict[str, ScoreAccumulator]
    by_weight: dict[str, list[ScoreAccumulator]]


def accumulate(
    method: Method[Any], examples: Examples, split: str, steps: dict[str, Floats], values: dict[str, Floats]
) -> Accumulators:
    """Score a split once, and add the scores and the penalised log probabilities to all statistics."""
    labels = method.labels
    task, target = ScoringTask.of(method, labels.candidates("open", split)), examples.compositions.numpy()
    by_bucket = {
        source: ScoreAccumulator(target, labels.seen, bucket=buckets(f, steps[source])) for source, f in values.items()
    }
    by_weight = {source: [ScoreAccumulator(target, labels.seen) for _ in WEIGHTS] for source in values}
    z = {source: torch.from_numpy(standardised(f, labels)) for source, f in values.items()}
    for rows, scores in task.blocks(examples.inputs):
        log_p = log_probabilities(method.probabilities, scores)
        for source in values:
            by_bucket[source].add(scores, rows)
            for weight, accumulator in zip(WEIGHTS, by_weight[source], strict=True):
                accumulator.add((log_p + weight * z[source]).numpy(), rows)
    return Accumulators(by_bucket, by_weight)


def standardised(feasible: Floats, labels: LabelSpace) -> Floats:
    """Return `f` [M*N] of unseen compositions with mean 0 and standard deviation 1; 0 for seen ones."""
    unseen = feasible[~labels.seen]
    z = (feasible - unseen.mean()) / max(unseen.std(), 1e-12)
    return np.where(labels.seen, 0.0, z)


def auc(statistics: TopCompetitors) -> float:
    return 100 * (Components.of(Margins.of(statistics)).auc or 0.0)


def best_weight(accumulators: Sequence[ScoreAccumulator]) -> tuple[int, CrossFitGain]:
    """Return the place of the weight with the best validation AUC, and its cross-fitted gain."""
    first = accumulators[0]
    _, pair, images = np.unique(first.target[~first.seen[first.target]], return_inverse=True, return_counts=True)
    parts = [Components.of(Margins.of(each.competitors())) for each in accumulators]
    wins = np.array([wins_by_pair(part, pair, images.size) for part in parts])
    return int(np.argmax(wins.sum(1))), crossfit_gain(wins, images, parts[0].seen.size)


def rules(val: Accumulators, test: Accumulators, steps: dict[str, Floats]) -> dict[str, float]:
    """Return the test AUC of every rule."""
    found = {"none": auc(next(iter(test.by_bucket.values())).competitors())}
    chosen = {source: choose_threshold(val.by_bucket[source], tried) for source, tried in steps.items()}
    weights = {source: best_weight(val.by_weight[source]) for source in steps}
    for source, threshold in chosen.items():
        found[source] = auc(test.by_bucket[source].competitors(threshold.passing_buckets))
        found[f"penalty, {source}"] = auc(test.by_weight[source][weights[source][0]].competitors())
    for title, prefix, gains in (
        ("auto", "", [each.gain for each in chosen.values()]),
        ("penalty, auto", "penalty, ", [gain for _, gain in weights.values()]),
    ):
        place = largest_clear_gain(gains)
        found[title] = found["none"] if place is None else found[prefix + list(steps)[place]]
        found[f"{title}, used"] = float(place is not None)
    return found


def measure_run(params: Params, load: InputsCache, dataset: str, method: str, seed: int) -> dict[str, float] | None:
    """Return the test AUC of every rule for one run; None if it has not been trained."""
    paths = ArtifactPaths()
    checkpoint = paths.run(dataset, method, seed).checkpoint
    if not checkpoint.exists():
        return None
    record, training = read_record(checkpoint), params.training(dataset, method)
    needs = find_method(record.kind).needs(record.options)
    inputs = load(params, dataset, paths, InputRequest(needs, training.precision, record.finetune, training.memory))
    model = load_checkpoint(checkpoint, inputs.task(), inputs.encoder)
    both = (feasibility_by_words(inputs.labels, inputs.words), feasibility_by_likelihood(model))
    values = {source: whole(f) for source, f in zip(SOURCES, both, strict=True) if f is not None}
    steps = {source: thresholds(f, inputs.labels.seen, params.evaluation.thresholds) for source, f in values.items()}
    val, test = (accumulate(model, inputs.examples[split], split, steps, values) for split in ("val", "test"))
    return rules(val, test, steps)


def whole(feasible: FeasibilityValues) -> Floats:
    """Return feasibility [M*N], of which a source may yield blocks."""
    return feasible if isinstance(feasible, np.ndarray) else np.concatenate([part for _, part in feasible.blocks()])


def averages(runs: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return each rule's mean over runs."""
    listed = list(runs)
    return {name: fmean([run[name] for run in listed]) for name in listed[0] if all(name in run for run in listed)}


def line(run: dict[str, float]) -> str:
    return "  ".join(f"{rule} {value:.2f}" for rule, value in run.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="shapes")
    parser.add_argument("--methods", default="cso,closed_form,dual")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--json", action="store_true", help="print JSON: data set -> method -> seed -> rule -> AUC")
    wanted = parser.parse_args()
    params, load = load_params(), InputsCache()
    datasets, methods = wanted.datasets.split(","), wanted.methods.split(",")
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for dataset in datasets:
        for method in methods:
            for seed in wanted.seeds.split(","):
                if (run := measure_run(params, load, dataset, method, int(seed))) is not None:
                    found[dataset, method, seed] = run
                    say(
                        f"{dataset} {method} {seed}: " + "  ".join(f"{rule} {value:.2f}" for rule, value in run.items())
                    )
    if wanted.json:
        emit({" ".join(key): run for key, run in found.items()})
    for method in methods:
        runs = [run for key, run in found.items() if key[1] == method]
        if runs:
            print(f"{method} ({len(runs)} runs): {line(averages(runs))}")


if __name__ == "__main__":
    main()
