"""Score images with a trained method, in batches, and accumulate the few numbers per image that metrics need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.accumulator import ScoreAccumulator
from duplex.evaluation.curve import Margins
from duplex.evaluation.feasibility import (
    BucketNumbers,
    FeasibilityValues,
    Threshold,
    buckets,
    choose_threshold,
    thresholds,
)
from duplex.evaluation.uncertainty import Components
from duplex.features.examples import Examples
from duplex.labels import Bools, CandidateSet, Ints, LabelSpace, World
from duplex.methods.base import Inputs, Method, ScoreBlocks, Scorer

BLOCK_SCORES = 2**24  # scores in memory at once: 64 MiB of float32
BLOCK_COLUMNS = 2**17  # columns of a block where one image has more than BLOCK_SCORES


@dataclass(frozen=True)
class ScoringTask:
    """Candidate compositions and the function that scores images for them, built once for all images of a split."""

    candidates: CandidateSet
    scorer: Scorer
    score_blocks: ScoreBlocks | None = None  # by columns too, if one image has more than BLOCK_SCORES
    name: str = "the method"  # of the method's class, for messages
    built_for: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of one image's inputs

    @classmethod
    def of(cls, method: Method[Any], candidates: Ints | CandidateSet) -> ScoringTask:
        """Return a `ScoringTask` for a method and sorted `candidates`, and set the method to evaluation mode."""
        method.eval()
        size, name, shapes = method.labels.size, method.class_name, method.context.inputs
        if not isinstance(candidates, CandidateSet):
            candidates = CandidateSet(size, None if len(candidates) == size else candidates)
        if candidates.listed is None and size > BLOCK_SCORES:
            blocks = method.score_blocks(max(1, BLOCK_COLUMNS // len(method.labels.objects)))
            if blocks is not None:  # the scorer is built only where blocks by columns do not serve
                return cls(candidates, partial(_score_once, method, candidates.compositions), blocks, name, shapes)
        scorer = method.scorer(candidates.compositions.copy())  # the method may write into it
        return cls(candidates, scorer, name=name, built_for=shapes)

    def blocks(self, inputs: Inputs) -> Iterator[tuple[slice, Tensor]]:
        """Yield all scores in blocks that fit into memory: `(slice of b images, float32 scores [b, candidates])`."""
        for rows, part in _cut(inputs, BLOCK_SCORES // len(self.candidates)):
            scores = self.scorer(part)
            yield rows, checked_scores(self.name, scores, rows.stop - rows.start, len(self.candidates))

    def column_blocks(self, inputs: Inputs) -> Iterator[tuple[slice, int, Tensor]]:
        """Yield all scores in blocks `(slice of images, index of the first candidate, float32 scores [b, w])`.

        A block has b images and w candidates. Candidates are split too if one image's scores are too many for memory.
        """
        if self.score_blocks is None:
            yield from ((rows, 0, scores) for rows, scores in self.blocks(inputs))
            return
        for rows, part in _cut(inputs, BLOCK_SCORES // BLOCK_COLUMNS):
            for first, scores in self.score_blocks(part):
                yield rows, first, checked_scores(self.name, scores, rows.stop - rows.start, scores.shape[1])


def _score_once(method: Method[Any], compositions: Ints, inputs: Inputs) -> Tensor:
    """Build a method's scorer of C `compositions`, use it once, and return the scores [B, C] of B images' `inputs`."""
    return method.scorer(compositions.copy())(inputs)


def checked_scores(method: str, scores: Tensor, images: int, columns: int) -> Tensor:
    """A method's scores, detached; raises `DuplexError` unless they are floating-point numbers [images, columns].

    method: name of the method's class, for the message.
    """
    if scores.shape != (images, columns) or scores.dtype not in (torch.float32, torch.float64):
        found = f"a tensor {list(scores.shape)} of {scores.dtype}"
        raise DuplexError(f"{method} scored images with {found}; expected float32 of shape {[images, columns]}")
    return scores.detach()


def check_shapes(method: str, built_for: Mapping[str, tuple[int, ...]], inputs: Inputs) -> None:
    """Raise `UsageError` if images have inputs of other shapes than a method was built for.

    method: name of the method's class, for the message.
    built_for: shapes of one image's inputs, by name.
    """
    for name in built_for.keys() & inputs.keys():
        expected, present = list(built_for[name]), list(inputs[name].shape[1:])
        if present != expected:
            raise UsageError(
                f"the images' input {name!r} has the shape {present} per image and {method} was built for {expected}; "
                "use features of the same encoder"
            )


class TopCandidates:
    """Indices of each image's best candidates, best first [images, top], updated while scores are computed."""

    def __init__(self, images: int, top: int, device: torch.device) -> None:
        self.columns = torch.full((images, top), -1, device=device)
        self._scores = torch.full((images, top), -torch.inf, device=device)

    def add(self, scores: Tensor, rows: slice, first: int) -> None:
        """Update the best candidates with scores [b, w] of the images `rows` and w candidates from index `first` on."""
        top, width = self.columns.shape[1], scores.shape[1]
        if first == 0 and width >= top:
            self._scores[rows], self.columns[rows] = scores.topk(top, dim=1)
            return
        if not (scores.amax(1) > self._scores[rows, -1]).any():
            return
        block = scores.topk(min(top, width), dim=1)
        values = torch.cat([self._scores[rows], block.values], dim=1)
        columns = torch.cat([self.columns[rows], block.indices + first], dim=1)
        best = values.topk(top, dim=1)
        self._scores[rows], self.columns[rows] = best.values, columns.gather(1, best.indices)


def _cut(inputs: Inputs, limit: int) -> Iterator[tuple[slice, Inputs]]:
    """Split inputs to bound memory: yield `(slice of images, their inputs)`, at most `limit` images at a time.

    A part has fewer images if inputs on disk are large.
    """
    images = len(next(iter(inputs.values())))
    on_disk = [math.prod(values.shape[1:]) for values in inputs.values() if not isinstance(values, Tensor)]
    step = max(1, min(limit, BLOCK_SCORES // sum(on_disk) if on_disk else BLOCK_SCORES))
    for start in range(0, images, step):
        rows = slice(start, min(start + step, images))
        yield rows, {name: values[rows] for name, values in inputs.items()}


@dataclass(frozen=True)
class ScoringResult:
    """Result of scoring a split: score statistics (the numbers per image that metrics need) and best candidates."""

    candidates: CandidateSet
    accumulator: ScoreAccumulator
    top: Ints  # [N, T] best compositions of each image, best first
    further: tuple[ScoreAccumulator, ...] = ()  # statistics of the same scores with other buckets


def score_split(
    task: ScoringTask,
    examples: Examples,
    labels: LabelSpace,
    *,
    k: int = 1,
    bucket: BucketNumbers | None = None,
    feasible_mask: Bools | None = None,
    top: int = 0,
    bias: float = 0.0,
    further: Sequence[BucketNumbers | Bools] = (),
) -> ScoringResult:
    """Score a split in one pass; return score statistics (the numbers per image that metrics need) and best candidates.

    k: largest k of the top-k accuracies to measure.
    bucket: [C] number of each unseen candidate's bucket, its place between thresholds of feasibility (how plausible it
        is); with buckets, one pass measures all thresholds.
    feasible_mask: [C] whether a candidate is feasible; others score -inf.
    top: number of best compositions to keep per image, after adding `bias` to unseen ones.
    further: other bucket numbers [C], for each of which top-1 statistics are accumulated from the same scores.
    """
    candidates = task.candidates
    if not len(examples):
        raise DuplexError("the split has no readable image")
    check_shapes(task.name, task.built_for, examples.inputs)
    if k > len(candidates):
        raise UsageError(f"evaluation.k is {k}; expected at most {len(candidates)}, the number of candidates")
    compositions = examples.compositions.cpu().numpy()
    if not candidates.contains(compositions).all():
        raise DuplexError("an image's label is not among the candidates of its split; check the split's pairs")
    seen = labels.seen if candidates.listed is None else labels.is_seen(candidates.listed)
    target, device = candidates.positions(compositions), examples.compositions.device
    accumulator = ScoreAccumulator(target, seen, k=k, bucket=bucket, feasible_mask=feasible_mask)
    others = tuple(ScoreAccumulator(target, seen, bucket=numbers) for numbers in further)
    best = TopCandidates(len(examples), min(top, len(candidates)), device)
    for rows, first, scores in task.column_blocks(examples.inputs):
        for each in (accumulator, *others):
            each.add(scores, rows, first)
        if top:
            shifts = _score_shifts(seen, feasible_mask, bias, slice(first, first + scores.shape[1]))
            best.add(scores + torch.from_numpy(shifts).to(device, non_blocking=True), rows, first)
    return ScoringResult(candidates, accumulator, candidates.at(best.columns.cpu().numpy()), others)


def _score_shifts(seen: Bools, feasible_mask: Bools | None, bias: float, span: slice) -> NDArray[np.float32]:
    """Return the numbers [w] to add to the scores of a span of candidates: `bias` if unseen, -inf if infeasible."""
    shifts = np.where(seen[span], 0.0, bias).astype(np.float32)
    if feasible_mask is not None:
        shifts[~feasible_mask[span]] = -np.inf
    return shifts


@dataclass(frozen=True)
class FeasibilityChoice:
    """Chosen threshold of feasibility (how plausible a pair is), and validation images' margins with and without it.

    An image's margin is the bias on unseen scores at which it becomes right or wrong.
    """

    threshold: Threshold
    margins: Margins
    margins_all: Margins  # with every composition feasible


def choose_feasible(
    task: ScoringTask, examples: Examples, labels: LabelSpace, sources: Sequence[FeasibilityValues], points: int
) -> list[FeasibilityChoice]:
    """Return a `FeasibilityChoice`, the threshold with the best AUC on **validation** images, for each of `sources`.

    Feasibility: how plausible an unseen composition is. All thresholds of all sources are tried in one pass over the
    scores of the open world.

    sources: feasibility [M*N] by words or by likelihood, +inf for seen compositions.
    points: number of thresholds tried per source.
    """
    steps = [thresholds(feasible, labels.seen, points) for feasible in sources]
    first, *more = (buckets(feasible, tried) for feasible, tried in zip(sources, steps, strict=True))
    result = score_split(task, examples, labels, bucket=first, further=more)
    choices = []
    for accumulator, tried in zip((result.accumulator, *result.further), steps, strict=True):
        chosen = choose_threshold(accumulator, tried)
        statistics = accumulator.competitors(chosen.passing_buckets), accumulator.competitors()
        choices.append(FeasibilityChoice(chosen, *map(Margins.of, statistics)))
    return choices


def score_term_sums(
    method: Method[Any], candidates: Ints, examples: Examples, labels: LabelSpace
) -> dict[tuple[str, ...], ScoreAccumulator]:
    """Return score statistics (the numbers per image that metrics need) of each summand of a method's score.

    Partial sums of several summands are included; keys are tuples of summands' names. Empty if the score is no sum.
    `candidates`: sorted compositions.
    """
    method.eval()
    score_terms = method.score_terms(candidates.copy())
    statistics: dict[tuple[str, ...], ScoreAccumulator] = {}
    if score_terms is None:
        return statistics
    target = np.searchsorted(candidates, examples.compositions.cpu().numpy())
    seen = labels.is_seen(candidates)
    for rows, part in _cut(examples.inputs, BLOCK_SCORES // (8 * len(candidates))):  # room for all terms and a sum
        images = rows.stop - rows.start
        terms = {
            name: checked_scores(method.class_name, scores, images, len(candidates))
            for name, scores in score_terms(part)
            if scores.any()  # no term of weight 0
        }
        if len(terms) < 2:
            break
        for size in range(1, len(terms)):
            for names in combinations(terms, size):
                scores = torch.stack([terms[name] for name in names]).sum(0)
                statistics.setdefault(names, ScoreAccumulator(target, seen)).add(scores, rows)
    return statistics


def tune(method: Method[Any], examples: Examples, labels: LabelSpace) -> None:
    """Let a trained method choose settings, such as weights in its score, by validation AUC (`Method.tune`)."""
    candidates = labels.candidates("closed", "val")
    target = np.searchsorted(candidates, examples.compositions.cpu().numpy())
    seen = labels.is_seen(candidates)

    def auc(scores: Tensor) -> float:
        return Components.of(Margins.of(ScoreAccumulator(target, seen).add(scores).competitors())).auc or 0.0

    method.eval().tune(examples.inputs, candidates.copy(), auc)


def validation_auc(method: Method[Any], examples: Examples, labels: LabelSpace, world: World = "closed") -> float:
    """Return a method's AUC (fraction) on validation images, over the candidates of the closed or open world."""
    return defined_auc(validation_margins(method, examples, labels, world))


def validation_margins(method: Method[Any], examples: Examples, labels: LabelSpace, world: World = "closed") -> Margins:
    """Return the margins of validation images: the bias on unseen scores at which each becomes right or wrong.

    Candidates are those of the closed or open `world`.
    """
    result = score_split(ScoringTask.of(method, labels.candidates(world, "val")), examples, labels)
    return Margins.of(result.accumulator.competitors())


def defined_auc(margins: Margins) -> float:
    """Return the AUC (fraction) of validation images from their margins; raise `DuplexError` if it is undefined.

    It is undefined without images of seen pairs or without images of unseen pairs. An image's margin is the bias on
    unseen scores at which it becomes right or wrong.
    """
    auc = Components.of(margins).auc
    if auc is None:
        raise DuplexError("the validation AUC is undefined; its split needs images of both seen and unseen pairs")
    return auc
