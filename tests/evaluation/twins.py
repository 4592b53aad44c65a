"""Plain, slow computations of the same numbers, which tests compare the fast ones with."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Problem:
    """Scores of a few images and everything needed to evaluate them."""

    scores: np.ndarray  # [N, C]
    target: np.ndarray  # [N]
    seen: np.ndarray  # [C]
    feasible: np.ndarray  # [C]


def problem(
    rng: np.random.Generator, images: int = 12, columns: int = 9, levels: int = 0, feasible: float = 1.0
) -> Problem:
    """Random scores; with `levels`, whole numbers below it, so that many are equal."""
    shape = (images, columns)
    scores = rng.integers(0, levels, shape).astype(float) if levels else rng.standard_normal(shape)
    return Problem(
        scores=scores.astype(np.float32), target=rng.integers(0, columns, images), seen=rng.random(columns) < 0.6,
        feasible=rng.random(columns) < feasible
    )  # fmt: skip


def is_right(p: Problem, image: int, bias: float, k: int) -> bool:
    """Add the bias, mask, and count the columns that score at least as much as the label."""
    row, label = p.scores[image].astype(np.float64), p.target[image]
    biased = np.where(p.feasible, row + np.where(p.seen, 0.0, bias), -np.inf)
    if biased[label] == -np.inf:
        return False
    return sum(biased[c] >= biased[label] for c in range(row.size) if c != label and biased[c] > -np.inf) < k


def candidate_biases(p: Problem) -> list[float]:
    """One bias within each interval between differences of two scores of an image, and one beyond each end."""
    differences = {0.0}
    for row in p.scores.astype(np.float64):
        for a in row[np.isfinite(row)]:
            differences.update(float(a - b) for b in row[np.isfinite(row)])
    marks = sorted(differences)
    inner = [(a + b) / 2 for a, b in pairwise(marks)]
    reach = 1 + 2 * max(abs(marks[0]), abs(marks[-1]))
    return [-reach, *inner, reach]


def naive(p: Problem, k: int = 1) -> dict[str, float | None]:
    """S, U, best HM and AUC by trying every bias; AUC as the area under straight lines through all points."""
    points = []
    for bias in candidate_biases(p):
        right = np.array([is_right(p, image, bias, k) for image in range(p.target.size)])
        points.append((right, p.seen[p.target]))
    seen = [float(r[s].mean()) if s.any() else None for r, s in points]
    unseen = [float(r[~s].mean()) if (~s).any() else None for r, s in points]
    if seen[0] is None or unseen[0] is None:
        return {"seen": seen[0], "unseen": unseen[-1], "hm": None, "auc": None}
    area = unseen[0] * seen[0]  # images right at every bias
    for i in range(1, len(points)):
        area += (unseen[i] - unseen[i - 1]) * (seen[i] + seen[i - 1]) / 2
    means = [2 * s * u / (s + u) if s + u else 0.0 for s, u in zip(seen, unseen, strict=True)]
    return {"seen": seen[0], "unseen": unseen[-1], "hm": max(means), "auc": area}


def published_sweep(
    scores: torch.Tensor, target: torch.Tensor, seen: torch.Tensor, feasible: torch.Tensor, k: int = 1
) -> dict[str, float]:
    """The sampled sweep of published evaluators, on whole matrices."""
    image_seen = seen[target]
    seen_rows, feasible_rows = seen.repeat(len(scores), 1), feasible.repeat(len(scores), 1)

    def hits(bias: Any) -> torch.Tensor:
        work = scores.clone()
        work[~seen_rows] += bias
        closed = work.clone()
        closed[~feasible_rows] = -1e10
        return (closed.topk(k, dim=1)[1] == target[:, None]).any(1).float()

    at_end = hits(1e3)
    gap = scores[~image_seen][:, seen].topk(k, dim=1)[0][:, -1] - scores[~image_seen, target[~image_seen]]
    gap = torch.sort(gap[at_end[~image_seen].bool()] - 1e-4)[0]
    tried = [hits(bias) for bias in gap[:: max(len(gap) // 20, 1)]] + [at_end]
    s = np.array([float(hit[image_seen].mean()) for hit in tried])
    u = np.array([float(hit[~image_seen].mean()) for hit in tried])
    hm = np.array([2 * a * b / (a + b) if a + b else 0.0 for a, b in zip(s, u, strict=True)])
    return {"seen": s.max(), "unseen": u.max(), "hm": hm.max(), "auc": float(np.trapezoid(s, u)), "biases": len(tried)}


def literal_components(seen: np.ndarray, unseen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """DeLong's V10 and V01 by comparing every pair; a NaN wins no comparison."""
    wins = (seen[:, None] > unseen[None]) + 0.5 * (seen[:, None] == unseen[None])
    return wins.mean(axis=1), wins.mean(axis=0)
