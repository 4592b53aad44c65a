"""Measure two encoders, each alone and both at once, on frozen features, by what nothing is trained for.

    python -m benchmarks.two_encoders --names "small CLIP,EfficientNet-Lite0" --csv docs/results/two_encoders.csv

The data sets of params.yaml list the same encoders, which `--names` renames in the table, and are extracted. Recipes
are those of `duplex fit`: the closed form (times zero-shot prompts where there is a text tower), two logistic
regressions, and the product of both. Listed in per cent, as means over the data sets: test AUC (closed world) and its
standard deviation, and accuracy among all pairs on images of seen and of unseen pairs at the true share of these.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd
import torch

from benchmarks.measure import emit, options, say, write_csv
from duplex.config.params import EvaluationParams, load_params
from duplex.encoders.base import has_text, joined_parts, load_encoder
from duplex.project.run import ProjectData
from duplex.recognition.worlds import evaluate_world
from duplex.training.inputs import Data
from duplex.training.recipes import SearchSpace
from duplex.training.run import MethodSpec, reproducible, train_run
from duplex.training.scoring import answer_groups

BOTH = "both"
Numbers = dict[str, float]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--datasets", default="photos,photos-split1,photos-split2,photos-split3")
    parser.add_argument("--names", help="names of the encoders in the table, in their order")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    given = parser.parse_args()
    params = load_params()
    results: dict[tuple[str, str], list[Numbers]] = {}
    for dataset in given.datasets.split(","):
        project = ProjectData(params, dataset)
        project.require()
        data = project.open()
        parts = [name for name, _ in joined_parts(data.encoder.name)]
        names = given.names.split(",") if given.names else parts
        choices: dict[str, str | None] = dict(zip(names, parts, strict=True)) if len(parts) > 1 else {}
        for name, encoder in {**choices, BOTH: None}.items():
            for recipe, spec in recipes(data, encoder).items():
                found = measured(data, spec)
                say(f"{dataset}, {name}, {recipe}: {found}")
                results.setdefault((name, recipe), []).append(found)
    table = rows(results)
    write_csv(table, given.csv)
    emit(table) if given.json else say(pd.DataFrame(table).to_string(index=False))


def recipes(data: Data, encoder: str | None) -> dict[str, MethodSpec]:
    """The recipes for one encoder of a data set, or for all of them (None), by name."""
    weights = dict(joined_parts(data.encoder.name, data.encoder.weights))
    name = encoder or data.encoder.name
    width = 0
    if has_text(name):
        own = weights[encoder] if encoder else data.encoder.weights
        width = load_encoder(name, own, towers="text").text.width
    trials = SearchSpace(width).untrained()
    return {trial.name: replace(trial.spec, encoder=encoder) for trial in trials}


def measured(data: Data, spec: MethodSpec) -> Numbers:
    """Test AUC, and accuracy on seen and on unseen pairs at their true share, in per cent."""
    inputs = data.inputs(spec.request)
    with reproducible(1):
        run = train_run(spec, inputs, 0, torch.device("cpu"), EvaluationParams())
        test = inputs.examples["test"]
        answers = answer_groups(run.method, test, inputs.labels, run.record.confidence, "open")
        calibration = (run.record.calibration or {})["closed"]
        closed = evaluate_world(run.method, inputs, EvaluationParams(bootstrap=1), "closed", calibration)
    at = answers.at(answers.true_share)
    return {"AUC": closed.metrics["auc"], "seen pairs": at.seen_accuracy, "unseen pairs": at.unseen_accuracy}


def rows(results: dict[tuple[str, str], list[Numbers]]) -> list[dict[str, Any]]:
    """The table: one row per encoder and recipe."""
    table = []
    for (encoder, recipe), found in results.items():
        frame = pd.DataFrame(found)
        aucs = frame["AUC"].tolist()
        row: dict[str, Any] = {"encoder": encoder, "recipe": recipe, "AUC": round(fmean(aucs), 1)}
        row["AUC ±"] = round(stdev(aucs), 1) if len(aucs) > 1 else ""
        for column in ("seen pairs", "unseen pairs"):
            row[column] = round(float(frame[column].mean()), 1)
        table.append(row)
    return table


if __name__ == "__main__":
    main()
