"""Build the parts of a data set's page: accuracy, confusions, probabilities, learning curve, wrong answers, recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from duplex.evaluation.answered_images import AnsweredImages, Confusion, LabelAccuracy
from duplex.labels import Ints, LabelSpace, prompt_name
from duplex.report.blocks import (
    MISSING,
    Block,
    Column,
    Figure,
    Gallery,
    Group,
    Line,
    Matrix,
    Note,
    ReportPart,
    Strip,
    Table,
    TableCell,
    TableRow,
    Thumb,
    columns,
    text_cell,
)
from duplex.report.charts import Chart, Mark, Series, draw
from duplex.report.learning_curve import DRAWS, LearningCurve
from duplex.report.next_images import NextImages
from duplex.report.thumbnails import Thumbnails

ROWS = 300  # of a table
MATRIX = 24  # labels of a confusion matrix
CONFUSED, EACH = 8, 4  # confused pairs with thumbnails, and thumbnails of each side
WRONG = 32  # thumbnails of wrong answers
NEXT = 12  # pairs whose next images would help
KINDS = ("known pairs", "new pairs")  # with and without training images


def accuracy_parts(answered: AnsweredImages, train: Ints) -> list[ReportPart]:
    """Return report parts with tables of a model's accuracy: overall, by state, by object and by pair.

    train: composition of each training image.
    """
    labels = answered.labels
    state, thing = ([prompt_name(name) for name in names] for names in (labels.states, labels.objects))
    parts = [
        ReportPart("By state", [_primitive_table("state", answered.accuracies(labels.state_of), state)]),
        ReportPart("By object", [_primitive_table("object", answered.accuracies(labels.object_of), thing)]),
        ReportPart("By pair", [_pair_table(answered.accuracies(lambda pairs: pairs), labels, train)]),
    ]
    return [ReportPart("Overall", [_overall_table(answered)]), *parts]


def _overall_table(answered: AnsweredImages) -> Table:
    labels, rows = answered.labels, []
    right = [answered.right]
    right += [part(answered.answer) == part(answered.target) for part in (labels.state_of, labels.object_of)]
    for name, mask in zip(KINDS, (answered.is_seen, ~answered.is_seen), strict=True):
        if mask.any():
            rows.append(
                TableRow([text_cell(name), _count(int(mask.sum())), *(_percent(r[mask].mean()) for r in right)])
            )
    header = columns("test images of", "images", "pair right, %", "state right, %", "object right, %")
    note = "The answer is the most probable pair. Known pairs have training images, new ones have none."
    return Table("Accuracy of answers as listed", header, rows, note)


def _primitive_table(kind: str, groups: Sequence[LabelAccuracy], names: Sequence[str]) -> Table:
    rows = [
        TableRow(
            [
                text_cell(names[group.label]),
                *(cell for place in (0, 1) for cell in _accuracy_cells(group, place)),
                text_cell(MISSING if group.rival is None else f"{names[group.rival[0]]} ({group.rival[1]})"),
            ]
        )
        for group in sorted(groups, key=lambda group: group.percent)[:ROWS]
    ]
    header = [Column(kind, False)]
    header += [Column(title) for name in KINDS for title in (f"images of {name}", f"{kind} right, %")]
    note = f"The first {ROWS} of {len(groups)}." if len(groups) > ROWS else ""
    return Table(
        f"Accuracy of the {kind}, the lowest first", [*header, Column("most often taken for", False)], rows, note
    )


def _pair_table(groups: Sequence[LabelAccuracy], labels: LabelSpace, train: Ints) -> Table:
    images = np.bincount(train, minlength=labels.size)
    rows = [
        TableRow(
            [
                text_cell(labels.name(group.label)),
                text_cell("known" if group.images[0] else "new"),
                _count(int(images[group.label])),
                _count(sum(group.images)),
                TableCell(f"{group.percent:.1f}", group.percent),
                text_cell(MISSING if group.rival is None else f"{labels.name(group.rival[0])} ({group.rival[1]})"),
            ]
        )
        for group in sorted(groups, key=lambda group: group.percent)[:ROWS]
    ]
    header = [*columns("pair", "in training", "training images", "test images", "right, %", texts=2)]
    note = f"The first {ROWS} of {len(groups)}." if len(groups) > ROWS else ""
    return Table("Accuracy of pairs, the lowest first", [*header, Column("most often taken for", False)], rows, note)


def _accuracy_cells(group: LabelAccuracy, kind: int) -> list[TableCell]:
    percent = group.percent_of(kind)
    accuracy = TableCell(MISSING) if percent is None else TableCell(f"{percent:.1f}", percent)
    return [_count(group.images[kind]), accuracy]


def confusion_parts(
    answered: AnsweredImages, manifest: pd.DataFrame, thumbnails: Thumbnails | None
) -> list[ReportPart]:
    """Return report parts with the confusion matrices of states and objects, and the most confused pairs with images.

    thumbnails: function from an image's name to its thumbnail; None if no image is on this machine.
    """
    labels = answered.labels
    matrices: list[tuple[str, Callable[[Ints], Ints], tuple[str, ...]]] = [
        ("States", labels.state_of, labels.states),
        ("Objects", labels.object_of, labels.objects),
    ]
    parts = [
        ReportPart(title, [_matrix(answered.matrix(part, len(names)), names, title)])
        for title, part, names in matrices
        if len(names) > 1
    ]
    if confused := answered.confused(CONFUSED):
        parts.append(ReportPart("Pairs", [_confused_pairs(confused, answered, manifest, thumbnails)]))
    return parts


def _matrix(counts: Ints, names: Sequence[str], title: str) -> Matrix:
    """Return a confusion matrix as a report block, limited to the 24 labels with the most errors.

    counts: number of images by label (row) and answer (column). Labels that do not occur are left out.
    """
    errors = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    occurring = np.flatnonzero(counts.sum(0) + counts.sum(1))
    shown = np.sort(occurring[np.argsort(-errors[occurring], kind="stable")][:MATRIX])
    note = "A row is a label, a column an answer; a number counts test images."
    if len(shown) < len(occurring):
        note += f" The {len(shown)} of {len(occurring)} with the most errors."
    block = counts[np.ix_(shown, shown)].tolist()
    return Matrix(f"{title}: label against answer", [prompt_name(names[i]) for i in shown], block, note)


def _confused_pairs(
    confused: Sequence[Confusion], answered: AnsweredImages, manifest: pd.DataFrame, thumbnails: Thumbnails | None
) -> Block:
    names = answered.labels
    if thumbnails is None:
        header = columns("label", "answer", "images", "of", texts=2)
        rows = [
            TableRow(
                [text_cell(names.name(c.label)), text_cell(names.name(c.answer)), _count(c.count), _count(c.images)]
            )
            for c in confused
        ]
        return Table("Most confused pairs", header, rows)
    codes = names.index(manifest["state"].tolist(), manifest["object"].tolist())
    in_training = (manifest["split"] == "train").to_numpy()
    images = manifest["image"].tolist()
    groups = []
    for each in confused:
        label, answer = names.name(each.label), names.name(each.answer)
        wrong = [images[row] for row in answered.rows[each.places[:EACH]]]
        examples = [images[row] for row in np.flatnonzero(in_training & (codes == each.answer))[:EACH]]
        strips = [Strip("answered wrongly", _thumbs(wrong, label, thumbnails, False))]
        if examples:
            strips.append(Strip(f"training images of {answer}", _thumbs(examples, answer, thumbnails, None)))
        groups.append(Group(f"{label} answered as {answer}: {each.count} of {each.images}", strips))
    return Gallery(groups, "The most frequent wrong answers on test images.")


def _thumbs(images: Sequence[str], name: str, thumbnails: Thumbnails, right: bool | None) -> list[Thumb]:
    return [Thumb(thumbnails(image), name, f"image labelled {name}", right) for image in images]


def probability_part(answered: AnsweredImages) -> ReportPart:
    """Return the report part with the reliability diagram (accuracy by probability) and its calibration error."""
    groups = answered.reliability
    places = np.flatnonzero(groups.images)
    x, y = 100 * groups.probability[places], 100 * groups.accuracy[places]
    marks = [
        Mark(a, b, f"probability {a:.0f} %, right {b:.0f} %, {n} images")
        for a, b, n in zip(x.tolist(), y.tolist(), groups.images[places].tolist(), strict=True)
    ]
    ideal = Series("as often right as probable", [0.0, 100.0], [0.0, 100.0], tone=6)
    line = Series("answers", x.tolist(), y.tolist(), marks=marks, tone=0)
    error = 100 * groups.calibration_error
    alt = f"accuracy of answers by their probability; expected calibration error {error:.1f} %"
    drawing = draw(Chart(alt, "probability of the answer, %", "right answers, %", [line, ideal]))
    share = f"{100 * answered.new_share:g} %"
    caption = (
        f"Expected calibration error {error:.1f} %: the mean distance of accuracy and probability over "
        f"{len(groups.images)} bins, with images weighted so that {share} are of new pairs. "
        "Points below the diagonal are answers that are surer than they are right."
    )
    return ReportPart("Reliability", [Figure("reliability", drawing, caption)])


def curve_part(curve: LearningCurve) -> ReportPart:
    """Return the report part with the learning curve, and its extrapolation to twice as many training images."""
    images, means = [point.images for point in curve.points], [point.mean for point in curve.points]
    low, high = ([pick(point.accuracies) for point in curve.points] for pick in (min, max))
    marks = [Mark(n, mean, f"{n:,} training images: {mean:.1f} %") for n, mean in zip(images, means, strict=True)]
    measured = Series("measured", images, means, low, high, marks, 0)
    tip = f"{2 * images[-1]:,} training images: {curve.doubled:.1f} %, extrapolated"
    ahead = Mark(2 * images[-1], curve.doubled, tip)
    guess = Series("extrapolated", [images[-1], 2 * images[-1]], [means[-1], curve.doubled], marks=[ahead], tone=1)
    alt = f"accuracy by number of training images, from {means[0]:.1f} % with {images[0]} to {means[-1]:.1f} %"
    drawing = draw(Chart(alt, "training images", "accuracy, %", [measured, guess], from_zero=False))
    caption = (
        f"Closed form on the frozen features, on test images; means of {DRAWS} random draws of a quarter and of half "
        "of the training images of every pair, the band from the lowest to the highest draw. It has "
        "no text and nothing trained, so its accuracy is another than the model's; the shape is what counts."
    )
    power = "log error = α + β log images"
    doubled = (
        f"Twice as many images per pair would give {curve.doubled:.1f} % instead of {means[-1]:.1f} %. This is an "
        f"extrapolation, by the line {power} with β = {_signed(curve.slope)}, and no measurement."
    )
    return ReportPart("More images of the same pairs", [Figure("learning-curve", drawing, caption), Note(doubled)])


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


FORMULA = (
    "Gain = e V / (1 + V). V = 1/(n+k) + (k/(n+k))² u′H⁻¹u is the variance of the pair's mean in the closed form, in "
    "coordinates where images spread by 1 about it: n labelled images; k = {k:.2g} images, the worth of the prediction "
    "from state and object; H the normal equations of their effects. One more image takes away the share V/(1 + V) "
    "of V. e is the share of the pair's validation images that the closed form gets wrong, shrunk by one image to that "
    "of all pairs. The order is a heuristic."
)


def next_part(next_images: NextImages, labels: LabelSpace) -> ReportPart:
    """Return the report part with the labelled pairs for which one more labelled image would help most, as a table."""
    each = next_images
    rows = [
        TableRow(
            [
                text_cell(labels.name(int(each.pairs[i]))),
                _count(int(each.images[i])),
                _share(int(each.wrong[i]), int(each.validated[i])),
                TableCell(f"{each.variance[i]:.3f}", float(each.variance[i])),
                TableCell(f"{each.gain[i]:.3f}", float(each.gain[i])),
            ]
        )
        for i in range(min(NEXT, len(each.pairs)))
    ]
    header = columns("pair", "labelled images", "wrong in validation", "variance V", "gain")
    table = Table("Pairs whose next images would help most", header, rows, FORMULA.format(k=each.shrinkage))
    blocks: list[Block] = [table]
    if each.errors is not None:
        larger, smaller = each.errors
        blocks.append(
            Note(
                f"On validation images, the closed form is wrong for {larger:.1f} % of those whose pair has a variance "
                f"above the median, and for {smaller:.1f} % of the others."
            )
        )
    return ReportPart("Next images", blocks)


def wrong_answers_part(
    answered: AnsweredImages, manifest: pd.DataFrame, thumbnails: Thumbnails | None
) -> ReportPart | None:
    """Return the report part with a gallery of the wrong answers that have the highest probability.

    None without wrong answers, or if no image is on this machine.
    """
    places = answered.wrong(WRONG)
    if thumbnails is None or not len(places):
        return None
    names, images = answered.labels, manifest["image"].tolist()
    thumbs = []
    for place in places.tolist():
        label, answer = names.name(int(answered.target[place])), names.name(int(answered.answer[place]))
        lines = [Line(f"answer: {answer}", False), Line(f"probability {100 * answered.probability[place]:.0f} %")]
        name = images[answered.rows[place]]
        thumbs.append(Thumb(thumbnails(name), label, f"{name}, labelled {label}", False, lines))
    total = int((~answered.right).sum())
    count = f"All {total}" if total == len(places) else f"The first {len(places)} of {total}"
    caption = f"{count} wrong answers on test images, the most probable first; some may be wrong labels."
    return ReportPart("Most probable first", [Gallery([Group("", [Strip("", thumbs)])], caption)])


def recipe_part(recipes: Sequence[Mapping[str, Any]]) -> ReportPart:
    """Return the report part with a table of the recipes (settings of training) compared on validation images.

    recipes: a mapping per recipe, with `recipe` (its name), validation `auc`, `chosen` and further results.
    """
    rows = []
    for recipe in recipes:
        auc, gain = float(recipe["auc"]), recipe.get("gain")
        error = recipe.get("error")
        rows.append(
            TableRow(
                [
                    TableCell(recipe["recipe"], recipe["recipe"], rank=1 if recipe["chosen"] else 0),
                    TableCell(f"{auc:.1f}", auc, spread="" if error is None else f"± {error:.1f}"),
                    TableCell(MISSING) if gain is None else TableCell(f"{gain:+.1f}", float(gain)),
                    _percent_cell(recipe.get("accuracy")),
                    _count(int(recipe["epoch"])),
                ]
            )
        )
    header = columns("recipe", "validation AUC", "gain over the best before", "accuracy, %", "best epoch")
    return ReportPart(
        "Recipes", [Table("Recipes compared on validation images", header, rows, "The chosen one is bold.")]
    )


def _share(part: int, whole: int) -> TableCell:
    return TableCell(f"{part} of {whole}", part / whole) if whole else TableCell(MISSING)


def _percent_cell(value: float | None) -> TableCell:
    return TableCell(MISSING) if value is None else TableCell(f"{value:.1f}", float(value))


def _percent(share: float) -> TableCell:
    return TableCell(f"{100 * share:.1f}", 100 * float(share))


def _count(images: int) -> TableCell:
    return TableCell(f"{images:,}", images)
