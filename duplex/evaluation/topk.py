"""A block of scores reduced where it lies: of each image its label's score and the best of each run of columns leave
the device, whatever the number of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.labels import Ints

if TYPE_CHECKING:
    from duplex.evaluation.accumulator import Plan

Reduced = tuple[NDArray[np.float64], NDArray[np.float64], Ints]


def reduced(scores: Tensor, plan: Plan, own: Ints, k: int) -> Reduced:
    """Label scores [b], -inf where a label is not among these columns; for each of R runs the best `k` other scores
    [R, b, k], falling, and the place in the run of the first of them [R, b].

    `scores` [b, w] are not written to; `own` [b] is each label's column once they are ordered, -1 where there is none.
    """
    device = scores.device
    ordered = scores.detach().float()
    if plan.order is None:
        ordered = ordered.clone()
    else:
        ordered = ordered.index_select(1, torch.from_numpy(plan.order).to(device, non_blocking=True))
    mine = torch.from_numpy(own).to(device, non_blocking=True)[:, None]
    there = mine.clamp(min=0)
    label = ordered.gather(1, there)
    ordered.scatter_(1, there, label.masked_fill(mine >= 0, -torch.inf))
    values, places = [label.masked_fill(mine < 0, -torch.inf)], []
    for run in plan.runs:
        best, place = _best(ordered[:, run.span], k)
        values.append(best)
        places.append(place)
    whole = torch.cat([*values, *places], dim=1).cpu().numpy()  # in double precision: a place is a whole number
    runs = len(plan.runs)
    of_runs = whole[:, 1 : 1 + runs * k].reshape(len(whole), runs, k).transpose(1, 0, 2)
    return whole[:, 0], of_runs, whole[:, 1 + runs * k :].T.astype(np.int64)


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best `k` of each row [b, k], -inf where there are fewer, and where the first lies [b, 1]: the first of
    equals; a NaN is the largest."""
    found, first = scores.new_full((len(scores), k), -torch.inf, dtype=torch.float64), None
    for j in range(min(k, scores.shape[1])):
        place = scores.argmax(1, keepdim=True)
        first = place if first is None else first
        found[:, j] = scores.gather(1, place)[:, 0]
        scores.scatter_(1, place, -torch.inf)
    assert first is not None  # a run has a column
    return found, first.double()
