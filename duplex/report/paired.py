"""The difference of two methods' closed-world metrics on the same images and seeds, with an interval over both."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from duplex.evaluation.curve import Margins
from duplex.evaluation.intervals import NAMES, Difference, compare_seeds
from duplex.report.aggregate import RunRecord, margins_of
from duplex.report.verdicts import Gap

ROUNDS = 400  # of the bootstrap: one for each pair of rows of a page
Runs = Mapping[int, RunRecord]  # by seed


class PairedGaps:
    """Differences of pairs of methods, each pair compared once for all metrics."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], Mapping[str, Difference]] = {}

    def gap(self, left: Runs, right: Runs, metric: str) -> Gap | None:
        """Metric of `left` minus `right` in points; None with one seed, or without their images' answers."""
        if metric not in NAMES or len(left) < 2 or sorted(left) != sorted(right):
            return None
        key = (id(left), id(right))
        if key not in self._found:
            self._found[key] = _compared(left, right)
        found = self._found[key].get(metric)
        if found is None or found.interval is None:
            return None
        low, high = found.interval
        return Gap(100 * found.value, 100 * low, 100 * high)


def _compared(left: Runs, right: Runs) -> Mapping[str, Difference]:
    ours, theirs = [_margins(runs, sorted(left)) for runs in (left, right)]
    every = [*ours, *theirs]
    if len(ours) != len(theirs) or len(ours) < len(left):
        return {}
    if not all(np.array_equal(each.is_seen, every[0].is_seen) for each in every):
        return {}
    return compare_seeds(theirs, ours, ROUNDS)


def _margins(runs: Runs, seeds: list[int]) -> list[Margins]:
    answers = [runs[seed].predictions for seed in seeds]
    margins = [margins_of(each, "closed") for each in answers if each is not None]
    return [each for each in margins if each is not None]
