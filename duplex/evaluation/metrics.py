"""Metrics of scored images: S, U, best HM and AUC, with 95 % confidence intervals, and how every table writes them.

Chao et al. (2016) trace the curve of seen against unseen accuracy by trying biases on unseen pairs' scores. Here the
bias `d` at which each image becomes right or wrong, its margin, is computed from its scores, and sorting the margins
gives every point of the curve. At a bias `b`, an image of a seen pair is right iff `b < d`, one of an unseen pair iff
`b > d`. Over `N_s` images `i` of seen pairs and `N_u` images `j` of unseen pairs, ties counting one half, `AUC = #{(i,
j): d_i > d_j} / (N_s N_u)`.

AUC is a Mann-Whitney statistic, so its variance follows from one number per image (DeLong et al., 1988). S, U and HM
are bootstrapped over images, those of seen and of unseen pairs separately, because a test set fixes how many of each
there are.

Stored metrics are percentages, by the names on the left of `METRICS`; `NAME_low` and `NAME_high` are the ends of the
interval. A number that is not defined is a dash.

`protocol: sampled` computes them from a sample of about 20 biases, for comparison with published tables; `exact` has
them too, in the group `sampled`, from the margins. The biases are those of the evaluator of Purushwalkam et al. (2019).
Of the `n` images of unseen pairs that are right at the bias 1000, the margins `max seen score - label's score - 0.0001`
are sorted, and every `n // 20`-th is used as a bias. Straight lines join the curve's points at these biases and at
1000. Arithmetic has single precision (for float64 scores double), and `torch.topk` decides between equal scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from duplex.errors import DuplexError, UsageError, require_whole, shown
from duplex.evaluation.accumulate import Floats, TopCompetitors, checked_names, refuse_inexact
from duplex.labels import GROUPS, Bools, FrequencyGroups, Ints

if TYPE_CHECKING:
    import pandas as pd
    import torch

Interval = tuple[float, float]
NORMAL_95 = 1.959963984540054
ROUNDS = 1000  # of a bootstrap
NO_PERCENTAGES = {"k", "bias", "images_seen", "images_unseen"}
MISSING = "–"
METRICS = {"seen": "S", "unseen": "U", "hm": "HM", "auc": "AUC"}
OPEN_METRICS = {"auc_all": "AUC, all pairs", "auc_by_words": "AUC, by words"}
PART_METRICS = {"hm_at_val_bias": "HM, validation bias", "state_accuracy": "state", "object_accuracy": "object"}
TIPS = {
    "S": "accuracy on images of seen pairs when unseen pairs are excluded",
    "U": "accuracy on images of unseen pairs when seen pairs are excluded",
    "HM": "best harmonic mean of seen and unseen accuracy over all biases",
    "AUC": "area under the seen–unseen curve",
    "AUC 95 %": "interval over test images, mean of the seeds' intervals",
    "AUC, all pairs": "open world with every pair a candidate, no feasibility threshold",
    "AUC, by words": "open world with the feasibility threshold by words that validation chose: the published protocol",
    "HM, validation bias": "harmonic mean at the bias chosen on validation, which predictions use",
    "state": "accuracy of the predicted state, no bias",
    "object": "accuracy of the predicted object, no bias",
}
BlockSource = Callable[[], Iterable[tuple[slice, Any]]]  # returns a new pass over (rows, scores [b, C])
FAR = 1e3  # stands for b = +inf, in `sampled_metrics`
INFEASIBLE = -1e10
EPSILON = 1e-4
POINTS = 20


@dataclass(frozen=True)
class Margins:
    """The margin of each image: the bias on unseen scores at which it becomes right or wrong; NaN if it is never right.

    An image is right when fewer than `k` other columns score at least as much as its label. A label that ties for the
    last place is therefore wrong, and the order of columns cannot matter.
    """

    seen: Floats  # [N_s] +inf: right at every bias
    unseen: Floats  # [N_u] -inf: right at every bias
    is_seen: Bools  # [N] mask of the images of `seen`; the others are those of `unseen`

    @classmethod
    def of(cls, competitors: TopCompetitors, k: int = 1) -> Margins:
        """Margins for top-`k` accuracy; `k` is at most that of the accumulator."""
        if not (isinstance(k, Integral) and 1 <= k <= competitors.seen.shape[1]):
            raise UsageError(
                f"k is {shown(k)}; expected 1 to {competitors.seen.shape[1]}, the k of the score accumulator"
            )
        is_seen = competitors.is_seen
        same = np.where(is_seen[:, None], competitors.seen, competitors.unseen)[:, :k]
        other = np.where(is_seen[:, None], competitors.unseen, competitors.seen)[:, :k]
        ahead = (same >= competitors.label[:, None]).sum(axis=1)  # a: in the label's group, which no bias moves
        barrier = other[np.arange(is_seen.size), np.clip(k - 1 - ahead, 0, k - 1)]  # the (k - a)-th of the other group
        with np.errstate(invalid="ignore", over="ignore"):
            d = np.where(is_seen, competitors.label - barrier, barrier - competitors.label)
        never = (ahead >= k) | (competitors.label == -np.inf) | (d == np.where(is_seen, -np.inf, np.inf))
        d = np.where(never, np.nan, d)
        return cls(d[is_seen], d[~is_seen], is_seen)

    def right(self, bias: float = 0.0) -> Bools:
        """Mask [N] of the images that are right if `bias` is added to unseen pairs' scores."""
        right = np.empty(self.is_seen.size, dtype=bool)
        right[self.is_seen] = bias < self.seen
        right[~self.is_seen] = bias > self.unseen
        return right


@dataclass(frozen=True)
class Curve:
    """Seen–unseen curve: accuracy on images of seen and of unseen pairs at its points `p = 0 .. P`, by rising bias.

    Breakpoints are the P biases at which an image becomes right or wrong; point `p` is the interval of biases between
    breakpoints `p - 1` and `p`. An image of a seen pair is right at the points up to `seen_until`, one of an unseen
    pair from the point `unseen_from` on.
    """

    breakpoints: Floats  # [P] distinct biases at which an image becomes right or wrong, ascending
    seen_until: Ints  # [N_s] -1: never
    unseen_from: Ints  # [N_u] P + 1: never

    @classmethod
    def of(cls, margins: Margins) -> Curve:
        """The curve of images with these `margins`."""
        both = np.concatenate([margins.seen, margins.unseen])
        breakpoints = np.unique(both[np.isfinite(both)])
        seen_until = np.searchsorted(breakpoints, margins.seen, side="left")
        unseen_from = np.searchsorted(breakpoints, margins.unseen, side="left") + 1
        unseen_from = np.where(margins.unseen == -np.inf, 0, unseen_from)
        never_seen, never_unseen = np.isnan(margins.seen), np.isnan(margins.unseen)
        unseen_from = np.where(never_unseen, breakpoints.size + 1, unseen_from)
        return cls(breakpoints, np.where(never_seen, -1, seen_until), unseen_from)

    def resampled(self, seen: Ints | slice, unseen: Ints | slice) -> tuple[Floats, Floats]:
        """Accuracies [P + 1] over `seen` and `unseen` images chosen by index; repeated indices count repeatedly."""
        points = self.breakpoints.size
        return share_right_until(self.seen_until[seen], points), share_right_from(self.unseen_from[unseen], points)

    @cached_property
    def seen_accuracies(self) -> Floats:
        """Accuracy on images of seen pairs [P + 1], falling; NaN without such images."""
        return share_right_until(self.seen_until, self.breakpoints.size)

    @cached_property
    def unseen_accuracies(self) -> Floats:
        """Accuracy on images of unseen pairs [P + 1], rising; NaN without such images."""
        return share_right_from(self.unseen_from, self.breakpoints.size)

    @cached_property
    def harmonic(self) -> Floats:
        """Harmonic mean of both accuracies [P + 1]."""
        return harmonic_mean(self.seen_accuracies, self.unseen_accuracies)

    def bias(self, point: int) -> float:
        """A bias that leads to a `point` from 0 to P: the middle of its interval, or a value beyond the breakpoints."""
        v = self.breakpoints
        if not v.size:
            return 0.0
        if point == 0:
            return float(v[0] - max(1.0, abs(v[0])))
        if point == v.size:
            return float(v[-1] + max(1.0, abs(v[-1])))
        return float(v[point - 1] / 2 + v[point] / 2)

    def table(self, limit: int | None = 500) -> pd.DataFrame:
        """The curve as a table with the columns `bias, seen, unseen, hm`, accuracies as fractions.

        Args:
            limit: approximate number of points, evenly spread, with the curve's ends and best HM; None: all points.
        """
        points = np.arange(self.breakpoints.size + 1)
        if limit is not None and points.size > limit:
            seen, unseen = np.nan_to_num(self.seen_accuracies), np.nan_to_num(self.unseen_accuracies)
            travelled = unseen - seen  # rises along the curve
            marks = np.searchsorted(travelled, np.linspace(travelled[0], travelled[-1], max(limit - 2, 2)))
            best = 0 if np.isnan(self.harmonic).all() else int(np.nanargmax(self.harmonic))
            points = np.unique(np.r_[marks, best])  # marks begin and end with the curve
        import pandas as pd

        accuracies = {"seen": self.seen_accuracies, "unseen": self.unseen_accuracies, "hm": self.harmonic}
        columns = {name: values[points] for name, values in accuracies.items()}
        return pd.DataFrame({"bias": [self.bias(int(p)) for p in points], **columns})


def share_right_until(until: Ints, breakpoints: int) -> Floats:
    """Share of images that are right at each of the P + 1 points, given the last one of each image (-1: none)."""
    counts = np.bincount(until + 1, minlength=breakpoints + 2)[1:]
    return _share(np.cumsum(counts[::-1])[::-1], until.size)


def share_right_from(since: Ints, breakpoints: int) -> Floats:
    """Share of images that are right at each of the P + 1 points, given the first one of each image (P + 1: none)."""
    return _share(np.cumsum(np.bincount(since, minlength=breakpoints + 2)[:-1]), since.size)


def _share(counts: Ints, images: int) -> Floats:
    return counts / images if images else np.full(counts.size, np.nan)


def harmonic_mean(seen: Floats, unseen: Floats) -> Floats:
    """The elementwise harmonic mean of seen and unseen accuracies; 0 where both are 0."""
    total = seen + unseen
    return np.divide(2 * seen * unseen, total, out=np.where(np.isnan(total), np.nan, 0.0), where=total > 0)


@dataclass(frozen=True)
class Components:
    """Each image's part of AUC; the variance of the parts gives the standard error of AUC (DeLong's method).

    It is the share of the images of the other kind (of seen or of unseen pairs) for which some bias makes both images
    right; ties count one half.
    """

    seen: Floats  # [N_s] V10_i = mean_j (d_i > d_j) + (d_i = d_j) / 2
    unseen: Floats  # [N_u] V01_j, the mean over i

    @classmethod
    def of(cls, margins: Margins) -> Components:
        if not margins.seen.size or not margins.unseen.size:
            return cls(np.full(margins.seen.size, np.nan), np.full(margins.unseen.size, np.nan))
        seen = np.sort(margins.seen[~np.isnan(margins.seen)])
        unseen = np.sort(margins.unseen[~np.isnan(margins.unseen)])
        below = _rank(unseen, margins.seen) / margins.unseen.size
        above = (seen.size - _rank(seen, margins.unseen)) / margins.seen.size
        return cls(
            np.where(np.isnan(margins.seen), 0.0, below),  # NaN: never right
            np.where(np.isnan(margins.unseen), 0.0, above),
        )

    @property
    def auc(self) -> float | None:
        """AUC as a fraction; None without images of seen or of unseen pairs."""
        return float(self.seen.mean()) if self.seen.size and self.unseen.size else None

    @property
    def standard_error(self) -> float | None:
        """DeLong's; None with fewer than two images of seen or of unseen pairs."""
        if min(self.seen.size, self.unseen.size) < 2:
            return None
        return math.sqrt(self.seen.var(ddof=1) / self.seen.size + self.unseen.var(ddof=1) / self.unseen.size)

    @property
    def interval(self) -> Interval | None:
        """95 % confidence interval of AUC, within [0, 1]."""
        auc, error = self.auc, self.standard_error
        if auc is None or error is None:
            return None
        return max(0.0, auc - NORMAL_95 * error), min(1.0, auc + NORMAL_95 * error)

    def minus(self, other: Components) -> Components:
        """Each image's part of the difference in AUC: this method minus another one on the same images."""
        return Components(self.seen - other.seen, self.unseen - other.unseen)


def _rank(among: Floats, values: Floats) -> Floats:
    # how many elements of the sorted array are smaller than each value; equal ones count one half
    rank: Floats = (np.searchsorted(among, values, "left") + np.searchsorted(among, values, "right")) / 2
    return rank


def bootstrap(methods: Sequence[Margins], rounds: int = ROUNDS, seed: int = 0) -> Floats:
    """S, U and best HM in each round [methods, rounds, 3]; a round draws the same images for all methods."""
    rng = np.random.default_rng(seed)
    curves = [Curve.of(margins) for margins in methods]
    seen_images, unseen_images = methods[0].seen.size, methods[0].unseen.size
    drawn = np.full((len(methods), rounds, 3), np.nan)
    for turn in range(rounds):
        chosen_seen = rng.integers(0, seen_images, seen_images) if seen_images else slice(0)
        chosen_unseen = rng.integers(0, unseen_images, unseen_images) if unseen_images else slice(0)
        for method, curve in enumerate(curves):
            seen, unseen = curve.resampled(chosen_seen, chosen_unseen)
            drawn[method, turn] = seen[0], unseen[-1], harmonic_mean(seen, unseen).max()
    return drawn


def percentiles(draws: Floats) -> Interval | None:
    """The interval that holds the middle 95 % of bootstrap values; None without values or if one is NaN."""
    if not draws.size or np.isnan(draws).any():
        return None
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Metrics:
    """Metrics of scored images as fractions; None if the images that a metric needs are missing (docs/metrics.md)."""

    k: int
    images_seen: int
    images_unseen: int
    seen: float | None  # S: seen accuracy at bias -inf
    unseen: float | None  # U: unseen accuracy at bias +inf
    hm: float | None  # best harmonic mean on the curve
    auc: float | None
    seen_interval: Interval | None = None  # 95 %
    unseen_interval: Interval | None = None
    hm_interval: Interval | None = None
    auc_interval: Interval | None = None
    bias: float | None = None  # at which HM is reached, in units of the scores
    state_accuracy: float | None = None  # of the prediction at bias 0
    object_accuracy: float | None = None
    tied: float | None = None  # share of images that are wrong only because the label ties with the best of its group

    def to_dict(self) -> dict[str, Any]:
        """The metrics as JSON values, accuracies in percent."""
        return {name: value if name in NO_PERCENTAGES else _percent(value) for name, value in vars(self).items()}


def _percent(value: Any) -> Any:
    if value is None:
        return None
    return [100 * end for end in value] if isinstance(value, tuple) else 100 * value


def measure(
    competitors: TopCompetitors,
    k: int = 1,
    *,
    states: ArrayLike | None = None,
    objects: ArrayLike | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Metrics:
    """S, U, HM, AUC and the accuracies of states and objects, from score statistics.

    Args:
        competitors: the result of `ScoreAccumulator.competitors`.
        k: an image is right if its pair is among the best k.
        states: state of each column [C], for the accuracy of states.
        objects: object of each column [C], for the accuracy of objects.
        rounds: resamples of images for the intervals of S, U and HM; 0: no intervals.
        seed: of the resamples.
    """
    rounds, seed = require_whole(rounds, "rounds", 0), require_whole(seed, "seed", 0)
    margins = Margins.of(competitors, k)
    state_accuracy = _primitive_accuracy(competitors, states, "states")
    object_accuracy = _primitive_accuracy(competitors, objects, "objects")
    curve, parts = Curve.of(margins), Components.of(margins)
    draws = bootstrap([margins], rounds, seed)[0]  # [rounds, 3]
    own_group = np.where(competitors.is_seen[:, None], competitors.seen, competitors.unseen)
    tied = own_group[:, k - 1] == competitors.label
    best = int(curve.harmonic.argmax()) if margins.seen.size and margins.unseen.size else None
    return Metrics(
        k=k,
        images_seen=margins.seen.size,
        images_unseen=margins.unseen.size,
        seen=float(curve.seen_accuracies[0]) if margins.seen.size else None,
        unseen=float(curve.unseen_accuracies[-1]) if margins.unseen.size else None,
        hm=None if best is None else float(curve.harmonic[best]),
        auc=parts.auc,
        seen_interval=percentiles(draws[:, 0]),
        unseen_interval=percentiles(draws[:, 1]),
        hm_interval=percentiles(draws[:, 2]),
        auc_interval=parts.interval,
        bias=None if best is None else curve.bias(best),
        state_accuracy=state_accuracy,
        object_accuracy=object_accuracy,
        tied=float((tied & (competitors.label > -np.inf)).mean()),
    )


def _primitive_accuracy(competitors: TopCompetitors, names: ArrayLike | None, noun: str) -> float | None:
    if names is None:
        return None
    name, predicted = checked_names(names, competitors.columns, noun), competitors.best_columns()
    return float(((predicted >= 0) & (name[predicted] == name[competitors.target])).mean())


def group_table(groups: FrequencyGroups, train: Ints, test: Ints, right: Mapping[str, Bools]) -> pd.DataFrame:
    """A line per frequency group (head, medium, tail, unseen): compositions, images, and accuracies in percent.

    `train` and `test` are images' compositions; `right`: name of an accuracy column -> mask of right test images.
    """
    import pandas as pd

    table = pd.DataFrame({"group": list(GROUPS), "compositions": groups.sizes})
    for split, images in (("train", train), ("test", test)):
        counts = np.bincount(groups.groups_of(images), minlength=len(GROUPS))
        table[f"{split}_images"] = counts
        table[f"{split}_percent"] = 100 * counts / max(images.size, 1)
    for run, hits in right.items():
        counted = np.bincount(groups.groups_of(test), weights=hits, minlength=len(GROUPS))
        images = table["test_images"].to_numpy()
        table[run] = np.divide(100 * counted, images, out=np.full(len(GROUPS), np.nan), where=images > 0)
    return table


def sampled_metrics(
    blocks: BlockSource, target: ArrayLike, seen: ArrayLike, feasible_mask: ArrayLike | None = None, k: int = 1
) -> Metrics:
    """The metrics at about 20 sampled biases, as published tables compute them.

    Args:
        blocks: gives all scores in blocks `(slice of images, scores [b, C])`; it is called twice.
        target: column of each image's label [N].
        seen, feasible_mask: masks of the columns [C] (default: all feasible).
    """
    import torch

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


def sampled_from_margins(margins: Margins) -> Metrics:
    """The metrics of `sampled_metrics` from the exact curve's margins, without another pass over the scores.

    They differ where scores are equal, or nearer to each other than single precision resolves.
    """
    chosen = np.sort(margins.unseen[margins.unseen < FAR]) - EPSILON
    biases = [*chosen[:: max(chosen.size // POINTS, 1)].tolist(), FAR]
    hits = np.array([[(bias < margins.seen).sum(), (bias > margins.unseen).sum()] for bias in biases])
    return _summarise(hits, margins.seen.size, margins.unseen.size, biases, 1)


def _tensor(scores: Any, rows: slice) -> torch.Tensor:
    import torch

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


def number(value: float | None, form: str = ".2f") -> str:
    return MISSING if value is None else format(value, form)


def interval_of(values: Mapping[str, Any], name: str = "auc") -> tuple[float, float] | None:
    """Ends of a metric's 95 % interval; None if one is not defined."""
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    return None if low is None or high is None else (low, high)


def interval_text(values: Mapping[str, Any], name: str = "auc", form: str = ".1f") -> str:
    """A metric's 95 % interval, such as `6.1–7.8`; a dash if it is not defined."""
    ends = interval_of(values, name)
    return MISSING if ends is None else "–".join(format(end, form) for end in ends)


def headline(values: Mapping[str, Any]) -> str:
    """A line such as `S 41.30  U 20.00  HM 18.20  AUC 6.90 [6.10, 7.80]`; in the open world, `all pairs 7.10` too."""
    line = "  ".join(f"{title} {number(values.get(name))}" for name, title in METRICS.items())
    if (ends := interval_of(values)) is not None:
        line += f" [{ends[0]:.2f}, {ends[1]:.2f}]"
    return line if values.get("auc_all") is None else f"{line}  all pairs {values['auc_all']:.2f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns, never wrapped or cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
