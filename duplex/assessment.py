"""Where a trained network meets the evaluation: its scores, block by block, as evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.curve import Margins
from duplex.evaluation.evidence import Evidence, Floats
from duplex.evaluation.feasibility import Threshold, buckets, choose_threshold, thresholds
from duplex.evaluation.uncertainty import Components
from duplex.features.examples import Examples
from duplex.labels import Bools, Ints, LabelSpace
from duplex.model.network import Network

BLOCK_SCORES = 2**24  # scores held at once: 64 MiB of float32


@dataclass(frozen=True)
class Pass:
    """One pass over a split in one world."""

    columns: Ints  # the target set, sorted [C]
    evidence: Evidence
    top: Ints  # each image's best compositions at b = 0, best first [N, T]


def score_blocks(network: Network, z: Tensor, columns: Ints) -> Iterator[tuple[slice, Tensor]]:
    """`(rows, float32 scores)` of a target set; nothing ever holds images x compositions."""
    scores = network.scorer(columns)
    rows = max(1, BLOCK_SCORES // len(columns))
    for start in range(0, len(z), rows):
        block = slice(start, min(start + rows, len(z)))
        yield block, scores(z[block])


def assess(
    network: Network,
    examples: Examples,
    labels: LabelSpace,
    columns: Ints,
    *,
    k: int = 1,
    bucket: Ints | None = None,
    live: Bools | None = None,
    top: int = 0,
) -> Pass:
    """Gather what the metrics need from one pass. `bucket` and `live` are the feasibility's, over `columns`."""
    if not len(examples):
        raise DuplexError("the split has no readable image")
    if k > len(columns):
        raise UsageError(f"k = {k} is more than the {len(columns)} compositions to choose from; correct evaluation.k")
    own = examples.compositions.cpu().numpy()
    target = np.searchsorted(columns, own)
    if (columns[np.minimum(target, len(columns) - 1)] != own).any():
        raise DuplexError("an image is labelled with a composition outside of its target set; check the split's pairs")
    network.eval()
    evidence = Evidence(target, labels.seen[columns], k=k, bucket=bucket, live=live)
    best = np.empty((len(examples), min(top, len(columns))), dtype=np.int64)
    dead = None if live is None else torch.as_tensor(~live, device=examples.z.device)
    for rows, scores in score_blocks(network, examples.z, columns):
        evidence.add(scores, rows)
        if top:
            ranked = scores if dead is None else scores.masked_fill(dead, -torch.inf)
            best[rows] = columns[ranked.topk(best.shape[1], dim=1).indices.cpu().numpy()]
    return Pass(columns, evidence, best)


def choose_feasible(
    network: Network, examples: Examples, labels: LabelSpace, feasible: Floats, points: int
) -> tuple[Threshold, Bools]:
    """The open world's threshold by AUC on **validation** images, all candidates from one pass; and the compositions
    [M*N] that pass it. `feasible` [M*N] is +inf for seen compositions, which always do."""
    steps = thresholds(feasible, labels.seen, points)
    every = labels.target("open", "val")
    chosen = choose_threshold(assess(network, examples, labels, every, bucket=buckets(feasible, steps)).evidence, steps)
    return chosen, feasible >= chosen.value


def validation_auc(network: Network, examples: Examples, labels: LabelSpace) -> float:
    """Closed-world AUC of the validation split: the one number that selects checkpoints."""
    found = assess(network, examples, labels, labels.target("closed", "val"))
    auc = Components.of(Margins.of(found.evidence.rivals())).auc
    if auc is None:
        raise DuplexError("the validation split needs images of seen and of unseen pairs; its AUC is undefined")
    return auc
