"""Find the best scores in each group of columns: seen compositions, and unseen ones in one or more buckets.

A bucket holds the unseen columns between two feasibility thresholds, so that all thresholds are tried in one pass over
the scores. There are two implementations, in NumPy and in torch, because torch's `argmax` is many times slower than
NumPy's on a CPU, and importing torch takes longer than evaluating a score file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from duplex.errors import UsageError
from duplex.labels import Bools, Ints

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_REORDERED = 1 << 22  # scores whose columns are reordered at a time
BLOCK_SEARCHED = 1 << 18  # scores searched at a time, so that copies stay in the processor's cache
TopK = tuple[NDArray[np.float64], NDArray[np.float64], Ints]


SEEN, INFEASIBLE = 0, -1  # group numbers; unseen buckets are 1, 2, ...


@dataclass(frozen=True)
class ColumnRun:
    """A range of adjacent columns that belong to the same group, in a score block with reordered columns."""

    group: int
    span: slice  # in the ordered block
    positions: Ints  # [run] in the unordered block


@dataclass(frozen=True)
class ColumnPlan:
    """Order of a score block's columns such that each group is one run of adjacent columns, or a few runs."""

    order: Ints | None  # [w] permutation that lists the columns group by group; None: leave them in place
    runs: tuple[ColumnRun, ...]  # of the feasible groups
    ordered_position: Ints  # [w] position of each column in the ordered block, -1 for infeasible ones
    feasible: int  # number of feasible columns

    @classmethod
    def of(cls, groups: NDArray[Any]) -> ColumnPlan:
        """Return the plan of a score block whose columns belong to `groups` [w]."""
        cuts = np.flatnonzero(np.diff(groups)) + 1
        positions, order = np.arange(groups.size), None
        if cuts.size >= 2 * np.unique(groups).size:  # groups alternate often: move the columns
            positions = order = np.argsort(groups, kind="stable")
            groups = groups[order]
            cuts = np.flatnonzero(np.diff(groups)) + 1
        spans = [slice(int(a), int(b)) for a, b in zip(np.r_[0, cuts], np.r_[cuts, groups.size], strict=True)]
        runs = [ColumnRun(int(groups[s.start]), s, positions[s]) for s in spans if groups[s.start] != INFEASIBLE]
        ordered_position = np.full(groups.size, -1, dtype=np.int64)
        for run in runs:
            ordered_position[run.positions] = np.arange(run.span.start, run.span.stop)
        return cls(order, tuple(runs), ordered_position, int((groups != INFEASIBLE).sum()))


def checked_mask(values: Any, name: str) -> Bools:
    """Return a mask as bool; raise `UsageError` unless its values are true or false, or 1 or 0. `name` is for the
    message."""
    array = np.asarray(values)
    if array.dtype != bool and (array.dtype.kind not in "iuf" or not np.isin(array, (0, 1)).all()):
        raise UsageError(f"{name} must be true or false for each column")
    return np.array(array, dtype=bool)  # a copy: the caller may change its own


def group_columns(seen: Bools, bucket: ArrayLike | None, feasible_mask: ArrayLike | None) -> NDArray[Any]:
    """Return the group number of each column [C]: 0 for seen, 1 + bucket for unseen, -1 for infeasible columns.

    The type is the narrowest that holds the numbers. `seen` [C]; `bucket` [C]: numbers from 0 on of unseen columns
    (default: one bucket); `feasible_mask` [C] (default: all).
    """
    buckets = np.zeros(seen.size, dtype=np.int8) if bucket is None else np.asarray(bucket)
    feasible = None if feasible_mask is None else checked_mask(feasible_mask, "feasible_mask")
    is_whole = buckets.shape == seen.shape and buckets.dtype.kind in "iub" and buckets.min() >= 0
    if not is_whole or (feasible is not None and feasible.shape != seen.shape):
        raise UsageError(
            f"feasible_mask and bucket must have one value for each of the {seen.size} columns, and no bucket below 0; "
            "buckets are whole numbers"
        )
    kind = np.min_scalar_type(-int(buckets.max()) - 2)
    groups = buckets.astype(kind)
    groups += kind.type(1)
    groups[seen] = SEEN
    if feasible is not None:
        groups[~feasible] = INFEASIBLE
    return groups


def topk_per_group(block: NDArray[Any], plan: ColumnPlan, label_position: Ints, k: int) -> TopK:
    """Return label scores [b], the best `k` other scores per run of columns [R, b, k] and the place of the best [R, b].

    `block` [b, w] is not changed. `label_position` [b] is the position of each label in the ordered block, -1 (label
    score -inf) if it is not a feasible column of it. Scores fall along `k`, filled up with -inf; a place counts from
    the start of its run and is the first of equal scores. NaN counts as the largest, so that callers find it.
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


def _search(scores: NDArray[Any], best: NDArray[np.float64]) -> Ints:
    """Write each row's best scores into `best` [b, k] and return the best column [b]; overwrites `scores` [b, w]."""
    rows, depth = np.arange(len(scores)), min(best.shape[1], scores.shape[1])
    places = []
    for j in range(depth):
        places.append(scores.argmax(axis=1))
        best[:, j] = scores[rows, places[-1]]
        if j + 1 < depth:
            scores[rows, places[-1]] = -np.inf
    first: Ints = places[0]
    return first


def _ordered(block: NDArray[Any], plan: ColumnPlan) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield (first row, part of a score block with its columns in the plan's order)."""
    if plan.order is None:
        yield 0, block
        return
    for rows in _row_slices(len(block), block.shape[1], BLOCK_REORDERED):
        yield rows.start, np.take(block[rows], plan.order, axis=1)


def _row_slices(rows: int, width: int, scores: int) -> Iterator[slice]:
    """Yield slices of `rows` rows of `width` scores; a slice has at most `scores` scores but at least one row."""
    step = max(1, scores // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def topk_per_group_torch(block: Tensor, plan: ColumnPlan, label_position: Ints, k: int) -> TopK:
    """Return the result of `topk_per_group` for a torch tensor [b, w], searched on its device."""
    import torch

    device = block.device
    exact = block.dtype in (torch.float64, torch.int64, torch.int32)
    ordered = block.detach().double() if exact else block.detach().float()
    if plan.order is None:
        ordered = ordered.clone()
    else:
        ordered = ordered.index_select(1, torch.from_numpy(plan.order).to(device, non_blocking=True))
    position = torch.from_numpy(label_position).to(device, non_blocking=True)[:, None]
    column = position.clamp(min=0)
    label = ordered.gather(1, column)
    ordered.scatter_(1, column, label.masked_fill(position >= 0, -torch.inf))
    values, places = [label.masked_fill(position < 0, -torch.inf)], []
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
    table = torch.cat([*values, *places], dim=1).cpu().numpy()  # one copy; double precision holds places exactly
    runs = len(plan.runs)
    best_scores = table[:, 1 : 1 + runs * k].reshape(len(table), runs, k).transpose(1, 0, 2)
    return table[:, 0], best_scores, table[:, 1 + runs * k :].T.astype(np.int64)
