"""Where a trained method meets the evaluation: its scores, block by block, as evidence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.accumulator import Evidence
from duplex.evaluation.curve import Margins
from duplex.evaluation.feasibility import Feasible, Small, Threshold, buckets, choose_threshold, thresholds
from duplex.evaluation.uncertainty import Components
from duplex.features.examples import Examples
from duplex.labels import Bools, Ints, LabelSpace, Target, World
from duplex.methods.base import Inputs, Method, Scorer, Sweep

BLOCK_SCORES = 2**24  # scores held at once: 64 MiB of float32
SWEPT = 2**17  # columns of a block where not even one image's scores are


@dataclass(frozen=True)
class Field:
    """A target set and what scores it: built once, asked in every pass over the same columns."""

    target: Target
    scorer: Scorer
    sweep: Sweep | None = None  # over an open world of which not even one image's scores are held at once

    @classmethod
    def of(cls, method: Method[Any], columns: Ints | Target) -> Field:
        """`columns` are sorted."""
        method.eval()
        size = method.labels.size
        target = columns if isinstance(columns, Target) else Target(size, None if len(columns) == size else columns)
        if target.listed is None and size > BLOCK_SCORES:
            sweep = method.sweep(max(1, SWEPT // len(method.labels.objects)))
            if sweep is not None:
                return cls(target, partial(_ask, method, target), sweep)
        return cls(target, method.scorer(target.columns))

    @property
    def columns(self) -> Ints:
        """Sorted [C]"""
        return self.target.columns

    def blocks(self, inputs: Inputs) -> Iterator[tuple[slice, Tensor]]:
        """`(rows, float32 scores)` over all columns; nothing ever holds images x compositions."""
        for rows, some in _cut(inputs, BLOCK_SCORES // len(self.target)):
            yield rows, self.scorer(some)

    def parts(self, inputs: Inputs) -> Iterator[tuple[slice, int, Tensor]]:
        """`(rows, first column, float32 scores)`: blocks that are cut by columns too where even one image has too many
        scores."""
        if self.sweep is None:
            yield from ((rows, 0, scores) for rows, scores in self.blocks(inputs))
            return
        for rows, some in _cut(inputs, BLOCK_SCORES // SWEPT):
            yield from ((rows, first, scores) for first, scores in self.sweep(some))


def _ask(method: Method[Any], target: Target, inputs: Inputs) -> Tensor:
    return method.scorer(target.columns)(inputs)


class Best:
    """The best `top` columns of each image over blocks of columns, best first [N, top]."""

    def __init__(self, images: int, top: int, device: torch.device) -> None:
        self.columns = torch.full((images, top), -1, device=device)
        self._scores = torch.full((images, top), -torch.inf, device=device)

    def add(self, scores: Tensor, rows: slice, first: int) -> None:
        """A block [b, w] of the columns from `first` on."""
        top, width = self.columns.shape[1], scores.shape[1]
        if first == 0 and width >= top:
            self._scores[rows], self.columns[rows] = scores.topk(top, dim=1)
            return
        if not (scores.amax(1) > self._scores[rows, -1]).any():
            return
        found = scores.topk(min(top, width), dim=1)
        values = torch.cat([self._scores[rows], found.values], dim=1)
        columns = torch.cat([self.columns[rows], found.indices + first], dim=1)
        best = values.topk(top, dim=1)
        self._scores[rows], self.columns[rows] = best.values, columns.gather(1, best.indices)


def _cut(inputs: Inputs, most: int) -> Iterator[tuple[slice, Inputs]]:
    """At most so many images at a time."""
    images = len(next(iter(inputs.values())))
    step = max(1, min(most, _readable(inputs)))
    for start in range(0, images, step):
        rows = slice(start, min(start + step, images))
        yield rows, {name: values[rows] for name, values in inputs.items()}


def _readable(inputs: Inputs) -> int:
    """Images whose inputs on the disk may be in memory at once; inputs that are there anyway do not count."""
    apart = [values.shape[1:] for values in inputs.values() if not isinstance(values, Tensor)]
    return BLOCK_SCORES // sum(math.prod(shape) for shape in apart) if apart else BLOCK_SCORES


@dataclass(frozen=True)
class Pass:
    """One pass over a split in one world."""

    target: Target
    evidence: Evidence
    top: Ints  # each image's best compositions, best first [N, T]

    @property
    def columns(self) -> Ints:
        """The target set, sorted [C]."""
        return self.target.columns


def assess(
    field: Field,
    examples: Examples,
    labels: LabelSpace,
    *,
    k: int = 1,
    bucket: Small | None = None,
    feasible_mask: Bools | None = None,
    top: int = 0,
    bias: float = 0.0,
) -> Pass:
    """Gather what the metrics need from one pass. `bucket` and `live` are the feasibility's, over the columns; the best
    `top` compositions are those once `bias` is added to unseen ones."""
    among = field.target
    if not len(examples):
        raise DuplexError("the split has no readable image")
    if k > len(among):
        raise UsageError(f"k = {k} is more than the {len(among)} compositions to choose from; correct evaluation.k")
    own = examples.compositions.cpu().numpy()
    if not among.holds(own).all():
        raise DuplexError("an image is labelled with a composition outside of its target set; check the split's pairs")
    seen = labels.seen if among.listed is None else labels.is_seen(among.listed)
    evidence, device = (
        Evidence(among.places(own), seen, k=k, bucket=bucket, live=feasible_mask),
        examples.compositions.device,
    )
    best = Best(len(examples), min(top, len(among)), device)
    shifts = Shifts(seen, feasible_mask, bias, device)
    for rows, first, scores in field.parts(examples.inputs):
        evidence.add(scores, rows, first)
        if top:
            best.add(scores + shifts(first, scores.shape[1]), rows, first)
    return Pass(among, evidence, among.at(best.columns.cpu().numpy()))


class Shifts:
    """What is added to the scores of some columns before they are ranked: `bias` to unseen ones; -inf to those that are
    not live. The last columns asked for are remembered."""

    def __init__(self, seen: Bools, live: Bools | None, bias: float, device: torch.device) -> None:
        self._seen, self._live, self._bias, self._device = seen, live, bias, device
        self._last: tuple[tuple[int, int], Tensor] | None = None

    def __call__(self, first: int, width: int) -> Tensor:
        if self._last is None or self._last[0] != (first, width):
            span = slice(first, first + width)
            shift = np.where(self._seen[span], 0.0, self._bias).astype(np.float32)
            if self._live is not None:
                shift[~self._live[span]] = -np.inf
            self._last = (first, width), torch.from_numpy(shift).to(self._device, non_blocking=True)
        return self._last[1]


def choose_feasible(
    field: Field, examples: Examples, labels: LabelSpace, feasible: Feasible, points: int
) -> tuple[Threshold, Bools]:
    """The open world's threshold by AUC on **validation** images, all candidates from one pass over all compositions;
    and the compositions [M*N] that pass it. `feasible` [M*N] is +inf for seen compositions, which always do."""
    steps = thresholds(feasible, labels.seen, points)
    bucket = buckets(feasible, steps)
    chosen = choose_threshold(assess(field, examples, labels, bucket=bucket).evidence, steps)
    return chosen, bucket < steps.size - np.searchsorted(steps, chosen.value)


def assess_sums(
    method: Method[Any], columns: Ints, examples: Examples, labels: LabelSpace
) -> dict[tuple[str, ...], Evidence]:
    """Where a score is a sum: what each part of it, and each sum of some of them, would answer over sorted `columns` in
    its place, by the parts' names. All are of this one model, weighed as in the whole; the whole itself is not among
    them."""
    method.eval()
    parts, own = method.evidence(columns), examples.compositions.cpu().numpy()
    found: dict[tuple[str, ...], Evidence] = {}
    if parts is None:
        return found
    target, seen = np.searchsorted(columns, own), labels.is_seen(columns)
    for rows, some in _cut(examples.inputs, BLOCK_SCORES // (8 * len(columns))):  # all parts and a sum are held at once
        terms = {name: scores for name, scores in parts(some) if scores.any()}  # a part of weight 0 says nothing
        if len(terms) < 2:
            break
        for size in range(1, len(terms)):
            for names in combinations(terms, size):
                scores = torch.stack([terms[name] for name in names]).sum(0)
                found.setdefault(names, Evidence(target, seen)).add(scores, rows)
    return found


def tune(method: Method[Any], examples: Examples, labels: LabelSpace) -> None:
    """Let a trained method choose by validation AUC what is left to choose."""
    columns = labels.target("closed", "val")
    target = np.searchsorted(columns, examples.compositions.cpu().numpy())
    seen = labels.is_seen(columns)

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
