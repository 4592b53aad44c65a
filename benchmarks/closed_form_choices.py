"""Compare choices of the closed form, none of which trains anything.

python -m benchmarks.closed_form_choices --datasets shapes,shapes-split1 [--json]

`closed_form` of params.yaml is fitted to the features of each data set as it is, without its text term, without the
log-frequency of seen pairs (`prior`), and without interactions of words. The first two also have a fixed share of the
mean variance added to the covariance, and the share that predicts held-out pairs best (`held out`). Weights are chosen
on validation images. Printed are validation and test AUC, closed world / all pairs, and seconds of the fit.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.measure import emit
from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.evaluation.curve import Margins
from duplex.evaluation.uncertainty import Components
from duplex.labels import WORLDS
from duplex.library.inputs import InputRequest, RunInputs, load_inputs
from duplex.library.run_training import MethodSpec, initialised_method
from duplex.training.scoring import ScoringTask, score_split, tune

ADDED = {"oas": 0.0, "+ 0.1": 0.1, "+ 1": 1.0, "held out": None}
CHOICES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no text": {"inference": ("gaussian_factors", "gaussian")},
    "no prior": {"prior": False},
    "no interactions": {"interactions": 0.0},
}


def variants(params: Params, dataset: str) -> list[dict[str, Any]]:
    """Return a row of numbers per choice on one data set."""
    inputs = load_inputs(params, dataset, ArtifactPaths(), InputRequest())
    rows = []
    own: Any = MethodSpec.of(params, dataset, "closed_form").options
    for choice, change in CHOICES.items():
        for name, added in ADDED.items() if choice in ("as it is", "no text") else [("oas", 0.0)]:
            options = replace(own, added_variance=added, **change)
            rows.append({"dataset": dataset, "choice": choice, "covariance": name, **measured(options, inputs)})
            print(line(rows[-1]), flush=True)
    return rows


def measured(options: Any, inputs: RunInputs) -> dict[str, float]:
    """Fit and tune the closed form with these options; return its AUC in percent by split and world."""
    start = time.perf_counter()
    method = initialised_method("closed_form", options, inputs.task(), inputs, 0, torch.device("cpu"))
    seconds = time.perf_counter() - start
    tune(method, inputs.examples["val"], inputs.labels)
    found = {"added": float(method.chosen[2]), "seconds": seconds}
    for split in ("val", "test"):
        for world in WORLDS:
            task = ScoringTask.of(method, inputs.labels.candidates(world, split))
            statistics = score_split(task, inputs.examples[split], inputs.labels).accumulator.competitors()
            found[f"{split} {world}"] = 100 * (Components.of(Margins.of(statistics)).auc or 0.0)
    return found


def line(row: dict[str, Any]) -> str:
    aucs = (f"{split} {row[f'{split} closed']:.2f} / {row[f'{split} open']:.2f}" for split in ("val", "test"))
    where = f"{row['dataset']}, {row['choice']}, {row['covariance']} ({row['added']:g})"
    return f"{where}: {', '.join(aucs)}; {row['seconds']:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="shapes")
    parser.add_argument("--json", action="store_true", help="print JSON as well")
    wanted = parser.parse_args()
    params = load_params()
    rows = [row for dataset in wanted.datasets.split(",") for row in variants(params, dataset)]
    if wanted.json:
        emit(rows)


if __name__ == "__main__":
    main()
