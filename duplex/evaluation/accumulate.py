"""Reduce score matrices to score statistics, the few numbers per image that metrics need.

A score matrix has a row per image and a column per composition; it may be added in blocks of any
rows and columns. Calibration adds one bias to the scores of all unseen compositions, so metrics
depend only on three things: the score of an image's label, its best scores among seen columns, and
its best scores among unseen ones. To try all feasibility thresholds in one pass, unseen columns
are divided into *buckets*, those between two thresholds. The seen columns and each bucket are
*groups*; memory is proportional to images times groups. Infeasible columns are left out.

On a CPU, NumPy searches the scores: torch's `argmax` is many times slower there, and importing
torch takes longer than evaluating a score file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from duplex.errors import DuplexError, UsageError, require_whole
from duplex.labels import Bools, Ints

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
TopK = tuple[Floats, Floats, Ints]
BLOCK_REORDERED = 1 << 22  # scores whose columns are reordered at a time
BLOCK_SEARCHED = 1 << 18  # scores searched at a time, so that copies stay in the processor's cache
SEEN, INFEASIBLE = 0, -1  # group numbers; unseen buckets are 1, 2, ...
NO_COLUMN = np.iinfo(np.int64).max


@dataclass(frozen=True)
class ColumnRun:
    """Adjacent columns of one group (seen, or one bucket of unseen pairs) in an ordered block."""

    group: int
    span: slice  # in the ordered block
    positions: Ints  # [run] in the unordered block


@dataclass(frozen=True)
class ColumnOrder:
    """Order in which to read a block's columns, in runs of one group."""

    order: Ints | None  # [w] permutation that lists columns group by group; None: as they are
    runs: tuple[ColumnRun, ...]  # of the feasible groups
    ordered_position: Ints  # [w] position of each column in the ordered block; -1: infeasible
    feasible: int  # number of feasible columns

    @classmethod
    def of(cls, groups: NDArray[Any]) -> ColumnOrder:
        """Plan how to read w columns; `groups` [w]: 0 seen; 1, 2, ... buckets; -1 infeasible."""
        cuts = np.flatnonzero(np.diff(groups)) + 1
        positions = np.arange(groups.size)
        order = None
        if cuts.size >= 2 * np.unique(groups).size:  # groups alternate often: move the columns
            positions = order = np.argsort(groups, kind="stable")
            groups = groups[order]
            cuts = np.flatnonzero(np.diff(groups)) + 1
        runs = []
        for start, stop in zip(np.r_[0, cuts].tolist(), np.r_[cuts, groups.size].tolist(), strict=True):
            if groups[start] != INFEASIBLE:
                span = slice(start, stop)
                runs.append(ColumnRun(int(groups[start]), span, positions[span]))
        ordered_position = np.full(groups.size, -1, dtype=np.int64)
        for run in runs:
            ordered_position[run.positions] = np.arange(run.span.start, run.span.stop)
        return cls(order, tuple(runs), ordered_position, int((groups != INFEASIBLE).sum()))


def checked_mask(values: Any, name: str) -> Bools:
    """The mask `values` as a bool array; `UsageError` for values other than true, false, 1, 0."""
    array = np.asarray(values)
    if array.dtype != bool and (array.dtype.kind not in "iuf" or not np.isin(array, (0, 1)).all()):
        raise UsageError(f"{name} must be a mask with true or false (or 1 or 0) for each column")
    return np.array(array, dtype=bool)  # a copy: the caller may change its own


def column_groups(seen: Bools, bucket: ArrayLike | None, feasible_mask: ArrayLike | None) -> NDArray[Any]:
    """Group of each column [C]: -1 if infeasible, 0 if seen, else 1 + `bucket`."""
    buckets = np.zeros(seen.size, dtype=np.int8) if bucket is None else np.asarray(bucket)
    feasible = None if feasible_mask is None else checked_mask(feasible_mask, "'feasible_mask'")
    if feasible is not None and feasible.shape != seen.shape:
        raise UsageError(f"'feasible_mask' has shape {feasible.shape}; expected {seen.shape}, one value per column")
    if buckets.shape != seen.shape or buckets.dtype.kind not in "iub" or buckets.min() < 0:
        raise UsageError(f"'bucket' must hold {seen.size} whole numbers of at least 0, one per column")
    kind = np.min_scalar_type(-int(buckets.max()) - 2)
    groups = buckets.astype(kind)
    groups += kind.type(1)
    groups[seen] = SEEN
    if feasible is not None:
        groups[~feasible] = INFEASIBLE
    return groups


def best_scores_per_group(block: NDArray[Any], plan: ColumnOrder, label_position: Ints, k: int) -> TopK:
    """Labels' scores [b], the `k` best other scores [R, b, k] of R runs of columns, and the best's place.

    A label score is -inf if the label's position is -1. The best scores are in descending order,
    filled up with -inf. Of equal scores, the first counts. NaN counts as the largest.

    plan: order and runs of the block's columns; label_position: in the ordered block [b], or -1.
    """
    dtype = np.result_type(block.dtype, np.float32)  # half precision would overflow
    label = np.full(len(block), -np.inf)
    best = np.full((len(plan.runs), len(block), k), -np.inf)
    place = np.zeros((len(plan.runs), len(block)), dtype=np.int64)
    for first_row, ordered in _ordered(block, plan):
        for number, run in enumerate(plan.runs):
            width = run.span.stop - run.span.start
            for part in _row_slices(len(ordered), width, BLOCK_SEARCHED):
                scores = np.array(ordered[part, run.span], dtype=dtype, order="C")  # a copy
                rows = slice(first_row + part.start, first_row + part.stop)
                column = label_position[rows] - run.span.start
                with_label = np.flatnonzero((column >= 0) & (column < width))
                column = column[with_label]
                label[rows][with_label] = scores[with_label, column]
                scores[with_label, column] = -np.inf
                place[number, rows] = _search(scores, best[number, rows])
    return label, best, place


def _search(scores: NDArray[Any], best: Floats) -> Ints:
    # writes the k best of `scores` [b, w], which are overwritten, into `best` [b, k];
    # returns the column of the first
    rows = np.arange(len(scores))
    depth = min(best.shape[1], scores.shape[1])
    places = []
    for j in range(depth):
        places.append(scores.argmax(axis=1))
        best[:, j] = scores[rows, places[-1]]
        if j + 1 < depth:
            scores[rows, places[-1]] = -np.inf
    return np.asarray(places[0])


def _ordered(block: NDArray[Any], plan: ColumnOrder) -> Iterator[tuple[int, NDArray[Any]]]:
    if plan.order is None:
        yield 0, block
        return
    for rows in _row_slices(len(block), block.shape[1], BLOCK_REORDERED):
        yield rows.start, np.take(block[rows], plan.order, axis=1)


def _row_slices(rows: int, width: int, scores: int) -> Iterator[slice]:
    step = max(1, scores // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def best_scores_per_group_on_device(block: Tensor, plan: ColumnOrder, label_position: Ints, k: int) -> TopK:
    """As `best_scores_per_group`, found by torch on the scores' device."""
    import torch

    device = block.device
    exact = block.dtype in (torch.float64, torch.int64, torch.int32)
    ordered = block.detach().double() if exact else block.detach().float()
    if plan.order is None:
        ordered = ordered.clone()
    else:
        order = torch.from_numpy(plan.order).to(device, non_blocking=True)
        ordered = ordered.index_select(1, order)
    position = torch.from_numpy(label_position).to(device, non_blocking=True)[:, None]
    column = position.clamp(min=0)
    label = ordered.gather(1, column)
    ordered.scatter_(1, column, label.masked_fill(position >= 0, -torch.inf))
    values = [label.masked_fill(position < 0, -torch.inf)]
    places = []
    for run in plan.runs:
        scores = ordered[:, run.span]
        best = scores.new_full((len(scores), k), -torch.inf, dtype=torch.float64)
        for j in range(min(k, scores.shape[1])):
            place = scores.argmax(1, keepdim=True)
            best[:, j] = scores.gather(1, place)[:, 0]
            scores.scatter_(1, place, -torch.inf)
            if j == 0:
                places.append(place.double())
        values.append(best)
    # one copy; double precision holds places exactly
    table = torch.cat([*values, *places], dim=1).cpu().numpy()
    runs = len(plan.runs)
    best_scores = table[:, 1 : 1 + runs * k].reshape(len(table), runs, k).transpose(1, 0, 2)
    return table[:, 0], best_scores, table[:, 1 + runs * k :].T.astype(np.int64)


class ScoreAccumulator:
    """Collects what metrics need from the scores of `N` images for `C` columns, added in blocks.

    Raises `UsageError` for invalid arguments. Columns sorted by group (seen ones, then each
    bucket) are read fastest.

    Args:
        target: column of each image's label [N].
        seen: mask of the columns that are seen compositions [C].
        k: the largest k for which top-k accuracy is to be measured.
        feasible_mask: mask of the columns that count [C] (default: all); the others score -inf.
        bucket: the step (0, 1, ...) in which `cumulative` adds each unseen column [C] to the seen
            ones (default: 0).
    """

    def __init__(
        self,
        target: ArrayLike,
        seen: ArrayLike,
        *,
        k: int = 1,
        feasible_mask: ArrayLike | None = None,
        bucket: ArrayLike | None = None,
    ) -> None:
        self.target: Ints = checked_label_columns(target, "'target'")
        self.seen: Bools = checked_mask(seen, "'seen'")
        self.k = require_whole(k, "k")
        if self.target.ndim != 1 or self.seen.ndim != 1:
            shapes = f"{self.target.shape} and {self.seen.shape}"
            raise UsageError(f"'target' and 'seen' must each have one dimension; their shapes are {shapes}")
        columns = self.seen.size
        if not self.target.size or not columns:
            raise UsageError(f"'target' has {self.target.size} images and 'seen' {columns} columns; neither may be 0")
        low, high = self.target.min(), self.target.max()
        if low < 0 or high >= columns:
            raise UsageError(f"'target' holds {low} to {high}; expected column numbers from 0 to {columns - 1}")
        self.groups = column_groups(self.seen, bucket, feasible_mask)
        images = self.target.size
        groups = int(max(self.groups.max(), 1)) + 1
        self._label: Floats = np.full(images, -np.inf)
        # best scores other than the label's, descending, and the column of the first of them
        self._best: Floats = np.full((groups, images, k), -np.inf)
        self._column: Ints = np.full((groups, images), -1, dtype=np.int64)
        self._read: Ints = np.zeros(images, dtype=np.int64)  # feasible columns read
        self._plans: dict[tuple[int, int], ColumnOrder] = {}

    def add(self, scores: Any, rows: slice | Ints | None = None, first_column: int = 0) -> ScoreAccumulator:
        """Add a block of scores [b images, w columns]; returns self.

        Args:
            scores: NumPy array or torch tensor of any real type; it is not changed.
            rows: indices or slice of the block's b images (default: all images).
            first_column: number of the block's first column; the other w - 1 columns follow it.
        """
        is_tensor = hasattr(scores, "detach")
        on_device = is_tensor and scores.device.type != "cpu"
        if not on_device:
            if is_tensor:
                scores = scores.detach()
                if scores.is_floating_point() and scores.itemsize < 4:  # bfloat16
                    scores = scores.float()
            scores = np.asarray(scores)
        first_column = require_whole(first_column, "first_column", 0, self.seen.size)
        images = np.atleast_1d(np.arange(self.target.size)[slice(None) if rows is None else rows])
        left = self.seen.size - first_column
        fits = scores.ndim == 2 and len(scores) == images.size and scores.shape[1] <= left
        if not fits or not (on_device or scores.dtype.kind in "fiub"):
            raise DuplexError(
                f"the block of scores has shape {tuple(scores.shape)} and type {scores.dtype}; expected a numeric "
                f"type, {images.size} rows (one per image) and at most {left} columns"
            )
        if not images.size or not scores.shape[1]:
            return self
        plan = self._plan(first_column, scores.shape[1])
        column = self.target[images] - first_column
        inside = (column >= 0) & (column < scores.shape[1])
        label_position = np.where(inside, plan.ordered_position[np.where(inside, column, 0)], -1)
        search = best_scores_per_group_on_device if on_device else best_scores_per_group
        label, best, place = search(scores, plan, label_position, self.k)
        is_nan = np.isnan(label) | np.isnan(best[:, :, 0]).any(axis=0)
        if is_nan.any():
            raise DuplexError(
                f"the scores of image {images[is_nan][0]} (counted from 0) contain NaN; correct the model that "
                "computed them, or remove the image from the scores and 'target'"
            )
        with_label = label_position >= 0
        self._label[images[with_label]] = label[with_label]
        for run, run_best, run_place in zip(plan.runs, best, place, strict=True):
            column = np.where(run_best[:, 0] > -np.inf, first_column + run.positions[run_place], -1)
            scores, columns = self._best[run.group], self._column[run.group]
            scores[images], columns[images] = _merged(scores[images], columns[images], run_best, column)
        np.add.at(self._read, images, plan.feasible)  # counts an image that `rows` lists twice
        return self

    def _plan(self, first: int, width: int) -> ColumnOrder:
        if (first, width) not in self._plans:
            self._plans[first, width] = ColumnOrder.of(self.groups[first : first + width])
        return self._plans[first, width]

    def competitors(self, buckets: int | None = None) -> TopCompetitors:
        """Score statistics for seen columns and the unseen ones in the first `buckets`."""
        steps = None if buckets is None else require_whole(buckets, "buckets", 0) + 1
        *_, last = islice(self.cumulative(), steps)
        return last

    def cumulative(self) -> Iterator[TopCompetitors]:
        """Yield score statistics for seen columns, then with one more unseen bucket each time."""
        feasible = int((self.groups != INFEASIBLE).sum())
        wrong = np.flatnonzero(self._read != feasible)
        if wrong.size:
            raise DuplexError(
                f"image {wrong[0]} has {self._read[wrong[0]]} scores for {feasible} columns; add exactly one per column"
            )
        groups, images, k = self._best.shape
        unseen = np.full((images, k), -np.inf)
        column = np.full(images, -1, dtype=np.int64)
        yield self._statistics(1, unseen, column)
        for group in range(1, groups):
            unseen, column = _merged(unseen, column, self._best[group], self._column[group])
            yield self._statistics(group + 1, unseen, column)

    def _statistics(self, groups: int, unseen: Floats, column: Ints) -> TopCompetitors:
        group = self.groups[self.target]
        return TopCompetitors(
            target=self.target,
            is_seen=self.seen[self.target],
            label=np.where((group != INFEASIBLE) & (group < groups), self._label, -np.inf),
            seen=self._best[SEEN],
            unseen=unseen,
            seen_column=self._column[SEEN],
            unseen_column=column,
            columns=self.seen.size,
        )


def checked_label_columns(values: Any, name: str) -> Ints:
    """Column numbers of labels as int64; raises `UsageError` unless they are whole numbers."""
    array = np.asarray(values)
    is_whole = array.dtype.kind in "iu"
    if array.dtype.kind == "f":
        is_whole = bool((np.abs(array) < 2.0**62).all() and (array == np.trunc(array)).all())
    if not is_whole:
        raise UsageError(f"{name} must be whole numbers: the column of each image's label")
    return np.array(array, dtype=np.int64)  # a copy: the caller may change its own


def checked_names(values: Any, columns: int, noun: str) -> NDArray[Any]:
    """Names of columns as an array; raises `UsageError` unless there are `columns` names."""
    array = np.asarray(values)
    if array.shape != (columns,):
        raise UsageError(f"{noun} has the shape {array.shape}; expected ({columns},), one name per column")
    return array


@dataclass(frozen=True)
class TopCompetitors:
    """Of `N` images, the label's score and the `k` best others of seen and unseen columns."""

    target: Ints  # [N]
    is_seen: Bools  # [N] whether the label is a seen composition
    label: Floats  # [N] -inf where the label's column is infeasible
    seen: Floats  # [N, k] descending, filled up with -inf
    unseen: Floats  # [N, k]
    seen_column: Ints  # [N] column of the first, -1 if there is none
    unseen_column: Ints  # [N]
    columns: int  # number C of columns

    def best_columns(self, bias: float = 0.0) -> Ints:
        """Each image's predicted column [N] at a `bias`: the first of the best; -1 if all are -inf."""
        label = self.label + np.where(self.is_seen, 0.0, bias)
        scores = np.stack([label, self.seen[:, 0], self.unseen[:, 0] + bias])
        columns = np.stack([self.target, self.seen_column, self.unseen_column])
        top = scores.max(axis=0)
        leads = (scores == top) & (top > -np.inf)
        return np.where(leads.any(axis=0), np.where(leads, columns, NO_COLUMN).min(axis=0), -1)


def _merged(best: Floats, column: Ints, other: Floats, other_column: Ints) -> tuple[Floats, Ints]:
    # the best k of both [N, k], and the column of the top score [N], the lowest of equal ones
    first = (other[:, 0] > best[:, 0]) | ((other[:, 0] == best[:, 0]) & (other_column < column))
    k = best.shape[1]
    both = np.maximum(best, other)
    if k > 1:
        both = -np.sort(-np.concatenate([best, other], axis=1), axis=1)[:, :k]
    return both, np.where(first, other_column, column)
