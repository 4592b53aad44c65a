"""Metrics of scored images: S, U, best HM and AUC, and how every table writes them.

Files store metrics as percentages under the keys of `METRICS`; `NAME_low` and `NAME_high` are the
ends of an interval. In tables, a dash stands for an undefined number.

The *sampled protocol* is the evaluator of Purushwalkam et al. (2019): of the `n` images of unseen
pairs that are right at the bias 1000, the margins `max seen score - label's score - 0.0001` are
sorted, and every `n // 20`-th is used as a bias. Straight lines join the curve's points at these
biases and at 1000. Arithmetic has single precision (double for float64 scores), and `torch.topk`
decides between equal scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from duplex.errors import DuplexError, UsageError, require_whole
from duplex.evaluation.accumulate import TopCompetitors, checked_names
from duplex.evaluation.curve import AucComponents, Curve, Interval, Margins, area_under, harmonic_mean
from duplex.evaluation.intervals import ROUNDS, bootstrap_metrics, percentiles
from duplex.labels import GROUPS, Bools, FrequencyGroups, Ints

if TYPE_CHECKING:
    import pandas as pd
    import torch

NO_PERCENTAGES = {"k", "bias", "images_seen", "images_unseen"}
MISSING = "–"
METRICS = {"seen": "S", "unseen": "U", "hm": "HM", "auc": "AUC"}
OPEN_METRICS = {"auc_all": "AUC, all pairs", "auc_by_words": "AUC, by words"}
PART_METRICS = {
    "hm_at_val_bias": "HM, validation bias",
    "unbiased_accuracy": "no bias",
    "false_seen": "false seen",
    "state_accuracy": "state",
    "object_accuracy": "object",
}
OWN_ANSWERS = ("unbiased_accuracy", "false_seen")  # what a method answers without a tuned bias
TIPS = {
    "S": "accuracy on images of seen pairs when unseen pairs are excluded",
    "U": "accuracy on images of unseen pairs when seen pairs are excluded",
    "HM": "best harmonic mean of seen and unseen accuracy over all biases",
    "AUC": "area under the seen–unseen curve",
    "AUC 95 %": "interval over test images, mean of the seeds' intervals",
    "AUC, all pairs": "open world with every pair a candidate, no feasibility threshold",
    "AUC, by words": "open world with the feasibility threshold by words that validation chose: the published protocol",
    "HM, validation bias": "harmonic mean at the bias chosen on validation, which predictions use",
    "no bias": "accuracy on all images without a bias, by the method's own scores",
    "false seen": "share of images of unseen pairs that are answered by a seen pair, no bias",
    "state": "accuracy of the predicted state, no bias",
    "object": "accuracy of the predicted object, no bias",
}
BlockSource = Callable[[], Iterable[tuple[slice, Any]]]  # a new pass over (rows, scores [b, C])
FAR = 1e3  # stands for b = +inf, in `sampled_bias_metrics`
INFEASIBLE = -1e10
EPSILON = 1e-4
POINTS = 20


@dataclass(frozen=True)
class Metrics:
    """Metrics of scored images, as fractions; None if images that a metric needs are missing."""

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
    tied: float | None = None  # share of images wrong only because the label ties in its group
    unbiased_accuracy: float | None = None  # at bias 0, on all images, of the best pair; a tie is wrong
    false_seen: float | None = None  # share of images of unseen pairs for which a seen pair is best at bias 0

    def to_dict(self) -> dict[str, Any]:
        """The metrics for JSON, with accuracies in percent."""
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
    """Compute S, U, HM, AUC and the accuracies of states and objects from score statistics.

    Args:
        competitors: the result of `ScoreAccumulator.competitors`.
        k: an image is right if its pair is among the best k.
        states: state of each column [C], for the accuracy of states.
        objects: object of each column [C], for the accuracy of objects.
        rounds: number of bootstrap resamples for the intervals of S, U and HM; 0: no intervals.
        seed: seed of these resamples.
    """
    rounds = require_whole(rounds, "rounds", 0)
    seed = require_whole(seed, "seed", 0)
    margins = Margins.of(competitors, k)
    state_accuracy = _primitive_accuracy(competitors, states, "'states'")
    object_accuracy = _primitive_accuracy(competitors, objects, "'objects'")
    curve = Curve.of(margins)
    parts = AucComponents.of(margins)
    draws = bootstrap_metrics([margins], rounds, seed)[0]  # [rounds, 3]
    new = ~competitors.is_seen
    best_unseen = np.maximum(competitors.label, competitors.unseen[:, 0])
    is_false = (competitors.seen[:, 0] >= best_unseen) & (competitors.seen[:, 0] > -np.inf)
    right = (margins if k == 1 else Margins.of(competitors)).right()
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
        unbiased_accuracy=float(right.mean()) if len(right) else None,
        false_seen=float(is_false[new].mean()) if new.any() else None,
        tied=float((tied & (competitors.label > -np.inf)).mean()),
    )


def _primitive_accuracy(competitors: TopCompetitors, names: ArrayLike | None, noun: str) -> float | None:
    if names is None:
        return None
    name = checked_names(names, competitors.columns, noun)
    predicted = competitors.best_columns()
    return float(((predicted >= 0) & (name[predicted] == name[competitors.target])).mean())


def group_table(groups: FrequencyGroups, train: Ints, test: Ints, right: Mapping[str, Bools]) -> pd.DataFrame:
    """Frequency groups (head, medium, tail, unseen): compositions, images, accuracies in percent.

    right: name of a column of accuracies -> mask of the test images that count as right in it.
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
        undefined = np.full(len(GROUPS), np.nan)
        table[run] = np.divide(100 * counted, images, out=undefined, where=images > 0)
    return table


def vocabulary_accuracies(
    competitors: TopCompetitors, bias: float, states: Ints, objects: Ints, trained: tuple[Bools, Bools]
) -> dict[str, dict[str, float]]:
    """Accuracies in percent by which words of the labels are new, as in OV-CZSL.

    `*` marks what is new: AO, seen pairs; (AO)*, unseen pairs of trained words; A*O, new states;
    AO*, new objects; A*O*, both. Published tables use the `bias` with the best harmonic mean.
    """
    label = competitors.target
    predicted = competitors.best_columns(bias)
    right = Margins.of(competitors).right(bias)
    new_s, new_o = ~trained[0][states[label]], ~trained[1][objects[label]]
    masks = {"AO": competitors.is_seen, "(AO)*": ~(competitors.is_seen | new_s | new_o)}
    masks |= {"A*O": new_s & ~new_o, "AO*": new_o & ~new_s, "A*O*": new_s & new_o}
    table = {
        group: {"images": int(mask.sum()), "accuracy": 100 * float(right[mask].mean())}
        for group, mask in masks.items()
        if mask.any()
    }
    for kind, names, new in (("states", states, new_s), ("objects", objects, new_o)):
        hits = (predicted >= 0) & (names[predicted] == names[label])
        parts = {"trained": ~new, "new": new}
        table[kind] = {part: 100 * float(hits[mask].mean()) for part, mask in parts.items() if mask.any()}
    return table


def sampled_bias_metrics(
    blocks: BlockSource, target: ArrayLike, seen: ArrayLike, feasible_mask: ArrayLike | None = None, k: int = 1
) -> Metrics:
    """Compute metrics from about 20 sampled biases, as published tables do (see above).

    blocks: function that returns all scores in blocks `(slice, scores [b, C])`; called twice.
    """
    import torch

    mask = torch.as_tensor(np.asarray(seen, dtype=bool))
    if feasible_mask is None:
        feasible_mask = np.ones_like(seen)
    feasible = torch.as_tensor(np.asarray(feasible_mask, dtype=bool))
    labels = torch.as_tensor(np.asarray(target, dtype=np.int64))
    if int(mask.sum()) < k:
        raise UsageError(
            f"the sampled protocol at k = {k} needs at least {k} seen columns, but there are {int(mask.sum())}; lower k"
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
        own = scores.gather(1, labels[rows, None])[:, 0]
        margin = barrier - own - EPSILON  # raises a label to the k-th seen score
        far_parts.append(is_right(scores, rows, FAR))
        margin_parts.append(margin)
    far = torch.cat(far_parts)  # [N]
    margins = torch.cat(margin_parts)  # [N]
    chosen = margins[~is_seen & far].sort().values
    biases = chosen[:: max(chosen.numel() // POINTS, 1)]
    # seen and unseen images that are right at each bias
    hits = torch.zeros(len(biases), 2, dtype=torch.int64)
    for rows, block in blocks():
        scores = _tensor(block, rows)
        for place, bias in enumerate(biases):
            right = is_right(scores, rows, bias)
            hits[place, 0] += (right & is_seen[rows]).sum()
            hits[place, 1] += (right & ~is_seen[rows]).sum()
    ends = torch.stack([far[is_seen].sum(), far[~is_seen].sum()])[None]
    counts = torch.cat([hits, ends]).numpy()
    return _summarise(counts, int(is_seen.sum()), int((~is_seen).sum()), [*biases, FAR], k)


def sampled_from_margins(margins: Margins) -> Metrics:
    """Top-1 metrics from about 20 sampled biases, computed from margins instead of scores."""
    chosen = np.sort(margins.unseen[margins.unseen < FAR]) - EPSILON
    biases = [*chosen[:: max(chosen.size // POINTS, 1)].tolist(), FAR]
    hits = np.array([[(bias < margins.seen).sum(), (bias > margins.unseen).sum()] for bias in biases])
    return _summarise(hits, margins.seen.size, margins.unseen.size, biases, 1)


def _tensor(scores: Any, rows: slice) -> torch.Tensor:
    import torch

    if isinstance(scores, torch.Tensor):
        scores = scores.detach().cpu().float().numpy()
    array = np.asarray(scores)
    wide = np.float64 if array.dtype.kind == "f" and array.dtype.itemsize >= 8 else np.float32
    # published code reads half precision as float32
    tensor = torch.from_numpy(np.array(array, dtype=wide))
    bad = torch.isnan(tensor).any(dim=1).nonzero()
    if len(bad):
        raise DuplexError(
            f"the scores of image {(rows.start or 0) + int(bad[0])} (counted from 0) contain NaN; correct the model "
            "that computed them, or remove the image from the scores and 'target'"
        )
    return tensor


def _summarise(hits: Ints, seen_images: int, unseen_images: int, biases: list[Any], k: int) -> Metrics:
    images = np.array([seen_images, unseen_images])
    accuracy = np.divide(hits, images, out=np.full(hits.shape, np.nan), where=images > 0)
    best = accuracy.max(axis=0)
    both = bool(images.all())
    harmonic = harmonic_mean(accuracy[:, 0], accuracy[:, 1])
    return Metrics(
        k=k,
        images_seen=seen_images,
        images_unseen=unseen_images,
        seen=float(best[0]) if seen_images else None,
        unseen=float(best[1]) if unseen_images else None,
        hm=float(harmonic.max()) if both else None,
        auc=area_under(accuracy[:, 0], accuracy[:, 1]) if both else None,
        bias=float(biases[int(harmonic.argmax())]) if both else None,
    )


def number(value: float | None, form: str = ".2f") -> str:
    return MISSING if value is None else format(value, form)


def interval_of(values: Mapping[str, Any], name: str = "auc") -> tuple[float, float] | None:
    """The ends of a metric's 95 % interval, `NAME_low` and `NAME_high`; None if one is missing."""
    low = values.get(f"{name}_low")
    high = values.get(f"{name}_high")
    return None if low is None or high is None else (low, high)


def interval_text(values: Mapping[str, Any], name: str = "auc", form: str = ".1f") -> str:
    """A metric's 95 % interval as text, such as `6.1–7.8`; a dash if it is not defined."""
    ends = interval_of(values, name)
    return MISSING if ends is None else "–".join(format(end, form) for end in ends)


def estimate_line(name: str, estimate: Mapping[str, Any]) -> str:
    """A line such as `auc       12.34   [11.00, 13.70]   p = 0.012`."""
    line = f"{name}{number(estimate['value']):>6}"
    if estimate["interval"] is not None:
        low, high = estimate["interval"]
        line += f"   [{low:6.2f}, {high:6.2f}]"
    p = estimate.get("p")
    if p is None:
        return line
    return f"{line}   p < 0.001" if p < 0.001 else f"{line}   p = {p:.3f}"


def metrics_line(values: Mapping[str, Any]) -> str:
    """A line such as `S 41.30  U 20.00  HM 18.20  AUC 6.90 [6.10, 7.80]  all pairs 7.10`."""
    line = "  ".join(f"{title} {number(values.get(name))}" for name, title in METRICS.items())
    ends = interval_of(values)
    if ends is not None:
        line += f" [{ends[0]:.2f}, {ends[1]:.2f}]"
    return line if values.get("auc_all") is None else f"{line}  all pairs {values['auc_all']:.2f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as lines of text with aligned columns; no text is wrapped or cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
