"""`protocol: sampled`: the sweep behind published tables, so that old numbers can be compared with.

After the evaluator of Purushwalkam et al. (2019) that the field's code shares. Biases are sampled from the unseen
images themselves: of those right at b = 1000, the margins `max seen score - s_gt - 0.0001` are sorted and every
`n // 20`-th is tried; the curve is their (unseen, seen) accuracies and the point at b = 1000, joined by straight
lines. Arithmetic stays in single precision (double for doubles) and equal scores fall as `torch.topk` lets them,
because that is what the published numbers did. The exact curve needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.accumulator import Floats
from duplex.evaluation.curve import harmonic_mean
from duplex.evaluation.metrics import Metrics
from duplex.labels import Ints

ScorePass = Callable[[], Iterable[tuple[slice, Any]]]  # each call starts a pass over (rows, scores [b, C])
FAR = 1e3  # stands for b = +inf
INFEASIBLE = -1e10
EPSILON = 1e-4
POINTS = 20


@dataclass(frozen=True)
class _Columns:
    """Labels and masks of the sweep as tensors."""

    target: torch.Tensor  # [N]
    seen: torch.Tensor  # [C]
    live: torch.Tensor  # [C]
    k: int

    def right(self, scores: torch.Tensor, rows: slice, bias: torch.Tensor | float) -> torch.Tensor:
        """[b] whether each label is among the best `k` columns once the bias is added to unseen ones."""
        shifted = torch.where(self.seen, scores, scores + bias)
        shifted = shifted.masked_fill(~self.live, INFEASIBLE)
        best = shifted.topk(self.k, dim=1).indices  # [b, k]
        return (best == self.target[rows, None]).any(dim=1)

    def margins(self, scores: torch.Tensor, rows: slice) -> torch.Tensor:
        """[b] the bias that lifts each label just level with the k-th best seen score."""
        barrier = scores[:, self.seen].topk(self.k, dim=1).values[:, -1]
        own: torch.Tensor = scores.gather(1, self.target[rows, None])[:, 0]
        return barrier - own - EPSILON


def sampled(
    blocks: ScorePass, target: ArrayLike, seen: ArrayLike, live: ArrayLike | None = None, k: int = 1
) -> Metrics:
    """The published numbers of these scores; two passes over the row blocks, memory of one block."""
    mask = torch.as_tensor(np.asarray(seen, dtype=bool))
    alive = torch.ones_like(mask) if live is None else torch.as_tensor(np.asarray(live, dtype=bool))
    columns = _Columns(torch.as_tensor(np.asarray(target, dtype=np.int64)), mask, alive, k)
    if int(mask.sum()) < k:
        raise UsageError(f"the sampled protocol at top-{k} needs at least {k} seen columns, not {int(mask.sum())}")
    is_seen = mask[columns.target]  # [N]
    far, margins = _far_end(blocks, columns)
    chosen = margins[~is_seen & far].sort().values
    biases = chosen[:: max(chosen.numel() // POINTS, 1)]
    hits = _sweep(blocks, columns, is_seen, biases)  # [biases, 2]
    ends = torch.stack([far[is_seen].sum(), far[~is_seen].sum()])[None]
    return _summarise(torch.cat([hits, ends]).numpy(), int(is_seen.sum()), int((~is_seen).sum()), [*biases, FAR], k)


def _tensor(scores: Any, rows: slice) -> torch.Tensor:
    array = scores.detach().cpu().float().numpy() if isinstance(scores, torch.Tensor) else np.asarray(scores)
    wide = np.float64 if array.dtype.kind == "f" and array.dtype.itemsize >= 8 else np.float32
    tensor = torch.from_numpy(np.array(array, dtype=wide))  # published code gathers halves as float32
    bad = torch.isnan(tensor).any(dim=1).nonzero()
    if len(bad):
        raise DuplexError(f"the scores of image {(rows.start or 0) + int(bad[0])} contain NaN; leave that image out")
    return tensor


def _far_end(blocks: ScorePass, columns: _Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """First pass: [N] whether each image is right at b = 1000, and its margin."""
    found = [
        (columns.right(scores, rows, FAR), columns.margins(scores, rows))
        for rows, scores in ((rows, _tensor(block, rows)) for rows, block in blocks())
    ]
    return torch.cat([right for right, _ in found]), torch.cat([margins for _, margins in found])


def _sweep(blocks: ScorePass, columns: _Columns, is_seen: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """Second pass: [biases, 2] how many seen and unseen images are right at each."""
    hits = torch.zeros(len(biases), 2, dtype=torch.int64)
    for rows, block in blocks():
        scores = _tensor(block, rows)
        for place, bias in enumerate(biases):
            right = columns.right(scores, rows, bias)
            hits[place, 0] += (right & is_seen[rows]).sum()
            hits[place, 1] += (right & ~is_seen[rows]).sum()
    return hits


def _summarise(hits: Ints, seen_images: int, unseen_images: int, biases: list[Any], k: int) -> Metrics:
    """Metrics of the points `hits` [biases, 2], the last of which is the far end."""
    images = np.array([seen_images, unseen_images])
    accuracy = np.divide(hits, images, out=np.full(hits.shape, np.nan), where=images > 0)
    best, both = accuracy.max(axis=0), bool(images.all())
    harmonic = harmonic_mean(accuracy[:, 0], accuracy[:, 1])
    return Metrics(
        k=k,
        images_seen=seen_images,
        images_unseen=unseen_images,
        seen=float(best[0]) if seen_images else None,
        unseen=float(best[1]) if unseen_images else None,
        hm=float(harmonic.max()) if both else None,
        auc=_trapezoids(accuracy[:, 0], accuracy[:, 1]) if both else None,
        bias=float(biases[int(harmonic.argmax())]) if both else None,
    )


def _trapezoids(heights: Floats, places: Floats) -> float:
    """Area under straight lines through the points; nothing is added left of the first one."""
    return float(((heights[1:] + heights[:-1]) / 2 * np.diff(places)).sum())
