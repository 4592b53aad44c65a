"""Find each image's best scores per group of columns: seen compositions, and one or more buckets of unseen ones.

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
    """Adjacent columns of a block of scores whose best scores are searched together: only seen or only unseen ones.

    A column is a composition; the block's columns may have been reordered to bring a group's columns together.
    """

    group: int
    span: slice  # in the ordered block
    positions: Ints  # [run] in the unordered block


@dataclass(frozen=True)
class ColumnPlan:
    """How to find best scores per group of columns (seen, unseen compositions): the columns' order and ranges.

    A range holds adjacent columns of one group. Columns are reordered only if groups alternate often.
    """

    order: Ints | None  # [w] permutation that lists the columns group by group; None: leave them in place
    runs: tuple[ColumnRun, ...]  # of the feasible groups
    ordered_position: Ints  # [w] position of each column in the ordered block, -1 for infeasible ones
    feasible: int  # number of feasible columns

    @classmethod
    def of(cls, groups: NDArray[Any]) -> ColumnPlan:
        """The order in which to search the columns of a block of scores, group by group.

        Args:
            groups: group number of each of the block's columns [w]: 0 for seen, from 1 on for unseen, -1 for infeasible
                ones.
        """
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
    """A mask as bool; raises `UsageError` unless its values are true or false, or 1 or 0."""
    array = np.asarray(values)
    if array.dtype != bool and (array.dtype.kind not in "iuf" or not np.isin(array, (0, 1)).all()):
        raise UsageError(f"{name} must be true or false for each column")
    return np.array(array, dtype=bool)  # a copy: the caller may change its own


def group_columns(seen: Bools, bucket: ArrayLike | None, feasible_mask: ArrayLike | None) -> NDArray[Any]:
    """The group number of each composition (column) [C]: 0 if seen, 1 + bucket if unseen, -1 if infeasible.

    The integer type is the narrowest that holds the numbers. Raise `UsageError` for other shapes or values.

    Args:
        seen: mask of the seen columns [C].
        bucket: number of each unseen column's group, from 0 [C] (default: 0 for all).
        feasible_mask: mask of the feasible columns [C] (default: all).
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
    """Each image's label score, and its best `k` other scores in each range of columns that belong to one group.

    The results are label scores [b] (-inf if the position is -1), the best other scores [R, b, k], and the place of the
    best one [R, b]. Scores descend along `k`, filled up with -inf. A place counts from the start of its range and is
    the first of equal scores. NaN counts as the largest, so that callers find it.

    Args:
        block: scores [b, w], a NumPy array; they are not changed.
        plan: order and ranges of the block's columns, with R ranges.
        label_position: position of each label in the ordered block [b]; -1 if the label is not among its feasible
            columns.
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
    """Write each image's k best scores into `best` [b, k], descending; return the column of the best score [b].

    scores: of b images for w columns [b, w]; they are overwritten.
    """
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
    if plan.order is None:
        yield 0, block
        return
    for rows in _row_slices(len(block), block.shape[1], BLOCK_REORDERED):
        yield rows.start, np.take(block[rows], plan.order, axis=1)


def _row_slices(rows: int, width: int, scores: int) -> Iterator[slice]:
    step = max(1, scores // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def topk_per_group_torch(block: Tensor, plan: ColumnPlan, label_position: Ints, k: int) -> TopK:
    """Each image's label score and its best `k` other scores per group of columns, for a torch tensor `block`.

    Computes on the tensor's device; otherwise like `topk_per_group`, which describes arguments and results.
    """
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
