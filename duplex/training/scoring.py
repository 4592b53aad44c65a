"""Score images with a method in blocks that fit into memory; choose settings on validation images.

Validation chooses the epoch (`Validation`) and, after training, a *calibration* per world
(`calibrate`): the bias and, in the open world, a threshold of *feasibility*, which excludes
implausible compositions. Test images have no part in any choice.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.accumulate import Floats, ScoreAccumulator
from duplex.evaluation.answered import GroupAnswers
from duplex.evaluation.curve import AucComponents, Curve, Margins
from duplex.evaluation.feasibility import BucketNumbers, buckets, choose_threshold, thresholds
from duplex.evaluation.probabilities import Confidence, UnseenMass, fit_probabilities, log_probabilities
from duplex.features.tokens import Examples
from duplex.labels import Bools, CandidateSet, Ints, LabelSpace, World
from duplex.methods.base import Batch, Inputs, Method, PrimitiveVectors, Scorer
from duplex.methods.prompts import encoded_once
from duplex.methods.word_feasibility import feasibility

BLOCK_SCORES = 2**24  # scores in memory at once: 64 MiB of float32


@dataclass(frozen=True)
class SplitScorer:
    """The candidates of a split and the function that scores its images for them."""

    candidates: CandidateSet
    scorer: Scorer
    name: str = "the method"  # of the method's class, for messages

    @classmethod
    def of(cls, method: Method[Any], candidates: Ints | CandidateSet) -> SplitScorer:
        """Prepare scoring with a method, in evaluation mode, for sorted `candidates`."""
        method.eval()
        name = method.class_name
        size = method.labels.size
        if not isinstance(candidates, CandidateSet):
            candidates = CandidateSet(size, None if len(candidates) == size else candidates)
        return cls(candidates, method.scorer(candidates.compositions.copy()), name)  # which it may overwrite

    def blocks(self, inputs: Inputs) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of scores that fit into memory: a slice of images, their scores."""
        columns = len(self.candidates)
        for rows, part in _cut(inputs, BLOCK_SCORES // columns):
            images = rows.stop - rows.start
            yield rows, checked_scores(self.name, self.scorer(part), images, columns)


def checked_scores(method: str, scores: Tensor, images: int, columns: int) -> Tensor:
    """A method's scores, detached; raises `DuplexError` unless they are floats [images, columns]."""
    if scores.shape != (images, columns) or scores.dtype not in (torch.float32, torch.float64):
        found = f"{list(scores.shape)} and type {scores.dtype}"
        expected = f"{[images, columns]} (images, candidates) and type torch.float32"
        raise DuplexError(f"{method} returned scores of shape {found}; expected shape {expected}")
    return scores.detach()


def _cut(inputs: Inputs, limit: int) -> Iterator[tuple[slice, Inputs]]:
    images = len(next(iter(inputs.values())))
    read = [values for values in inputs.values() if not isinstance(values, Tensor)]
    numbers = sum(math.prod(values.shape[1:]) for values in read)  # of one image, from disk
    step = max(1, min(limit, BLOCK_SCORES // max(1, numbers)))
    for start in range(0, images, step):
        rows = slice(start, min(start + step, images))
        yield rows, {name: values[rows] for name, values in inputs.items()}


ScoreReader = Callable[[Tensor, slice], None]  # scores [b, C], images


@dataclass(frozen=True)
class ScoringResult:
    """Result of scoring a split: statistics of the scores, and each image's best candidates."""

    candidates: CandidateSet
    accumulator: ScoreAccumulator
    top: Ints  # [N, T] best compositions of each image, best first
    further: tuple[ScoreAccumulator, ...] = ()  # one for each item of `further` in `score_split`


def score_split(
    task: SplitScorer,
    examples: Examples,
    labels: LabelSpace,
    *,
    k: int = 1,
    bucket: BucketNumbers | None = None,
    feasible_mask: Bools | None = None,
    top: int = 0,
    bias: float = 0.0,
    further: Sequence[BucketNumbers | Bools] = (),
    reader: ScoreReader | None = None,
) -> ScoringResult:
    """Score a split in one pass; return statistics of the scores and best candidates.

    bucket: [C] number of the interval between feasibility thresholds in which each unseen
        candidate lies; with it, one pass measures all thresholds.
    top: number of best compositions to keep per image, after adding `bias` to unseen ones.
    further: other buckets, for each of which top-1 statistics are accumulated, too.
    """
    candidates = task.candidates
    if not len(examples):
        raise DuplexError(
            "no image to evaluate is readable; fix those that `duplex data check NAME` lists, then run `duplex extract`"
        )
    if k > len(candidates):
        raise UsageError(f"evaluation.k is {k}; expected at most {len(candidates)}, the number of candidates")
    compositions = examples.compositions.cpu().numpy()
    if not candidates.contains(compositions).all():
        raise DuplexError("labels.json does not list an image's pair for its split; run `duplex prepare -d NAME` again")
    seen = labels.seen if candidates.listed is None else labels.is_seen(candidates.listed)
    target = candidates.positions(compositions)
    device = examples.compositions.device
    accumulator = ScoreAccumulator(target, seen, k=k, bucket=bucket, feasible_mask=feasible_mask)
    others = tuple(ScoreAccumulator(target, seen, bucket=numbers) for numbers in further)
    kept = min(top, len(candidates))
    best = torch.empty((len(examples), kept), dtype=torch.int64, device=device)
    shifts = np.where(seen, 0.0, bias).astype(np.float32)
    if feasible_mask is not None:
        shifts[~feasible_mask] = -np.inf
    added = torch.from_numpy(shifts).to(device)
    for rows, scores in task.blocks(examples.inputs):
        for each in (accumulator, *others):
            each.add(scores, rows)
        if reader is not None:
            reader(scores, rows)
        if top:
            best[rows] = (scores + added).topk(kept, dim=1).indices
    return ScoringResult(candidates, accumulator, candidates.at(best.cpu().numpy()), others)


def term_sum_statistics(
    method: Method[Any], candidates: Ints, examples: Examples, labels: LabelSpace
) -> dict[tuple[str, ...], ScoreAccumulator]:
    """Statistics of each score term and sum of terms, by name; empty if the score is no sum."""
    method.eval()
    score_terms = method.score_terms(candidates.copy())
    statistics: dict[tuple[str, ...], ScoreAccumulator] = {}
    if score_terms is None:
        return statistics
    target = np.searchsorted(candidates, examples.compositions.cpu().numpy())
    seen = labels.is_seen(candidates)
    limit = BLOCK_SCORES // (8 * len(candidates))  # leaves room for all terms and a sum
    for rows, part in _cut(examples.inputs, limit):
        images = rows.stop - rows.start
        terms = {
            name: checked_scores(method.class_name, scores, images, len(candidates))
            for name, scores in score_terms(part)
            if scores.any()  # no term of weight 0
        }
        if len(terms) < 2:
            break
        for size in range(1, len(terms)):
            for names in combinations(terms, size):
                total = torch.stack([terms[name] for name in names]).sum(0)
                statistics.setdefault(names, ScoreAccumulator(target, seen)).add(total, rows)
    return statistics


def choose_options(method: Method[Any], examples: Examples, labels: LabelSpace) -> None:
    """Let a trained method choose options, such as score weights, by validation AUC."""
    candidates = labels.candidates("closed", "val")
    target = np.searchsorted(candidates, examples.compositions.cpu().numpy())
    seen = labels.is_seen(candidates)

    def auc(scores: Tensor) -> float:
        if not isinstance(scores, Tensor):
            raise DuplexError(
                f"{method.class_name}: choose_options() called auc with a {type(scores).__name__}; "
                "pass a tensor of scores [images, candidates]"
            )
        margins = Margins.of(ScoreAccumulator(target, seen).add(scores).competitors())
        if scores[:, torch.from_numpy(~seen)].isneginf().all():
            return float(margins.right()[margins.is_seen].mean())
        return AucComponents.of(margins).auc or 0.0

    method.eval().choose_options(examples.inputs, candidates.copy(), auc)


def checked_auc(margins: Margins) -> float:
    """The validation AUC, a fraction; `DuplexError` without images of seen or unseen pairs."""
    auc = AucComponents.of(margins).auc
    if auc is None:
        group = "unseen" if margins.is_seen.any() else "seen"
        raise DuplexError(f"the val split has no images of {group} pairs, so AUC is undefined; add some to val")
    return auc


ALL_PAIRS = "_all"  # ending of metrics with every composition as a candidate


@dataclass(frozen=True)
class Validated:
    """Validation metrics after an epoch, as fractions, and the one that chooses the best epoch."""

    metrics: Mapping[str, float]
    chosen_by: str = "auc"

    @property
    def value(self) -> float:
        """The metric that chooses the epoch; a loss is negated, so that higher is better."""
        is_loss = self.chosen_by in ("loss", f"loss{ALL_PAIRS}")
        return (-1 if is_loss else 1) * self.metrics[self.chosen_by]


# From seen, unseen, hm and auc, as fractions, to a number to maximise
ChooseBy = Callable[[Mapping[str, float]], float]


@dataclass(frozen=True)
class Validation:
    """Computes a method's closed-world `auc` and `name`, which chooses the epoch, in `world`.

    choose_by: the caller's function that computes `name` from seen and unseen accuracy, HM, AUC.
    world: open: the metrics that choose have every composition as a candidate, and names that end in `_all`.
    """

    examples: Examples
    labels: LabelSpace
    name: str = "auc"
    choose_by: ChooseBy | None = None
    world: World = "closed"

    def __call__(self, method: Method[Any]) -> Validated:
        chosen_by = "auc" if self.name == "last" else self.name
        if self.world == "closed":
            return Validated(self._measured(method, chosen_by), chosen_by)
        with encoded_once(method, parts=True):
            metrics = self._measured(method, chosen_by)
            closed = replace(self, world="closed")._measured(method, "auc")
        return Validated(
            {**closed, **{f"{name}{ALL_PAIRS}": value for name, value in metrics.items()}}, f"{chosen_by}{ALL_PAIRS}"
        )

    def _measured(self, method: Method[Any], name: str) -> dict[str, float]:
        candidates = CandidateSet.of(self.labels, self.world, "val")
        task = SplitScorer.of(method, candidates)
        columns = torch.from_numpy(candidates.positions(self.examples.compositions.cpu().numpy()))
        losses: list[Tensor] = []

        def add_loss(scores: Tensor, rows: slice) -> None:
            log_p = log_probabilities(method.probabilities, scores).cpu()
            losses.append(-log_p.gather(1, columns[rows, None]))

        reader = add_loss if name == "loss" else None
        result = score_split(task, self.examples, self.labels, reader=reader)
        margins = Margins.of(result.accumulator.competitors())
        auc = checked_auc(margins)
        if name == "auc":
            return {"auc": auc}
        if name == "loss":
            return {"auc": auc, "loss": float(torch.cat(losses).mean())}
        curve = Curve.of(margins)
        metrics = {
            "seen": float(curve.seen_accuracies[0]),  # S, at a bias of -inf
            "unseen": float(curve.unseen_accuracies[-1]),  # U, at a bias of +inf
            "hm": float(curve.harmonic.max()),
            "auc": auc,
        }
        value: Any = metrics[name] if self.choose_by is None else self.choose_by(metrics)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise DuplexError(f"select: {name} returned {value!r} for {metrics}; expected a finite number")
        return {"auc": auc, name: float(value)}


def metric_name(choose_by: ChooseBy) -> str:
    """The name of a caller's metric in the history: its function's name if usable, or 'selection'."""
    name = getattr(choose_by, "__name__", "")
    taken = name in ("auc", "hm", "unseen", "loss", "last")
    return name if name.isidentifier() and not taken else "selection"


FeasibilityRule = Literal["auto", "words", "none"]  # of `evaluation.feasibility`
FEWEST_PAIRS = 2  # unseen pairs with validation images that `auto` needs
LARGEST_BIAS = 1e6  # beyond it float32 scores of about 1 vanish beside the bias


@checked_dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class Calibration:
    """What validation chose for one world: bias on unseen pairs, threshold that excludes some."""

    # Bias: added to the scores of unseen compositions; it maximises the validation harmonic mean
    bias: Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
    threshold: float | None = None  # of feasibility; None: every composition is feasible
    val_auc_all_feasible: float | None = None  # validation AUC in percent without the threshold
    val_auc_at_threshold: float | None = None  # validation AUC in percent with it
    val_auc_gain: float | None = None  # percent; cross-fitted (`calibrate`)
    val_auc_gain_se: float | None = None  # standard error of the gain over unseen pairs
    alternatives: tuple[Calibration, ...] = ()  # with a threshold that the rule `auto` did not adopt

    def to_dict(self) -> dict[str, Any]:
        """The calibration as a dict for JSON, without fields at their defaults."""
        values: dict[str, Any] = TypeAdapter(Calibration).dump_python(self, mode="json", exclude_defaults=True)
        return values


def calibrate(
    method: Method[Any],
    val: Examples,
    labels: LabelSpace,
    world: World,
    words: PrimitiveVectors | None,
    points: int,
    rule: FeasibilityRule = "auto",
    reader: ScoreReader | None = None,
) -> tuple[Calibration, Margins]:
    """Choose bias and feasibility threshold; also returns margins with no pair excluded.

    rule: "words" uses the threshold with the best validation AUC, "auto" only if its gain on pairs
        that had no part in choosing it exceeds twice its standard error, "none" uses none.
    """
    task = SplitScorer.of(method, CandidateSet.of(labels, world, "val"))
    values = None
    if world == "open" and rule != "none":
        too_few = rule == "auto" and count_unseen_pairs(val, labels) < FEWEST_PAIRS
        values = None if too_few else feasibility_by_words(labels, words)
    if values is None:
        result = score_split(task, val, labels, reader=reader)
        margins = Margins.of(result.accumulator.competitors())
        return Calibration(best_bias(margins)), margins
    steps = thresholds(values, labels.seen, points)
    accumulator = score_split(task, val, labels, bucket=buckets(values, steps)).accumulator
    margins_all = Margins.of(accumulator.competitors())
    choice = choose_threshold(accumulator, steps)
    error = choice.gain.standard_error
    found = Calibration(
        best_bias(Margins.of(accumulator.competitors(choice.passing_buckets))),
        threshold=choice.value,
        val_auc_all_feasible=100 * float(choice.auc[0]),
        val_auc_at_threshold=100 * float(choice.auc.max()),
        val_auc_gain=100 * choice.gain.value,
        val_auc_gain_se=None if error is None else 100 * error,
    )
    if rule == "words" or choice.gain.is_clear:
        return found, margins_all
    return Calibration(best_bias(margins_all), alternatives=(found,)), margins_all


def count_unseen_pairs(val: Examples, labels: LabelSpace) -> int:
    """Number of unseen pairs that have validation images."""
    return int((~labels.is_seen(np.unique(val.compositions.cpu().numpy()))).sum())


def feasibility_by_words(labels: LabelSpace, words: PrimitiveVectors | None) -> Floats | None:
    """The feasibility of all compositions by word vectors; None without these or unseen pairs."""
    if words is None or len(labels.pairs["train"]) == labels.size:
        return None
    return feasibility(words.states.cpu().numpy(), words.objects.cpu().numpy(), labels)


def feasible_compositions(
    method: Method[Any], words: PrimitiveVectors | None, calibration: Calibration
) -> Bools | None:
    """Mask [M*N] of the compositions that the calibration's threshold passes; None if all do."""
    if calibration.threshold is None:
        return None
    feasible = feasibility_by_words(method.labels, words)
    return None if feasible is None else feasible >= calibration.threshold


def best_bias(margins: Margins) -> float:
    """The bias on unseen pairs' scores at which the harmonic mean is highest."""
    curve = Curve.of(margins)
    bias = curve.bias(int(np.argmax(curve.harmonic)))
    if not abs(bias) <= LARGEST_BIAS:
        raise DuplexError(
            f"the scores are so large that the best bias is {bias:.3g}; scale them down until "
            f"the bias lies within ±{LARGEST_BIAS:,.0f}"
        )
    return bias


def fit_confidence(method: Method[Any], val: Examples, labels: LabelSpace, scores: Tensor | None = None) -> Confidence:
    """Fit the temperature and the log-odds of unseen pairs that turn scores into probabilities.

    scores: scores of all validation images [V, C], if they were computed already.
    """
    candidates = labels.candidates("closed", "val")
    chosen = Batch(val.inputs, val.compositions)
    with torch.no_grad():
        if scores is None:
            images = len(val.rows)
            most = max(1, BLOCK_SCORES // len(candidates))
            rows = np.linspace(0, images - 1, min(images, most)).astype(int)
            chosen = chosen[torch.from_numpy(rows)]
            scores = method.eval().scorer(candidates.copy())(chosen.inputs)
        log_p = log_probabilities(method.probabilities, scores).cpu()
    if not log_p.isfinite().all():
        problem = f"{method.class_name}.probabilities() gives NaN or infinity for validation images"
        raise DuplexError(f"{problem}; return finite numbers")
    target = np.searchsorted(candidates, chosen.compositions_np)
    return fit_probabilities(log_p, target, labels.is_seen(candidates))


@torch.no_grad()
def answer_groups(
    method: Method[Any],
    examples: Examples,
    labels: LabelSpace,
    confidence: Confidence,
    world: World,
    feasible: Bools | None = None,
) -> GroupAnswers:
    """Answer labelled images in one pass: each image's most probable seen and unseen composition.

    feasible: mask [M*N] of the compositions that may be answers; None: all.
    """
    task = SplitScorer.of(method, CandidateSet.of(labels, world, "train"))
    compositions = task.candidates.compositions
    seen = labels.is_seen(compositions)
    possible = np.ones_like(seen) if feasible is None else feasible[compositions]
    groups = [torch.from_numpy(np.flatnonzero(group & possible)) for group in (seen, ~seen)]
    best = []
    probability = []
    unseen = []
    for _, scores in task.blocks(examples.inputs):
        q = confidence.even.log_posteriors(method.probabilities, scores, seen, possible).exp().cpu()
        parts = [_best_of(q, group) for group in groups]
        best.append(np.stack([position for position, _ in parts], 1))
        probability.append(np.stack([share for _, share in parts], 1))
        unseen.append(q[:, groups[1]].sum(1).numpy())
    return GroupAnswers(
        labels,
        examples.rows,
        target=examples.compositions.cpu().numpy(),
        best=compositions[np.concatenate(best)],
        probability=np.concatenate(probability),
        unseen=np.concatenate(unseen),
        stored=confidence.new_share,
        mass=confidence.unseen_mass.get(world),
    )


def _best_of(q: Tensor, group: Tensor) -> tuple[Ints, Floats]:
    # position and probability of each image's most probable candidate of a group; 0 of an empty one
    if not len(group):
        return np.zeros(len(q), np.int64), np.zeros(len(q))
    share, place = q[:, group].max(1)
    return group[place].numpy(), share.numpy()


def fit_new_share(
    method: Method[Any],
    val: Examples,
    labels: LabelSpace,
    confidence: Confidence,
    world: World,
    feasible: Bools | None = None,
) -> Confidence:
    """`confidence` with the share of new pairs to expect, and with what estimates of it need, by a world's answers.

    The share is the one at which both kinds of validation images are answered best (`GroupAnswers.balanced_share`).
    With fewer than two images of a kind, `confidence` stays as it is.
    """
    answers = answer_groups(method, val, labels, confidence, world, feasible)
    mass = UnseenMass.of(answers.unseen, answers.target, labels.is_seen(answers.target))
    others = {place: each for place, each in confidence.unseen_mass.items() if place != world}
    if mass is None:
        return replace(confidence, unseen_mass=others)
    return replace(confidence, new_share=answers.balanced_share, unseen_mass={**others, world: mass})
