"""Compare values of `added_variance` for runs of `dual` with fine-tuned blocks, on validation images.

python -m benchmarks.added_variance --datasets shapes,shapes-split1 --method dual@4 --seeds 0 --folder FOLDER
python -m benchmarks.added_variance --datasets photos --method dual@4 --block-rate 3e-4 --block-epochs 6 --folder FOLDER

FOLDER holds runs that `benchmarks.splits` stored, with the same options. A run's blocks and prompts stay as they were
trained; the closed form is fitted again to the training features that the blocks compute, with each value.

Printed are validation AUC, closed world / all pairs, cross-fitted: the weights of the score terms are chosen on one
half of the validation pairs and measured on the other half, and vice versa. `spread` is the variance of validation
images about the mean of their pair's training images, divided by that of the training images themselves: features of
the frozen encoder, then of the fine-tuned blocks. It is 1 if new images vary as much as training images.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.methods import Bench
from benchmarks.splits import with_blocks
from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.evaluation.accumulator import ScoreAccumulator
from duplex.evaluation.curve import Margins
from duplex.evaluation.uncertainty import Components
from duplex.labels import WORLDS, Bools, Ints
from duplex.layers.factors import unit
from duplex.layers.weight_search import Weights, search_weights
from duplex.library.inputs import load_inputs
from duplex.library.run_training import MethodSpec
from duplex.methods.base import Batch
from duplex.methods.closed_form import INITIAL_WEIGHTS, ClosedFormMethod
from duplex.training.checkpoint import load_checkpoint, read_checkpoint

VALUES = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
FEWEST = 5  # training images of a pair that counts in the spread
IMAGES = 256  # whose features are computed at once


def pair_halves(compositions: Ints, trained: Ints) -> Ints:
    """Divide the pairs into two halves and return for each image the number (0 or 1) of its pair's half.

    Both halves have the same number of seen pairs, and of unseen pairs, up to one.

    trained: the seen pairs, which have training images.
    """
    pairs = np.unique(compositions)
    halves, random = np.zeros(len(pairs), dtype=np.int64), np.random.default_rng(0)
    seen = np.isin(pairs, trained)
    for group in (seen, ~seen):
        order = random.permutation(np.flatnonzero(group))
        halves[order[: len(order) // 2]] = 1
    return halves[np.searchsorted(pairs, compositions)]


def spread(train: Tensor, train_labels: Tensor, new: Tensor, new_labels: Tensor) -> float:
    """Return the variance of new images' features about their pair's training mean, divided by that of training images.

    The mean is estimated from the pair's n training images. The training images' variance is therefore multiplied by
    n / (n - 1) and the new images' by n / (n + 1).

    train, new: unit features [B, d]. train_labels, new_labels: compositions [B].
    """
    squares, new_squares, images, new_images = 0.0, 0.0, 0, 0
    for composition in train_labels.unique():
        x, y = train[train_labels == composition].double(), new[new_labels == composition].double()
        n = len(x)
        if n < FEWEST or not len(y):
            continue
        mean = x.mean(0)
        squares += float((x - mean).square().sum()) * n / (n - 1)
        new_squares += float((y - mean).square().sum()) * n / (n + 1)
        images, new_images = images + n, new_images + len(y)
    return (new_squares / new_images) / (squares / images)


def auc(scores: Tensor, target: Ints, seen: Bools) -> float:
    """Return the area under the curve of seen and unseen accuracy, in percent, of scores [B, C].

    target: column of each image's label [B]. seen: mask of the columns of seen pairs [C]."""
    return 100 * (Components.of(Margins.of(ScoreAccumulator(target, seen).add(scores).competitors())).auc or 0.0)


def measured(params: Params, dataset: str, method: str, run: Path) -> dict[str, Any]:
    """Return the `spread` of frozen and of fine-tuned features, and added variance -> AUC by `crossfitted`."""
    spec = MethodSpec.of(params, dataset, method)
    inputs = load_inputs(params, dataset, ArtifactPaths(), spec.request)
    finetuned: Any = load_checkpoint(read_checkpoint(run), inputs.task(), inputs.encoder).eval()
    train, val, labels = inputs.examples["train"], inputs.examples["val"], inputs.labels

    def features(inputs: Any) -> Tensor:
        tokens = inputs["block_inputs"]  # in memory or on the disk
        parts = (tokens[start : start + IMAGES] for start in range(0, tokens.shape[0], IMAGES))
        return unit(torch.cat([finetuned.blocks(part) for part in parts]))

    z, z_val = features(train.inputs), features(val.inputs)
    raw, raw_val = unit(train.inputs["cls"]), unit(val.inputs["cls"])
    found: dict[str, Any] = {
        "frozen": spread(raw, train.compositions, raw_val, val.compositions),
        "finetuned": spread(z, train.compositions, z_val, val.compositions),
    }
    halves = pair_halves(val.compositions.numpy(), labels.pairs["train"])
    for value in VALUES:
        options = replace(finetuned.method.options, added_variance=value)
        form = ClosedFormMethod(finetuned.method.context, options).eval()
        form.load_state_dict(finetuned.method.state_dict())
        form.counts.zero_()  # so that `start` fits again
        form.start(Batch({"cls": z}, train.compositions))
        found[f"{value:g}"] = crossfitted(form, z_val, val.compositions, halves)
    return found


def crossfitted(form: ClosedFormMethod, z: Tensor, labels: Tensor, halves: Ints) -> list[float]:
    """Return AUC in the closed world and over all pairs, with weights chosen on the other half of the pairs."""
    form.weights.fill_(1.0)
    candidates: dict[str, Ints] = {world: form.labels.candidates(world, "val") for world in WORLDS}
    terms = {world: [term for _, term in form.score_terms(c)({"cls": z})] for world, c in candidates.items()}

    def auc_with(weights: Weights, world: str, kept: Bools) -> float:
        scores = torch.stack([w * term for w, term in zip(weights, terms[world], strict=True)]).sum(0)[kept]
        target = np.searchsorted(candidates[world], labels.numpy()[kept])
        return auc(scores, target, form.labels.is_seen(candidates[world]))

    first = tuple(INITIAL_WEIGHTS[term] for term in form.options.inference)
    aucs: dict[str, list[float]] = {world: [] for world in WORLDS}
    for half in (0, 1):
        weights = search_weights(first, partial(auc_with, world="closed", kept=halves == half))
        for world in WORLDS:
            aucs[world].append(auc_with(weights, world, halves != half))
    return [fmean(aucs[world]) for world in WORLDS]


def line(dataset: str, seed: int, found: dict[str, Any]) -> str:
    aucs = ("{}: {:.2f} / {:.2f}".format(f"{value:g}", *found[f"{value:g}"]) for value in VALUES)
    return f"{dataset} seed {seed}: spread {found['frozen']:.2f} -> {found['finetuned']:.2f}; {', '.join(aucs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="shapes")
    parser.add_argument("--method", default="dual@4", help="a method of kind closed_form and its number of blocks")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--block-rate", type=float, default=1e-3, help="learning rate of fine-tuned blocks")
    parser.add_argument("--block-epochs", type=int, help="epochs of methods with fine-tuned blocks")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "duplex-splits")
    wanted = parser.parse_args()
    params = with_blocks(load_params(), [wanted.method], wanted.block_rate, wanted.block_epochs)
    with torch.no_grad():
        for dataset in wanted.datasets.split(","):
            bench = Bench(params, dataset, wanted.folder)
            for seed in map(int, wanted.seeds.split(",")):
                place = bench.place(wanted.method, params.training(dataset, wanted.method).learning_rate, seed)
                found = measured(params, dataset, wanted.method, place.checkpoint)
                print(line(dataset, seed, found), flush=True)


if __name__ == "__main__":
    main()
