"""Compare variations of `duplex`, and sums of score terms, by validation AUC; test images are never scored.

python -m benchmarks.validation --study                   # what refinement needs
python -m benchmarks.validation --methods duplex --terms  # sums of score terms of one model

Learning rates and other settings: `duplex tune`. Seeds differ from those of the reported runs. Needs `dvc repro
extract`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.measure import emit, say
from benchmarks.variations import STUDY, Variation
from duplex.artifacts import ArtifactPaths
from duplex.config.params import load_params
from duplex.encoders import resolve_device
from duplex.errors import require
from duplex.evaluation.metrics import measure
from duplex.features.examples import Examples
from duplex.labels import LabelSpace, World
from duplex.library.inputs import InputRequest, RunInputs, load_inputs, make_deterministic
from duplex.library.run_training import start_method
from duplex.methods.base import Batch, Method
from duplex.methods.duplex import DuplexOptions
from duplex.methods.registry import find_method
from duplex.options import Options, TrainingOptions
from duplex.report.aggregate import standard_error
from duplex.training.loop import train
from duplex.training.scoring import ScoringTask, assess, assess_sums, validation_auc


def run(
    inputs: RunInputs,
    row: Row,
    settings: TrainingOptions,
    seed: int,
    device: torch.device,
    variation: Variation | None = None,
    terms: bool = False,
) -> dict[str, float]:
    """Train a method; return its best validation AUC, S and U, and its AUC over all compositions.

    `terms` adds the AUC of subsets of its score terms, for the model chosen by all of them.
    """
    method = (
        start_method(row.kind, row.options, inputs.task(row.world), inputs, seed, device)
        if variation is None
        else varied(inputs, row, settings, seed, device, variation)
    )
    images, val = (inputs.examples[split].to(device) for split in ("train", "val"))
    outcome = train(method, images, settings, seed, lambda trained: validation_auc(trained, val, inputs.labels))
    closed, wide = (
        measure(
            assess(
                ScoringTask.of(method, inputs.labels.candidates(world, "val")), val, inputs.labels
            ).accumulator.competitors(),
            rounds=0,
        )
        for world in ("closed", "open")
    )
    ends = {name: closed.to_dict()[name] for name in ("seen", "unseen", "hm")}
    parts = of_terms(method, val, inputs.labels) if terms else {}
    return {
        "auc": 100 * outcome.best_auc,
        "auc_open": wide.to_dict()["auc"],
        "epoch": outcome.best_epoch,
        **ends,
        **parts,
    }


def of_terms(method: Method[Any], val: Examples, labels: LabelSpace) -> dict[str, float]:
    """Return the validation AUC of subsets of the score terms."""
    sums = assess_sums(method, labels.candidates("closed", "val"), val, labels)
    found = {"_".join(names): measure(evidence.competitors(), rounds=0).auc for names, evidence in sums.items()}
    return {f"auc_{name}": 100 * auc for name, auc in found.items() if auc is not None}


@dataclass(frozen=True)
class Row:
    """A row of params.yaml on this data set."""

    kind: str
    options: Options
    world: World = "closed"


def varied(
    inputs: RunInputs, row: Row, settings: TrainingOptions, seed: int, device: torch.device, variation: Variation
) -> Method[Any]:
    """Return a variation of `duplex`, started like `duplex`."""
    assert isinstance(row.options, DuplexOptions)
    torch.manual_seed(seed)
    method = variation.kind(inputs.task(row.world), replace(row.options, **variation.options)).to(device)
    method.schedule, method.settings = variation.schedule, settings
    images = inputs.examples["train"].to(device)
    method.start(Batch(images.inputs, images.compositions))
    return method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="shapes")
    parser.add_argument("--methods", default="csp,cso,duplex", help="methods or ablations of params.yaml")
    parser.add_argument("--seeds", default="100,101")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--study", action="store_true", help="the variations of duplex in variations.py")
    parser.add_argument("--terms", action="store_true", help="also score subsets of the score terms")
    parser.add_argument("--only", default="", help="some variations of the study, separated by ';'")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file, after every method")
    parser.add_argument("--json", action="store_true", help="print JSON")
    wanted = parser.parse_args()

    params = load_params()
    make_deterministic()
    device = torch.device(resolve_device(params.device))
    if wanted.study:
        chosen = [name for name in wanted.only.split(";") if name] or list(STUDY)
        rows: dict[str, tuple[str, Variation | None]] = {
            name: ("duplex", STUDY[require(name, STUDY, "row of the study")]) for name in chosen
        }
    else:
        rows = {name: (name, None) for name in wanted.methods.split(",")}
    needs = frozenset[str]().union(
        *(find_method(params.entry(n).kind).needs(params.method(n, wanted.dataset)) for n, _ in rows.values())
    )
    inputs = load_inputs(params, wanted.dataset, ArtifactPaths(), InputRequest(needs))
    found: dict[str, Any] = {}
    for name, (of, variation) in rows.items():
        written = params.entry(of)
        row = Row(written.kind, params.method(of, wanted.dataset), written.trained_for)
        settings = params.training(wanted.dataset, of)
        settings = replace(settings, epochs=wanted.epochs) if wanted.epochs else settings
        runs = [
            run(inputs, row, settings, int(seed), device, variation, wanted.terms) for seed in wanted.seeds.split(",")
        ]
        found[name] = {key: fmean([r[key] for r in runs]) for key in runs[0]}
        found[name]["auc_se"] = standard_error([r["auc"] for r in runs])
        say(f"{name:40} " + "  ".join(f"{key} {value:.2f}" for key, value in found[name].items()))
        if wanted.out:
            wanted.out.write_text(json.dumps(found, indent=2) + "\n")
    if wanted.json:
        emit(found)


if __name__ == "__main__":
    main()
