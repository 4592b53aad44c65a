"""Compare variations of `duplex`, and sums of score terms, by validation AUC; test images are never scored.

python -m benchmarks.validation --study                   # what refinement needs
python -m benchmarks.validation --methods duplex --terms  # sums of score terms of one model
python -m benchmarks.validation --methods duplex --prototypes  # its messages and prototypes, before and after training

Learning rates and other settings: `duplex tune`. Seeds differ from those of the reported runs. Needs `dvc repro
extract`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import emit, say
from benchmarks.variations import STUDY, Variation
from duplex.artifacts import ArtifactPaths
from duplex.config.params import load_params
from duplex.encoders import resolve_device
from duplex.errors import UsageError, require
from duplex.evaluation.metrics import measure
from duplex.features.examples import Examples
from duplex.labels import LabelSpace, World
from duplex.layers.graph import LocalCandidates, message_sums
from duplex.library.inputs import InputRequest, RunInputs, load_inputs, make_deterministic
from duplex.library.run_training import initialised_method
from duplex.methods.base import Batch, Method
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.methods.registry import find_method
from duplex.options import Options, TrainingOptions
from duplex.report.aggregate import standard_error
from duplex.training.loop import train
from duplex.training.scoring import ScoringTask, score_split, score_term_sums, validation_auc


def run(
    inputs: RunInputs,
    row: Row,
    settings: TrainingOptions,
    seed: int,
    device: torch.device,
    variation: Variation | None = None,
    terms: bool = False,
    prototypes: bool = False,
) -> dict[str, float]:
    """Train a method; return its best validation AUC, S and U, and its AUC over all compositions.

    `terms` adds the AUC of subsets of its score terms, for the model chosen by all of them; `prototypes` what
    `of_prototypes` returns, before training (`untrained_…`) and after it.
    """
    method = (
        initialised_method(row.kind, row.options, inputs.task(row.world), inputs, seed, device)
        if variation is None
        else varied(inputs, row, settings, seed, device, variation)
    )
    images, val = (inputs.examples[split].to(device) for split in ("train", "val"))
    before = of_prototypes(method, images, val) if prototypes else {}
    outcome = train(method, images, settings, seed, lambda trained: validation_auc(trained, val, inputs.labels))
    closed, wide = (
        measure(
            score_split(
                ScoringTask.of(method, inputs.labels.candidates(world, "val")), val, inputs.labels
            ).accumulator.competitors(),
            rounds=0,
        )
        for world in ("closed", "open")
    )
    ends = {name: closed.to_dict()[name] for name in ("seen", "unseen", "hm")}
    parts = of_terms(method, val, inputs.labels) if terms else {}
    if prototypes:
        parts |= {f"untrained_{name}": value for name, value in before.items()} | of_prototypes(method, images, val)
    return {
        "auc": 100 * outcome.best_auc,
        "auc_open": wide.to_dict()["auc"],
        "epoch": outcome.best_epoch,
        **ends,
        **parts,
    }


def of_terms(method: Method[Any], val: Examples, labels: LabelSpace) -> dict[str, float]:
    """Return the validation AUC of subsets of the score terms."""
    sums = score_term_sums(method, labels.candidates("closed", "val"), val, labels)
    found = {"_".join(names): measure(evidence.competitors(), rounds=0).auc for names, evidence in sums.items()}
    return {f"auc_{name}": 100 * auc for name, auc in found.items() if auc is not None}


@torch.no_grad()
def of_prototypes(
    method: Method[Any], images: Examples, val: Examples, batches: int = 10, size: int = 64
) -> dict[str, float]:
    """Return the weights of the graph's messages in random batches of training images, and where prototypes lie.

    `weight_KIND` is a kind's share of the weight of all messages and `mean_weight_KIND` the mean of its shares per
    prototype. `cosine_refined` and `cosine_others` are mean cosines between validation images and the prototypes that
    training refines, and all others; `negative_…` are shares of negative coordinates, of images and of prototypes.
    All but cosines are in percent.
    """
    if not isinstance(method, Duplex) or not method.options.graph:
        raise UsageError(f"--prototypes needs methods with a graph (kind duplex, graph: true), not {method.class_name}")
    method.eval()
    n, draw = len(method.labels.objects), torch.Generator().manual_seed(0)
    shared, totals, shares = method.shared(), defaultdict[str, float](float), defaultdict[str, list[Tensor]](list)
    for rows in torch.randperm(len(images), generator=draw).split(size)[:batches]:
        labels, z = images.compositions[rows], method.paths.adapt(images.cls[rows])
        nodes = method.nodes(z, method.paths.factor_posteriors(z, shared), labels)
        candidates = LocalCandidates.of(*np.divmod(labels.cpu().numpy(), n), method.candidates, n, z.device)
        weights = {kind: message_sums(kind, nodes, candidates, method.fusion)[1] for kind in method.options.messages}
        for kind, weight in weights.items():  # [C, 1]
            totals[kind] += float(weight.sum())
            shares[kind].append(weight / sum(weights.values()))
    found = {f"weight_{kind}": 100 * weight / sum(totals.values()) for kind, weight in totals.items()}
    found |= {f"mean_weight_{kind}": 100 * float(torch.cat(share).mean()) for kind, share in shares.items()}
    z, every = method.paths.adapt(val.cls), np.arange(method.labels.size)
    found["negative_images"] = 100 * float((z < 0).float().mean())
    refined = method.candidates.contains(every)
    for name, mask in {"refined": refined, "others": ~refined}.items():
        if mask.any():
            rows = method.codebook.prototypes(every[mask])
            found[f"cosine_{name}"] = float((z @ rows.T).mean())
            found[f"negative_{name}"] = 100 * float((rows < 0).float().mean())
    return found


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
    if variation.schedule is not None:
        method.follow(variation.schedule, settings)
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
    parser.add_argument("--prototypes", action="store_true", help="also measure messages and prototypes of the graph")
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
            run(inputs, row, settings, int(seed), device, variation, wanted.terms, wanted.prototypes)
            for seed in wanted.seeds.split(",")
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
