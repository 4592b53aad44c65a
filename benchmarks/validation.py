"""Compare methods, learning rates and variations by validation AUC alone; test images are never scored.

python -m benchmarks.validation --rows coop,csp,cso,duplex --rates 3e-4,1e-3,3e-3   # the same budget for every method
python -m benchmarks.validation --study                                             # what refinement needs

Seeds are others than those of the reported runs. Needs `dvc repro extract` first.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import emit, say
from benchmarks.variations import STUDY, Variation
from duplex.artifacts import ArtifactPaths
from duplex.assessment import assess, validation_auc
from duplex.evaluation.metrics import measure
from duplex.model.network import Network
from duplex.model.options import Options, TrainingOptions
from duplex.params import load_params
from duplex.report.aggregate import mean, standard_error
from duplex.stages.inputs import Inputs, load_inputs, make_deterministic, pick_device
from duplex.stages.train import build
from duplex.training import train


def run(
    inputs: Inputs,
    options: Options,
    settings: TrainingOptions,
    seed: int,
    device: torch.device,
    variation: Variation = Variation(),
) -> dict[str, float]:
    """Train one network; its best validation AUC, S and U there, and its AUC over all compositions."""
    torch.manual_seed(seed)
    options = replace(options, **variation.options)
    network = build(inputs, options, variation.network).to(device)
    images, val = (inputs.examples[split].to(device) for split in ("train", "val"))
    epochs = count()

    def validate(network: Network) -> float:
        """Once before training and once after each epoch."""
        network.options = replace(options, momentum=variation.momentum(next(epochs), options, settings))
        return validation_auc(network, val, inputs.labels)

    outcome = train(network, images, settings, seed, validate)
    closed, wide = (
        measure(assess(network, val, inputs.labels, inputs.labels.target(world, "val")).evidence.rivals(), rounds=0)
        for world in ("closed", "open")
    )
    ends = {name: closed.to_dict()[name] for name in ("seen", "unseen", "hm")}
    return {"auc": 100 * outcome.best_auc, "auc_open": wide.to_dict()["auc"], "epoch": outcome.best_epoch, **ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="shapes")
    parser.add_argument("--rows", default="csp,cso,duplex", help="methods or ablations of params.yaml")
    parser.add_argument("--rates", default="", help="learning rates; default: params.yaml's")
    parser.add_argument("--seeds", default="100,101")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"], help="of the text tower")
    parser.add_argument("--study", action="store_true", help="the variations of duplex in variations.py")
    parser.add_argument("--only", default="", help="some rows of the study, separated by ';'")
    parser.add_argument("--out", type=Path, help="also write the JSON here, after every row")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    wanted = parser.parse_args()

    params = load_params()
    entry = params.dataset(wanted.dataset)
    settings = replace(entry.training, precision=wanted.precision)
    changed = entry.model_copy(update={"training": settings})
    params = params.model_copy(update={"datasets": {**params.datasets, wanted.dataset: changed}})
    make_deterministic()
    device = pick_device(params.device)
    inputs = load_inputs(params, wanted.dataset, ArtifactPaths())
    if wanted.epochs:
        settings = replace(settings, epochs=wanted.epochs)
    if wanted.study:
        chosen = [name for name in wanted.only.split(";") if name] or list(STUDY)
        rows = {name: (params.method("duplex"), STUDY[name]) for name in chosen}
    else:
        rows = {name: (params.method(name), Variation()) for name in wanted.rows.split(",")}
    found: dict[str, Any] = {}
    for name, (options, variation) in rows.items():
        for rate in [float(r) for r in wanted.rates.split(",") if r] or [settings.learning_rate]:
            at_rate = replace(settings, learning_rate=rate)
            runs = [run(inputs, options, at_rate, int(seed), device, variation) for seed in wanted.seeds.split(",")]
            label = f"{name} @ {rate:g}" if wanted.rates else name
            found[label] = {key: mean([r[key] for r in runs]) for key in runs[0]}
            found[label]["auc_se"] = standard_error([r["auc"] for r in runs])
            say(f"{label:40} " + "  ".join(f"{key} {value:.2f}" for key, value in found[label].items()))
            if wanted.out:
                wanted.out.write_text(json.dumps(found, indent=2) + "\n")
    if wanted.json:
        emit(found)


if __name__ == "__main__":
    main()
