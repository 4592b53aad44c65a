"""What a pass over blocks of scores keeps of each image: enough for every metric, whatever the number of columns.

A bias moves all unseen columns together, so of the scores of an image only its label's and the best of each group
of columns can ever matter. Groups are the seen columns and one or more buckets of unseen ones (buckets are how all
feasibility thresholds come from one pass). Blocks may be cut by rows, by columns or both; memory is `images x groups`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from duplex.errors import DuplexError, UsageError
from duplex.labels import Bools, Ints

Floats = NDArray[np.float64]
SEEN, DEAD = 0, -1  # groups: unseen buckets are 1, 2, ...
NOWHERE = np.iinfo(np.int64).max
CHUNK = 1 << 18  # scores of a run worked on at a time, so that copies stay in the processor's cache
ORDERED = 1 << 22  # scores whose columns are moved at a time
PLANNED = 1 << 20  # columns whose runs are remembered, some 40 bytes each


@dataclass(frozen=True)
class Run:
    """Columns of a block that belong to one group."""

    group: int
    span: slice  # where they lie once the block is ordered
    positions: Ints  # [run] where they lay before


@dataclass(frozen=True)
class Plan:
    """How a range of columns falls into runs: `run_of` and `place_in` say where each column went ([w], -1 if dead)."""

    order: Ints | None  # of the columns, so that each group's lie together; None where they do
    runs: tuple[Run, ...]
    run_of: Ints
    place_in: Ints
    live: int

    @classmethod
    def of(cls, groups: NDArray[Any]) -> Plan:
        cuts, distinct = np.flatnonzero(np.diff(groups)) + 1, np.unique(groups)
        order = None
        if cuts.size >= 2 * distinct.size:  # not listed group by group: columns are moved
            order = np.argsort(groups, kind="stable")
            groups = groups[order]
            cuts = np.flatnonzero(np.diff(groups)) + 1
        spans = [slice(int(a), int(b)) for a, b in zip(np.r_[0, cuts], np.r_[cuts, groups.size], strict=True)]
        every = np.arange(groups.size) if order is None else order
        runs = tuple(Run(int(groups[s.start]), s, every[s]) for s in spans if groups[s.start] != DEAD)
        run_of, place_in = np.full((2, groups.size), -1, dtype=np.int64)
        for number, run in enumerate(runs):
            run_of[run.positions] = number
            place_in[run.positions] = np.arange(run.positions.size)
        return cls(order, runs, run_of, place_in, int((groups != DEAD).sum()))

    def pieces(self, block: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Some rows of a block at a time, the first one's number before them, columns group by group."""
        if self.order is None:
            yield 0, block
            return
        for rows in _chunks(block.shape[0], block.shape[1], ORDERED):
            yield rows.start, np.take(block[rows], self.order, axis=1)


class Evidence:
    """An accumulator over score blocks of `N` images and `C` target columns.

    `target` [N] is the column of each image's label; `seen` [C] says which columns are seen compositions; `live` [C]
    (default: all) which take part, the rest count as -inf; `bucket` [C] splits unseen columns into buckets 0, 1, ...
    that `upto` can later cut. Columns listed bucket by bucket (see `Evidence.order`) are the fastest to read.
    """

    def __init__(
        self,
        target: ArrayLike,
        seen: ArrayLike,
        *,
        k: int = 1,
        live: ArrayLike | None = None,
        bucket: ArrayLike | None = None,
    ) -> None:
        self.target: Ints = np.asarray(target, dtype=np.int64)
        self.seen: Bools = np.asarray(seen, dtype=bool)
        self.k = k
        _check(self.target, self.seen, k)
        self.groups = _grouped(self.seen, bucket, live)
        shape = (int(max(self.groups.max(), 1)) + 1, self.target.size)
        self._label: Floats = np.full(shape[1], -np.inf)
        self._best: Floats = np.full((*shape, k), -np.inf)  # [G, N, k] best scores other than the label's, descending
        self._column: Ints = np.full(shape, -1, dtype=np.int64)  # [G, N] where the first of them lies
        self._read: Ints = np.zeros(shape[1], dtype=np.int64)  # [N] live columns read
        self._plans: dict[tuple[int, int], Plan] = {}

    @staticmethod
    def order(seen: ArrayLike, bucket: ArrayLike | None = None) -> Ints:
        """A permutation of the columns that lists them group by group; ties keep their order."""
        mask = np.asarray(seen, dtype=bool)
        buckets = np.zeros(mask.size, dtype=np.int64) if bucket is None else np.asarray(bucket, dtype=np.int64)
        return np.argsort(np.where(mask, -1, buckets), kind="stable")

    def add(self, scores: Any, rows: slice | Ints | None = None, first_column: int = 0) -> Evidence:
        """Read a block [b, w]: the images `rows` (default: all) by the columns from `first_column` on.

        A NumPy array or a torch tensor (read as float32) of any real type; it is not written to. One that lies on a
        device is reduced there.
        """
        elsewhere = hasattr(scores, "detach") and scores.device.type != "cpu"
        block = scores if elsewhere else scores.detach().float().numpy() if hasattr(scores, "detach") else scores
        block = block if elsewhere else np.asarray(block)
        where = np.arange(self.target.size)[slice(None) if rows is None else rows]
        fits = block.ndim == 2 and block.shape[0] == where.size and first_column + block.shape[1] <= self.seen.size
        if not fits or first_column < 0 or not (elsewhere or block.dtype.kind in "fiub"):
            raise DuplexError(
                f"a block of scores {block.shape} of {block.dtype} does not fit {where.size} images and the columns "
                f"{first_column} to {self.seen.size}"
            )
        if block.shape[0] and block.shape[1]:
            (self._read_there if elsewhere else self._read_block)(block, where, first_column)
        return self

    def _plan(self, where: Ints, first: int, width: int) -> tuple[Plan, Ints, Ints]:
        """How these columns are read; each label's run (-1: none of them) and its place in it."""
        key = (first, width)
        if key not in self._plans:
            if sum(held for _, held in self._plans) + width > PLANNED:
                self._plans.clear()
            self._plans[key] = Plan.of(self.groups[first : first + width])
        plan = self._plans[key]
        own = self.target[where] - first
        inside = (own >= 0) & (own < width)
        label_run = np.where(inside, plan.run_of[np.where(inside, own, 0)], -1)  # [b]
        return plan, label_run, plan.place_in[np.where(inside, own, 0)]

    def _read_there(self, block: Any, where: Ints, first: int) -> None:
        from duplex.evaluation.topk import reduced

        plan, label_run, label_place = self._plan(where, first, block.shape[1])
        starts = np.array([run.span.start for run in plan.runs] or [0])
        label, best, place = reduced(block, plan, np.where(label_run >= 0, starts[label_run] + label_place, -1), self.k)
        with_label = np.flatnonzero(label_run >= 0)
        self._label[where[with_label]] = label[with_label]
        for run, values, places in zip(plan.runs, best, place, strict=True):
            self._take(run.group, where, values, first + run.positions[places])
        self._read[where] += plan.live

    def _read_block(self, block: NDArray[Any], where: Ints, first: int) -> None:
        plan, label_run, label_place = self._plan(where, first, block.shape[1])
        kind = np.result_type(block.dtype, np.float32)  # wide enough not to overflow
        for start, moved in plan.pieces(block):
            for number, run in enumerate(plan.runs):
                for rows in _chunks(len(moved), run.positions.size):
                    scores = np.array(moved[rows, run.span], dtype=kind, order="C")  # free to be written to
                    there = slice(start + rows.start, min(start + rows.stop, start + len(moved)))
                    mine = np.where(label_run[there] == number, label_place[there], -1)
                    self._read_run(run, scores, where[there], mine, first)
        self._read[where] += plan.live

    def _read_run(self, run: Run, scores: NDArray[Any], where: Ints, mine: Ints, first: int) -> None:
        """Take the labels' own scores out of `scores` [b, run], then its best `k`."""
        with_label = np.flatnonzero(mine >= 0)
        self._label[where[with_label]] = scores[with_label, mine[with_label]]
        scores[with_label, mine[with_label]] = -np.inf
        every = np.arange(where.size)
        best = np.full((where.size, min(self.k, scores.shape[1])), -np.inf)
        for j in range(best.shape[1]):
            place = scores.argmax(axis=1)  # the first of equals; a NaN is the largest, so it cannot hide
            best[:, j] = scores[every, place]
            if j == 0:
                column = first + run.positions[place]
            if j + 1 < best.shape[1]:
                scores[every, place] = -np.inf
        self._take(run.group, where, best, column)

    def _take(self, group: int, where: Ints, best: Floats, column: Ints) -> None:
        """The best `k` [b, k] of some of a group's columns, and where the first of them lies."""
        self._refuse_nan(where, np.isnan(best[:, 0]) | np.isnan(self._label[where]))
        column = np.where(best[:, 0] > -np.inf, column, -1)
        old, old_column = self._best[group], self._column[group]
        old[where], old_column[where] = _merged(old[where], old_column[where], best, column)

    def _refuse_nan(self, where: Ints, found: Bools) -> None:
        bad = np.flatnonzero(found)
        if bad.size:
            raise DuplexError(
                f"the scores of image {where[bad[0]]} contain NaN; mend the model or leave that image out"
            )

    def rivals(self, upto: int | None = None) -> Rivals:
        """Close the pass. With `upto`, only the unseen buckets below it are feasible; the others count as -inf."""
        *_, last = self.cuts(upto)
        return last

    def cuts(self, upto: int | None = None) -> Iterator[Rivals]:
        """The evidence with no, one, two ... unseen buckets feasible, each from the one before it."""
        self._refuse_incomplete()
        groups, images, k = self._best.shape
        unseen, column = np.full((images, k), -np.inf), np.full(images, -1, dtype=np.int64)
        yield self._cut(1, unseen, column)
        for group in range(1, groups if upto is None else min(upto + 1, groups)):
            unseen, column = _merged(unseen, column, self._best[group], self._column[group])
            yield self._cut(group + 1, unseen, column)

    def _cut(self, last: int, unseen: Floats, column: Ints) -> Rivals:
        own = self.groups[self.target]
        return Rivals(
            target=self.target,
            is_seen=self.seen[self.target],
            label=np.where((own != DEAD) & (own < last), self._label, -np.inf),
            seen=self._best[SEEN],
            unseen=unseen,
            seen_column=self._column[SEEN],
            unseen_column=column,
        )

    def _refuse_incomplete(self) -> None:
        live = int((self.groups != DEAD).sum())
        wrong = np.flatnonzero(self._read != live)
        if wrong.size:
            raise DuplexError(f"image {wrong[0]} was given {self._read[wrong[0]]} scores for {live} columns")


@dataclass(frozen=True)
class Rivals:
    """What is kept of `N` images: label scores, the best `k` other scores among seen and among unseen columns."""

    target: Ints  # [N]
    is_seen: Bools  # [N] the label is a seen composition
    label: Floats  # [N] -inf where the label's column is not live
    seen: Floats  # [N, k] descending, -inf where there is none
    unseen: Floats  # [N, k]
    seen_column: Ints  # [N] column of the first, -1 where there is none
    unseen_column: Ints  # [N]

    def prediction(self, bias: float = 0.0) -> Ints:
        """[N] the column with the best score once `bias` is added to unseen ones; -1 if all are -inf.

        Among equal scores the lowest column is predicted.
        """
        label = self.label + np.where(self.is_seen, 0.0, bias)
        scores = np.stack([label, self.seen[:, 0], self.unseen[:, 0] + bias])
        columns = np.stack([self.target, self.seen_column, self.unseen_column])
        top = scores.max(axis=0)
        leads = (scores == top) & (top > -np.inf)
        found = np.where(leads, columns, NOWHERE).min(axis=0)
        return np.where(leads.any(axis=0), found, -1)


def _merged(best: Floats, column: Ints, other: Floats, other_column: Ints) -> tuple[Floats, Ints]:
    """The best `k` [N, k] of two such lists, and the lowest column [N] that holds the first of them."""
    first = (other[:, 0] > best[:, 0]) | ((other[:, 0] == best[:, 0]) & (other_column < column))
    k = best.shape[1]
    both = np.maximum(best, other) if k == 1 else -np.sort(-np.concatenate([best, other], axis=1), axis=1)[:, :k]
    return both, np.where(first, other_column, column)


def _chunks(rows: int, width: int, most: int = CHUNK) -> Iterator[slice]:
    step = max(1, most // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _grouped(seen: Bools, bucket: ArrayLike | None, live: ArrayLike | None) -> NDArray[Any]:
    """The group of each column [C], in integers as narrow as there are buckets."""
    buckets = np.zeros(seen.size, dtype=np.int8) if bucket is None else np.asarray(bucket)
    alive = None if live is None else np.asarray(live, dtype=bool)
    if buckets.shape != seen.shape or (alive is not None and alive.shape != seen.shape) or buckets.min() < 0:
        raise UsageError(f"live and bucket (from 0 on) go with the {seen.size} columns, one value each")
    kind = np.min_scalar_type(-int(buckets.max()) - 2)
    groups = buckets.astype(kind)
    groups += kind.type(1)
    groups[seen] = SEEN
    if alive is not None:
        groups[~alive] = DEAD
    return groups


def _check(target: Ints, seen: Bools, k: int) -> None:
    if target.ndim != 1 or seen.ndim != 1:
        raise UsageError(f"target and seen are lists, not arrays of shape {target.shape} and {seen.shape}")
    if not target.size or not seen.size:
        raise UsageError("there is nothing to evaluate: no images or no target columns")
    if target.min() < 0 or target.max() >= seen.size:
        raise UsageError(f"a target column lies outside of 0 to {seen.size - 1}: {target.min()} to {target.max()}")
    if k < 1:
        raise UsageError(f"k is a whole number from 1 on, not {k}")
