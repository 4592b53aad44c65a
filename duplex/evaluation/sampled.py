"""Metrics from a sample of about 20 biases (`protocol: sampled`), for comparison with published tables.

The biases are those of the evaluator of Purushwalkam et al. (2019). Of the `n` images of unseen pairs that are right at
the bias 1000, the margins `max seen score - label's score - 0.0001` are sorted, and every `n // 20`-th is used as a
bias. Straight lines join the curve's points at these biases and at 1000. Arithmetic has single precision (for float64
scores double), and `torch.topk` decides between equal scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.accumulate import refuse_inexact
from duplex.evaluation.metrics import Metrics, harmonic_mean
from duplex.labels import Ints

BlockSource = Callable[[], Iterable[tuple[slice, Any]]]  # returns a new pass over (rows, scores [b, C])
FAR = 1e3  # stands for b = +inf
INFEASIBLE = -1e10
EPSILON = 1e-4
POINTS = 20


def sampled_metrics(
    blocks: BlockSource, target: ArrayLike, seen: ArrayLike, feasible_mask: ArrayLike | None = None, k: int = 1
) -> Metrics:
    """The metrics at about 20 sampled biases, as published tables compute them.

    Args:
        blocks: gives all scores in blocks `(slice of images, scores [b, C])`; it is called twice.
        target: column of each image's label [N].
        seen, feasible_mask: masks of the columns [C] (default: all feasible).
    """
    mask = torch.as_tensor(np.asarray(seen, dtype=bool))
    feasible = torch.as_tensor(np.asarray(np.ones_like(seen) if feasible_mask is None else feasible_mask, dtype=bool))
    labels = torch.as_tensor(np.asarray(target, dtype=np.int64))
    if int(mask.sum()) < k:
        raise UsageError(
            f"the sampled protocol at k = {k} needs at least {k} seen columns; there are {int(mask.sum())}"
        )
    is_seen = mask[labels]  # [N]

    def is_right(scores: torch.Tensor, rows: slice, bias: torch.Tensor | float) -> torch.Tensor:
        shifted = torch.where(mask, scores, scores + bias).masked_fill(~feasible, INFEASIBLE)
        return (shifted.topk(k, dim=1).indices == labels[rows, None]).any(dim=1)  # [b]

    far_parts = []
    margin_parts = []
    for rows, block in blocks():
        scores = _tensor(block, rows)
        barrier = scores[:, mask].topk(k, dim=1).values[:, -1]
        margin = barrier - scores.gather(1, labels[rows, None])[:, 0] - EPSILON  # raises a label to the k-th seen score
        far_parts.append(is_right(scores, rows, FAR))
        margin_parts.append(margin)
    far, margins = torch.cat(far_parts), torch.cat(margin_parts)  # [N] each
    chosen = margins[~is_seen & far].sort().values
    biases = chosen[:: max(chosen.numel() // POINTS, 1)]
    hits = torch.zeros(len(biases), 2, dtype=torch.int64)  # seen and unseen images that are right at each bias
    for rows, block in blocks():
        scores = _tensor(block, rows)
        for place, bias in enumerate(biases):
            right = is_right(scores, rows, bias)
            hits[place, 0] += (right & is_seen[rows]).sum()
            hits[place, 1] += (right & ~is_seen[rows]).sum()
    ends = torch.stack([far[is_seen].sum(), far[~is_seen].sum()])[None]
    return _summarise(torch.cat([hits, ends]).numpy(), int(is_seen.sum()), int((~is_seen).sum()), [*biases, FAR], k)


def _tensor(scores: Any, rows: slice) -> torch.Tensor:
    array = scores.detach().cpu().float().numpy() if isinstance(scores, torch.Tensor) else np.asarray(scores)
    refuse_inexact(array)
    wide = np.float64 if array.dtype.kind == "f" and array.dtype.itemsize >= 8 else np.float32
    tensor = torch.from_numpy(np.array(array, dtype=wide))  # published code reads half precision as float32
    bad = torch.isnan(tensor).any(dim=1).nonzero()
    if len(bad):
        raise DuplexError(
            f"the scores of image {(rows.start or 0) + int(bad[0])} contain NaN; fix the model or leave that image out"
        )
    return tensor


def _summarise(hits: Ints, seen_images: int, unseen_images: int, biases: list[Any], k: int) -> Metrics:
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
