"""The page of one data set: a model's answers, and what more labelled images would bring.

`duplex fit` and `duplex report --dataset` write it. To estimate what more images would bring, a closed-form classifier
on the frozen features is trained on random parts of each pair's training images; its test accuracy by number of images
is extrapolated to twice as many.

The pairs to label next are ranked by the variance of their mean feature and by their validation errors. In coordinates
where images of a pair vary by 1 about its mean, this mean is `theta_c = u_c . beta + gamma_c`: the effects of its state
and object, and an interaction of variance `v` (duplex/methods/gaussian.py). With `n_c` images of pair `c`, `H` the
matrix of the normal equations for `beta`, and `k = 1/v`,

    V_c = 1 / (n_c + k) + (k / (n_c + k))^2 u_c' H^-1 u_c        variance of theta_c in every direction
    V_c / (1 + V_c)                                              share by which one more image reduces V_c
    e_c = (wrong_c + e) / (validated_c + 1)                      share of errors, shrunk towards e, that of all pairs
    gain_c = e_c V_c / (1 + V_c)

where `wrong_c` of the pair's `validated_c` validation images are answered wrongly. Ranking by `gain` is a heuristic:
it assumes that the errors of a pair fall in proportion to the variance of its mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from duplex.data.images import file_of
from duplex.evaluation.accumulate import Floats
from duplex.evaluation.probabilities import NEW_SHARE, AnsweredImages, fit_probabilities, image_weights
from duplex.features.tokens import Examples
from duplex.labels import SPLITS, Bools, Ints, LabelSpace
from duplex.methods.gaussian import ClassStatistics, ClosedForm, NormalEquations, PairMeans
from duplex.methods.layers import unit
from duplex.report.answers import accuracy_parts, answers_of, confusion_parts, probability_part, wrong_answers_part
from duplex.report.blocks import (
    Block,
    Chart,
    Figure,
    Mark,
    Note,
    Report,
    ReportPart,
    ReportSection,
    Series,
    Table,
    TableCell,
    TableRow,
    columns,
    count_cell,
    draw,
    number_cell,
    render_page,
    text_cell,
)
from duplex.report.images import thumbnails_under
from duplex.report.tables import recipe_table
from duplex.system.files import write_text

SHARES = (0.25, 0.5, 1.0)  # of the training images
DRAWS = 5  # of each share below 1
NEXT = 12  # pairs in the table of next images
BLOCK_SCORES = 1 << 22  # scores in memory at once, and scores from which temperature and prior are fitted
FORMULA = (
    "Gain = e V / (1 + V). V = 1/(n+k) + (k/(n+k))² u′H⁻¹u is the variance of the pair's mean in the closed form, in "
    "coordinates where images spread by 1 about it: n labelled images; k = {k:.2g} images, the worth of the prediction "
    "from state and object; H the normal equations of their effects. One more image takes away the share V/(1 + V) "
    "of V. e is the share of the pair's validation images that the closed form gets wrong, shrunk by one image to that "
    "of all pairs. The order is a heuristic."
)


@dataclass(frozen=True)
class SampleSizeCurve:
    """Accuracy by number of training images, extrapolated to twice as many."""

    accuracies: Mapping[int, Sequence[float]]  # number of training images -> accuracy in percent of each random draw
    slope: float  # beta of `extrapolate`
    doubled: float  # accuracy in percent expected of twice as many images: an extrapolation

    @classmethod
    def of(cls, examples: Mapping[str, Examples], labels: LabelSpace) -> SampleSizeCurve | None:
        """Measure accuracy with a quarter, half and all of the training images; None if these are equally many."""
        train = examples["train"].compositions.numpy()
        accuracies = {}
        for share in SHARES:
            draws = [draw_share(train, share, seed) for seed in range(DRAWS if share < 1 else 1)]
            fits = [ClosedFormAnswers.of(examples, labels, rows, "test") for rows in draws]
            accuracies[len(draws[0])] = [fit.accuracy for fit in fits]
        if len(accuracies) < len(SHARES):
            return None
        means = [fmean(each) for each in accuracies.values()]
        return cls(accuracies, *extrapolate(list(accuracies), means, len(examples["test"])))


def draw_share(compositions: Ints, share: float, seed: int) -> Ints:
    """Draw a random share of each pair's images, at least one per pair; returns indices in ascending order."""
    generator = np.random.default_rng(seed)
    rows = []
    for pair in np.unique(compositions):
        members = np.flatnonzero(compositions == pair)
        rows.append(generator.permutation(members)[: max(1, int(share * len(members) + 0.5))])
    return np.sort(np.concatenate(rows))


def extrapolate(images: list[int], accuracies: list[float], measured: int) -> tuple[float, float]:
    """Fit a power law to error by number of images; returns its slope beta, and the accuracy for twice as many.

        log e(n) = alpha + beta log n,    e = 100 - accuracy, fitted by least squares

    measured: number of test images; an error below half a test image counts as half an image.
    """
    error = np.maximum(100 - np.array(accuracies), 50 / measured)
    beta, alpha = np.polyfit(np.log(images), np.log(error), 1)
    return float(beta), 100 - float(min(100.0, np.exp(alpha + beta * np.log(2 * images[-1]))))


@dataclass(frozen=True)
class ClosedFormAnswers:
    """A closed-form classifier and its answers for the images of one split."""

    model: ClosedForm
    target: Ints  # [N] compositions
    answer: Ints  # [N]
    is_seen: Bools  # [N] whether training shows the label

    @classmethod
    def of(cls, examples: Mapping[str, Examples], labels: LabelSpace, rows: Ints, split: str) -> ClosedFormAnswers:
        """Fit a classifier to the training images `rows`, calibrate it on validation images, and predict a split."""
        train = examples["train"]
        chosen = torch.from_numpy(rows)
        shape = len(labels.states), len(labels.objects)
        statistics = ClassStatistics.of(unit(train.cls[chosen]), train.compositions[chosen], *shape)
        model = ClosedForm.fit(statistics).to(torch.float32)
        candidates = labels.candidates("closed", "train")
        target = examples[split].compositions.numpy()
        place = _best_candidates(model, candidates, examples, split, labels.is_seen(candidates))
        return cls(model, target, candidates[place], labels.is_seen(target))

    @property
    def accuracy(self) -> float:
        """Accuracy in percent, weighted so that images of unseen pairs together count `NEW_SHARE` (0.1)."""
        return 100 * float(image_weights(self.is_seen, NEW_SHARE) @ (self.answer == self.target))


def _best_candidates(
    model: ClosedForm, candidates: Ints, examples: Mapping[str, Examples], split: str, seen: Bools
) -> Ints:
    scorer = model.scorer(torch.from_numpy(candidates))
    val = examples["val"]

    def log_p(cls: Tensor) -> Tensor:
        return scorer(unit(cls).float()).log_softmax(1)

    count = min(len(val), max(1, BLOCK_SCORES // len(candidates)))
    rows = torch.from_numpy(np.linspace(0, len(val) - 1, count).astype(int))
    label = np.searchsorted(candidates, val.compositions[rows].numpy())
    confidence = fit_probabilities(log_p(val.cls[rows]).double(), label, seen)
    prior: Floats = confidence.log_prior(seen, np.ones_like(seen))
    shift = torch.from_numpy(prior * confidence.temperature).float()  # the argmax of log p / T + prior
    step = max(1, BLOCK_SCORES // len(candidates))
    return np.concatenate([(log_p(part) + shift).argmax(1).numpy() for part in examples[split].cls.split(step)])


@dataclass(frozen=True)
class NextImages:
    """A data set's labelled pairs, ranked by how much one more image of the pair is expected to help."""

    pairs: Ints  # [P] compositions, the largest gain first
    images: Ints  # [P] labelled images, of all splits
    variance: Floats  # V [P]
    validated: Ints  # [P] validation images of pairs that training shows
    wrong: Ints  # [P] of these
    gain: Floats  # [P]
    shrinkage: float  # k
    errors: tuple[float, float] | None  # percent wrong on validation images of pairs of larger and smaller variance

    @classmethod
    def of(cls, examples: Mapping[str, Examples], labels: LabelSpace) -> NextImages:
        """Rank the pairs by their images in all splits and by the closed form's errors on validation images."""
        answers = ClosedFormAnswers.of(examples, labels, np.arange(len(examples["train"])), "val")
        model = answers.model
        ridge = model.settings.ridge
        counts = pair_counts(examples, labels, ("train", "val", "test"))
        pairs = np.flatnonzero(counts)
        variance = variances_of_means(counts, model.shrinkage, ridge, model.shape)[pairs]
        right = answers.answer == answers.target
        seen = answers.is_seen
        validated = np.bincount(answers.target[seen], minlength=labels.size)[pairs]
        wrong = np.bincount(answers.target[seen & ~right], minlength=labels.size)[pairs]
        gain = expected_gain(variance, wrong, validated)
        order = np.argsort(-gain, kind="stable")
        train_counts = pair_counts(examples, labels, ("train",))
        before = variances_of_means(train_counts, model.shrinkage, ridge, model.shape)[answers.target]
        larger = before > np.median(before)
        errors = None
        if larger.any() and not larger.all():
            errors = 100 * float((~right[larger]).mean()), 100 * float((~right[~larger]).mean())
        return cls(
            pairs=pairs[order],
            images=counts[pairs[order]],
            variance=variance[order],
            validated=validated[order],
            wrong=wrong[order],
            gain=gain[order],
            shrinkage=model.shrinkage,
            errors=errors,
        )


def pair_counts(examples: Mapping[str, Examples], labels: LabelSpace, splits: tuple[str, ...]) -> Ints:
    """Number of images of each composition [M*N] in the given splits."""
    compositions = np.concatenate([examples[split].compositions.numpy() for split in splits])
    return np.bincount(compositions, minlength=labels.size)


def variances_of_means(counts: Ints, k: float, ridge: float, shape: tuple[int, int]) -> Floats:
    """Posterior variance [M*N] of each composition's mean feature, given its number of images.

    Args:
        counts: number of images of each composition [M*N].
        k: 1 / variance of interactions (deviations from state + object effect); the prior counts like k images.
        ridge: penalty on the effects of states and objects.
        shape: (M, N), numbers of states and of objects.
    """
    m, n = shape
    seen = torch.from_numpy(np.flatnonzero(counts))
    number = torch.from_numpy(counts).double()
    nothing = torch.zeros(len(seen), 0, dtype=torch.float64)
    normal = NormalEquations(PairMeans(seen // n, seen % n, number[seen], nothing, shape), 1 / k, ridge)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(normal.matrix))  # H^-1 [1 + M + N, 1 + M + N]
    own = inverse.diagonal()
    s = slice(1, 1 + m)
    o = slice(1 + m, None)
    by_state = own[s] + 2 * inverse[0, s]
    by_object = own[o] + 2 * inverse[0, o]
    of_effects = inverse[0, 0] + by_state[:, None] + by_object + 2 * inverse[s, o]  # u_c' H^-1 u_c [M, N]
    rest = k / (number + k)
    variance: Floats = (1 / (number + k) + rest**2 * of_effects.flatten()).numpy()
    return variance


def expected_gain(variance: Floats, wrong: Ints, validated: Ints) -> Floats:
    """Expected decrease [P] of each pair's error by one more training image, for ranking pairs only."""
    overall = wrong.sum() / max(1, validated.sum())
    errors = (wrong + overall) / (validated + 1)
    gain: Floats = errors * variance / (1 + variance)
    return gain


@dataclass(frozen=True)
class OwnData:
    """Everything that a data set's page shows."""

    name: str
    labels: LabelSpace
    manifest: pd.DataFrame  # image, state, object, split
    root: Path  # folder of the images
    answered: AnsweredImages  # test images
    examples: Mapping[str, Examples]  # split -> frozen features, on the CPU
    recipes: Sequence[Mapping[str, Any]] = ()  # `RecipeChoice.table`
    facts: Sequence[tuple[str, str]] = ()  # further lines of the head, such as the encoder

    @property
    def readable(self) -> pd.DataFrame:
        """The manifest without the unreadable images."""
        return self.manifest.iloc[np.sort(np.concatenate([self.examples[split].rows for split in SPLITS]))]


def write_page(data: OwnData, path: Path) -> Path:
    write_text(path, render_page(own_report(data)))
    return path


def own_report(data: OwnData) -> Report:
    labels = data.labels
    answered = data.answered
    present = any((data.root / file_of(image)).is_file() for image in data.manifest["image"])
    thumbnails = thumbnails_under(data.root) if present else None
    answers = answers_of(answered, data.manifest)
    train = data.readable[data.readable["split"] == "train"]
    names = labels.names(labels.index(train["state"].tolist(), train["object"].tolist()))
    training = pd.Series(names, train["image"])
    curve = SampleSizeCurve.of(data.examples, labels)
    advice = labelling_advice_part(NextImages.of(data.examples, labels), labels)
    sections: list[tuple[str, str, Sequence[ReportPart | None]]] = [
        ("accuracy", "Accuracy", accuracy_parts(answered, answers, training)),
        ("confusions", "Confusions", confusion_parts(answered, answers, training, thumbnails)),
        ("probabilities", "Probabilities", [probability_part(answered)]),
        ("more-images", "More images", [None if curve is None else curve_part(curve), advice]),
        ("wrong", "Wrong answers", [wrong_answers_part(answers, thumbnails)]),
    ]
    if data.recipes:
        table = recipe_table("Recipes compared on validation images", data.recipes, "recipe")
        sections.append(("recipes", "Training", [ReportPart("Recipes", [table])]))
    filled = [(ident, title, [part for part in parts if part is not None]) for ident, title, parts in sections]
    lead = "Recognition of states and objects on this data set alone, measured on test images that chose nothing."
    return Report(data.name, lead, [ReportSection(*each) for each in filled if each[2]], _facts(data))


def _facts(data: OwnData) -> list[tuple[str, str]]:
    counts = data.readable["split"].value_counts()
    pairs = len(data.readable[["state", "object"]].drop_duplicates())
    facts = [
        ("images", f"{len(data.readable):,}"),
        ("train / val / test", " / ".join(f"{int(counts.get(split, 0)):,}" for split in SPLITS)),
        ("states", f"{len(data.labels.states):,}"),
        ("objects", f"{len(data.labels.objects):,}"),
        ("labelled pairs", f"{pairs:,}"),
    ]
    facts.append((f"accuracy, {100 * data.answered.new_share:g} % unseen", f"{data.answered.accuracy:.1f} %"))
    return [*facts, *data.facts]


def curve_part(curve: SampleSizeCurve) -> ReportPart:
    images, drawn = list(curve.accuracies), curve.accuracies.values()
    means = [fmean(each) for each in drawn]
    low = [min(each) for each in drawn]
    high = [max(each) for each in drawn]
    marks = [Mark(n, mean, f"{n:,} training images: {mean:.1f} %") for n, mean in zip(images, means, strict=True)]
    measured = Series("measured", images, means, low, high, marks, 0)
    twice = 2 * images[-1]
    ahead = Mark(twice, curve.doubled, f"{twice:,} training images: {curve.doubled:.1f} %, extrapolated")
    guess = Series("extrapolated", [images[-1], twice], [means[-1], curve.doubled], marks=[ahead], tone=1)
    alt = f"accuracy by number of training images, from {means[0]:.1f} % with {images[0]} to {means[-1]:.1f} %"
    drawing = draw(Chart(alt, "training images", "accuracy, %", [measured, guess], from_zero=False))
    caption = (
        f"Closed form on the frozen features, on test images; means of {DRAWS} random draws of a quarter and of half "
        "of the training images of every pair, the band from the lowest to the highest draw. It has "
        "no text and nothing trained, so its accuracy is another than the model's; the shape is what counts."
    )
    slope = f"{curve.slope:.2f}".replace("-", "−")
    doubled = (
        f"Twice as many images per pair would give {curve.doubled:.1f} % instead of {means[-1]:.1f} %. This is an "
        f"extrapolation, by the line log error = α + β log images with β = {slope}, and no measurement."
    )
    return ReportPart("More images of the same pairs", [Figure("learning-curve", drawing, caption), Note(doubled)])


def labelling_advice_part(advice: NextImages, labels: LabelSpace) -> ReportPart:
    rows = []
    for i, pair in enumerate(advice.pairs[:NEXT].tolist()):
        wrong, validated = int(advice.wrong[i]), int(advice.validated[i])
        share = number_cell(None)
        if validated:
            share = TableCell(f"{wrong} of {validated}", wrong / validated)
        variance = number_cell(float(advice.variance[i]), "{:.3f}")
        gain = number_cell(float(advice.gain[i]), "{:.3f}")
        rows.append(TableRow([text_cell(labels.name(pair)), count_cell(advice.images[i]), share, variance, gain]))
    header = columns("pair", "labelled images", "wrong in validation", "variance V", "gain")
    note = FORMULA.format(k=advice.shrinkage)
    blocks: list[Block] = [Table("Pairs whose next images would help most", header, rows, note)]
    if advice.errors is not None:
        larger, smaller = advice.errors
        text = (
            f"On validation images, the closed form is wrong for {larger:.1f} % of those whose pair has a variance "
            f"above the median, and for {smaller:.1f} % of the others."
        )
        blocks.append(Note(text))
    return ReportPart("Next images", blocks)
