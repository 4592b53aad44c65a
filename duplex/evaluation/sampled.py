"""Sampled bias sweep of published tables (`protocol: sampled`), for comparison with their numbers.

It follows the evaluator of Purushwalkam et al. (2019), which published code shares. Biases are sampled from the unseen
images: of those right at b = 1000, the margins `max seen score - s_gt - 0.0001` are sorted and every
`n // 20`-th is tried; the curve is their (unseen, seen) accuracies and the point at b = 1000, joined by straight
lines. Arithmetic is in single precision (double for float64 scores) and `torch.topk` orders equal scores, as in the
published evaluators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.curve import harmonic_mean
from duplex.evaluation.metrics import Metrics
from duplex.labels import Ints

BlockSource = Callable[[], Iterable[tuple[slice, Any]]]  # returns a new pass over (rows, scores [b, C])
FAR = 1e3  # stands for b = +inf
INFEASIBLE = -1e10
EPSILON = 1e-4
POINTS = 20


@dataclass(frozen=True)
class _Columns:
    """Labels and column masks of the sweep as tensors."""

    target: torch.Tensor  # [N]
    seen: torch.Tensor  # [C]
    feasible: torch.Tensor  # [C]
    k: int

    def right(self, scores: torch.Tensor, rows: slice, bias: torch.Tensor | float) -> torch.Tensor:
        """Return whether each label is among the best `k` columns [b] once the bias is added to unseen ones."""
        shifted = torch.where(self.seen, scores, scores + bias)
        shifted = shifted.masked_fill(~self.feasible, INFEASIBLE)
        best = shifted.topk(self.k, dim=1).indices  # [b, k]
        return (best == self.target[rows, None]).any(dim=1)

    def margins(self, scores: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the bias [b] that raises each label just to the k-th best seen score."""
        barrier = scores[:, self.seen].topk(self.k, dim=1).values[:, -1]
        label: torch.Tensor = scores.gather(1, self.target[rows, None])[:, 0]
        return barrier - label - EPSILON


def sampled_metrics(
    blocks: BlockSource, target: ArrayLike, seen: ArrayLike, feasible_mask: ArrayLike | None = None, k: int = 1
) -> Metrics:
    """Return the metrics that the published sweep gives; `blocks` is called twice, once per pass.

    `target` [N]: column of each label; `seen`, `feasible_mask` [C] (default: all feasible); `k`: top-k.
    """
    mask = torch.as_tensor(np.asarray(seen, dtype=bool))
    feasible = torch.as_tensor(np.asarray(np.ones_like(seen) if feasible_mask is None else feasible_mask, dtype=bool))
    columns = _Columns(torch.as_tensor(np.asarray(target, dtype=np.int64)), mask, feasible, k)
    if int(mask.sum()) < k:
        raise UsageError(
            f"the sampled protocol at k = {k} needs at least {k} seen columns; there are {int(mask.sum())}"
        )
    is_seen = mask[columns.target]  # [N]
    ends_of = [
        (columns.right(scores, rows, FAR), columns.margins(scores, rows))
        for rows, scores in ((rows, _tensor(block, rows)) for rows, block in blocks())
    ]
    far, margins = (torch.cat(parts) for parts in zip(*ends_of, strict=True))  # [N] each
    chosen = margins[~is_seen & far].sort().values
    biases = chosen[:: max(chosen.numel() // POINTS, 1)]
    hits = _sweep(blocks, columns, is_seen, biases)  # [biases, 2]
    ends = torch.stack([far[is_seen].sum(), far[~is_seen].sum()])[None]
    return _summarise(torch.cat([hits, ends]).numpy(), int(is_seen.sum()), int((~is_seen).sum()), [*biases, FAR], k)


def _tensor(scores: Any, rows: slice) -> torch.Tensor:
    array = scores.detach().cpu().float().numpy() if isinstance(scores, torch.Tensor) else np.asarray(scores)
    wide = np.float64 if array.dtype.kind == "f" and array.dtype.itemsize >= 8 else np.float32
    tensor = torch.from_numpy(np.array(array, dtype=wide))  # published code reads half precision as float32
    bad = torch.isnan(tensor).any(dim=1).nonzero()
    if len(bad):
        raise DuplexError(
            f"the scores of image {(rows.start or 0) + int(bad[0])} contain NaN; fix the model or leave that image out"
        )
    return tensor


def _sweep(blocks: BlockSource, columns: _Columns, is_seen: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """Second pass: return how many seen and unseen images are right at each bias [biases, 2]."""
    hits = torch.zeros(len(biases), 2, dtype=torch.int64)
    for rows, block in blocks():
        scores = _tensor(block, rows)
        for place, bias in enumerate(biases):
            right = columns.right(scores, rows, bias)
            hits[place, 0] += (right & is_seen[rows]).sum()
            hits[place, 1] += (right & ~is_seen[rows]).sum()
    return hits


def _summarise(hits: Ints, seen_images: int, unseen_images: int, biases: list[Any], k: int) -> Metrics:
    """Return the metrics of the points `hits` [biases, 2], the last at b = 1000."""
    images = np.array([seen_images, unseen_images])
    accuracy = np.divide(hits, images, out=np.full(hits.shape, np.nan), where=images > 0)
    best, both = accuracy.max(axis=0), bool(images.all())
    harmonic = harmonic_mean(accuracy[:, 0], accuracy[:, 1])
    area = float(((accuracy[1:, 0] + accuracy[:-1, 0]) / 2 * np.diff(accuracy[:, 1])).sum())  # trapezoids
    return Metrics(
        k=k,
        images_seen=seen_images,
        images_unseen=unseen_images,
        seen=float(best[0]) if seen_images else None,
        unseen=float(best[1]) if unseen_images else None,
        hm=float(harmonic.max()) if both else None,
        auc=area if both else None,
        bias=float(biases[int(harmonic.argmax())]) if both else None,
    )
