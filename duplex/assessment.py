"""Where a trained method meets the evaluation: its scores, block by block, as evidence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.curve import Margins
from duplex.evaluation.evidence import Evidence, Floats
from duplex.evaluation.feasibility import Threshold, buckets, choose_threshold, thresholds
from duplex.evaluation.uncertainty import Components
from duplex.features.examples import Examples
from duplex.labels import Bools, Ints, LabelSpace, World
from duplex.methods.base import Inputs, Method, Scorer

BLOCK_SCORES = 2**24  # scores held at once: 64 MiB of float32


@dataclass(frozen=True)
class Field:
    """A target set and what scores it: built once, asked in every pass over the same columns."""

    columns: Ints  # sorted [C]
    scorer: Scorer

    @classmethod
    def of(cls, method: Method[Any], columns: Ints) -> Field:
        method.eval()
        return cls(columns, method.scorer(columns))

    def blocks(self, inputs: Inputs) -> Iterator[tuple[slice, Tensor]]:
        """`(rows, float32 scores)`; nothing ever holds images x compositions."""
        images = len(next(iter(inputs.values())))
        rows = max(1, min(BLOCK_SCORES // len(self.columns), _readable(inputs)))
        for start in range(0, images, rows):
            block = slice(start, min(start + rows, images))
            yield block, self.scorer({name: values[block] for name, values in inputs.items()})


def _readable(inputs: Inputs) -> int:
    """Images whose inputs on the disk may be in memory at once; inputs that are there anyway do not count."""
    apart = [values.shape[1:] for values in inputs.values() if not isinstance(values, Tensor)]
    return BLOCK_SCORES // sum(math.prod(shape) for shape in apart) if apart else BLOCK_SCORES


@dataclass(frozen=True)
class Pass:
    """One pass over a split in one world."""

    columns: Ints  # the target set, sorted [C]
    evidence: Evidence
    top: Ints  # each image's best compositions, best first [N, T]


def assess(
    field: Field,
    examples: Examples,
    labels: LabelSpace,
    *,
    k: int = 1,
    bucket: Ints | None = None,
    live: Bools | None = None,
    top: int = 0,
    bias: float = 0.0,
) -> Pass:
    """Gather what the metrics need from one pass. `bucket` and `live` are the feasibility's, over the columns; the best
    `top` compositions are those once `bias` is added to unseen ones."""
    columns = field.columns
    if not len(examples):
        raise DuplexError("the split has no readable image")
    if k > len(columns):
        raise UsageError(f"k = {k} is more than the {len(columns)} compositions to choose from; correct evaluation.k")
    own = examples.compositions.cpu().numpy()
    target = np.searchsorted(columns, own)
    if (columns[np.minimum(target, len(columns) - 1)] != own).any():
        raise DuplexError("an image is labelled with a composition outside of its target set; check the split's pairs")
    evidence = Evidence(target, labels.seen[columns], k=k, bucket=bucket, live=live)
    best = np.empty((len(examples), min(top, len(columns))), dtype=np.int64)
    shift = torch.as_tensor(np.where(labels.seen[columns], 0.0, bias), dtype=torch.float32)
    if live is not None:
        shift[torch.as_tensor(~live)] = -torch.inf
    shift = shift.to(examples.compositions.device)
    for rows, scores in field.blocks(examples.inputs):
        evidence.add(scores, rows)
        if top:
            best[rows] = columns[(scores + shift).topk(best.shape[1], dim=1).indices.cpu().numpy()]
    return Pass(columns, evidence, best)


def choose_feasible(
    field: Field, examples: Examples, labels: LabelSpace, feasible: Floats, points: int
) -> tuple[Threshold, Bools]:
    """The open world's threshold by AUC on **validation** images, all candidates from one pass over all compositions;
    and the compositions [M*N] that pass it. `feasible` [M*N] is +inf for seen compositions, which always do."""
    steps = thresholds(feasible, labels.seen, points)
    chosen = choose_threshold(assess(field, examples, labels, bucket=buckets(feasible, steps)).evidence, steps)
    return chosen, feasible >= chosen.value


def tune(method: Method[Any], examples: Examples, labels: LabelSpace) -> None:
    """Let a trained method choose by validation AUC what is left to choose."""
    columns = labels.target("closed", "val")
    target = np.searchsorted(columns, examples.compositions.cpu().numpy())
    seen = labels.seen[columns]

    def auc(scores: Tensor) -> float:
        return Components.of(Margins.of(Evidence(target, seen).add(scores).rivals())).auc or 0.0

    method.eval()
    method.tune(examples.inputs, columns, auc)


def validation_auc(method: Method[Any], examples: Examples, labels: LabelSpace, world: World = "closed") -> float:
    """AUC of the validation split in the world that the method is trained for: the one number that selects
    checkpoints."""
    found = assess(Field.of(method, labels.target(world, "val")), examples, labels)
    auc = Components.of(Margins.of(found.evidence.rivals())).auc
    if auc is None:
        raise DuplexError("the validation split needs images of seen and of unseen pairs; its AUC is undefined")
    return auc
