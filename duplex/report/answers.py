"""Parts of a page on answers for test images: examples, confusions, accuracies, probabilities.

`answers` is a table with the columns `image`, `label`, `answer`, `seen` (whether the label occurs
in training) and `right`. `training` maps each training image to its label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from duplex.evaluation.answered import AnsweredImages
from duplex.evaluation.metrics import MISSING
from duplex.labels import Ints, prompt_name
from duplex.report.blocks import (
    Block,
    Caption,
    Chart,
    Column,
    ColumnOf,
    ConfusionMatrix,
    Figure,
    Gallery,
    Mark,
    Note,
    ReportPart,
    Series,
    Strip,
    Strips,
    Table,
    TableRow,
    Thumb,
    count_cell,
    draw,
    headings,
    number_cell,
    table_of,
    text_cell,
    text_column,
)
from duplex.report.images import RetrievedTexts, Thumbnails

AT_BIAS = "At the bias on unseen pairs that was chosen on validation."
ROWS = 300  # of a table
EACH = 4  # images of a group of examples
SHOWN = 10  # rows of a table of the report
MATRIX = 24  # labels of a confusion matrix
CONFUSED = 8  # confused pairs with thumbnails
WRONG = 32  # thumbnails of wrong answers
RIVAL = Column("taken for", False, "the most frequent wrong answer, and its number of images")
SharedAccuracies = Mapping[str, Mapping[str, float]]  # of `GroupAnswers.by_share`
KINDS = ("seen pairs", "unseen pairs")  # with and without training images


def answers_of(answered: AnsweredImages, manifest: pd.DataFrame) -> pd.DataFrame:
    names = answered.labels.names
    return pd.DataFrame(
        {
            "image": manifest["image"].to_numpy()[answered.rows],
            "label": names(answered.target),
            "answer": names(answered.answer),
            "seen": answered.is_seen,
            "right": answered.right,
            "probability": answered.probability,
        }
    )


def example_and_error_parts(
    predictions: pd.DataFrame, source: str, thumbnails: Thumbnails, notes: Sequence[Block], texts: RetrievedTexts
) -> list[ReportPart]:
    """Parts `Examples` (`notes` first) and `Errors` of a run; cells cite the file `source`."""
    answers = predictions[predictions["world"] == "closed"].rename(columns={"top1": "answer"})
    few = min(SHOWN, answers["label"].nunique() // 2)
    tables = [
        confused_table(answers, "Most confused pairs, closed world", SHOWN, source),
        pair_accuracy_table(answers, "Recognised best, closed world", few, source, best=True),
        pair_accuracy_table(answers, "Recognised worst, closed world", few, source),
    ]
    examples: Block = example_gallery(answers, thumbnails, texts.lines)
    if not len(answers):
        examples = Note(
            "There are no predictions in the closed world, which examples need: add closed to "
            "evaluation.worlds, or let report.featured name a method for this world."
        )
    shown = ReportPart("Examples", [*notes, examples, *texts.blocks])
    return [shown, ReportPart("Errors", tables)]


def example_gallery(answers: pd.DataFrame, thumbnails: Thumbnails, texts: Mapping[int, Sequence[Caption]]) -> Gallery:
    """Right and wrong, seen and unseen test images, each with its three best answers."""
    groups = []
    for seen, right in ((True, True), (False, True), (True, False), (False, False)):
        rows = answers[(answers["seen"] == seen) & (answers["right"] == right)]
        rows = rows.drop_duplicates("label")
        places = np.unique(np.linspace(0, max(len(rows) - 1, 0), EACH).astype(int))[: len(rows)]
        thumbs = []
        for _, row in rows.iloc[places].iterrows():
            thumbs.append(_example(row, thumbnails, texts.get(row["row"], ())))
        if thumbs:
            title = f"{'Seen' if seen else 'Unseen'} pairs, {'right' if right else 'wrong'}"
            groups.append(Strips(title, [Strip("", thumbs)]))
    caption = "Below each test image: its label and the three best predictions, at the bias chosen on validation"
    if texts:
        caption += "; then the three closed-world pairs whose semantic prototypes are nearest, with their cosines"
    return Gallery(groups, f"{caption}.")


def _example(row: pd.Series, thumbnails: Thumbnails, texts: Sequence[Caption]) -> Thumb:
    best = [row[key] for key in ("answer", "top2", "top3") if isinstance(row.get(key), str) and row[key]]
    lines = [Caption(name, name == row["label"]) for name in best]
    if texts:
        lines = [Caption("all score terms:", head=True), *lines, Caption("text alone:", head=True), *texts]
    return Thumb(thumbnails(row["image"]), row["label"], f"test image labelled {row['label']}", lines=lines)


Confusion = tuple[str, str, list[str], int]


def most_confused(answers: pd.DataFrame) -> list[Confusion]:
    """Label, wrong answer, images, number of images with the label; most frequent first."""
    images = answers["label"].value_counts()
    wrong = answers[answers["label"] != answers["answer"]]
    groups: list[Any] = list(wrong.groupby(["label", "answer"]))
    groups.sort(key=lambda group: -len(group[1]))
    found = []
    for (label, answer), rows in groups:
        found.append((label, answer, rows["image"].tolist(), int(images[label])))
    return found


def confused_table(answers: pd.DataFrame, caption: str, limit: int, source: str = "") -> Table:
    columns: list[ColumnOf[Confusion]] = [
        (text_column("label"), lambda each: text_cell(each[0])),
        (text_column("answer"), lambda each: text_cell(each[1])),
        (Column("images"), lambda each: count_cell(len(each[2]), source)),
        (Column("of"), lambda each: count_cell(each[3], source)),
    ]
    return table_of(caption, columns, most_confused(answers)[:limit], AT_BIAS if source else "")


def pair_accuracy_table(
    answers: pd.DataFrame,
    caption: str,
    limit: int = ROWS,
    source: str = "",  # file that cells cite
    *,
    best: bool = False,
    train: Mapping[str, int] | None = None,  # number of training images
) -> Table:
    """Up to `limit` pairs, the lowest accuracy first (`best`: the highest), then most images."""
    groups = answers.groupby("label")
    pairs = groups.agg(seen=("seen", "first"), images=("right", "size"), share=("right", "mean"))
    pairs = pairs.sort_values(["share", "images"], ascending=[not best, False], kind="stable")
    rivals: dict[str, str] = {}
    for label, answer, images, _ in most_confused(answers):
        rivals.setdefault(label, f"{answer} ({len(images)})")
    columns: list[ColumnOf[Any]] = [
        (text_column("pair"), lambda pair: text_cell(pair.Index)),
        (text_column("in training"), lambda pair: text_cell("seen" if pair.seen else "unseen")),
    ]
    if train is not None:
        columns.append((Column("training images"), lambda pair: count_cell(train.get(pair.Index, 0))))
    columns += [
        (Column("test images"), lambda pair: count_cell(pair.images, source)),
        (Column("right, %"), lambda pair: number_cell(100 * float(pair.share), source=source)),
    ]
    if not best:
        columns.append((RIVAL, lambda pair: text_cell(rivals.get(pair.Index, MISSING))))
    note = AT_BIAS if source else ""
    if train is not None and len(pairs) > limit:
        note = f"The first {limit} of {len(pairs)}."
    return table_of(caption, columns, pairs.head(limit).itertuples(), note)


def accuracy_parts(
    answered: AnsweredImages, answers: pd.DataFrame, training: pd.Series, by_share: Mapping[str, SharedAccuracies]
) -> list[ReportPart]:
    """Accuracies overall, by the expected share of new pairs if given, by state, object and pair."""
    labels = answered.labels
    overall = [_overall_table(answered)]
    if by_share:
        overall.append(share_table(by_share))
    train: dict[Any, int] = training.value_counts().to_dict()
    return [
        ReportPart("Overall", overall),
        ReportPart("By state", [primitive_table("state", answered, labels.state_of, labels.states)]),
        ReportPart("By object", [primitive_table("object", answered, labels.object_of, labels.objects)]),
        ReportPart("By pair", [pair_accuracy_table(answers, "Accuracy of pairs, the lowest first", train=train)]),
    ]


def _overall_table(answered: AnsweredImages) -> Table:
    labels = answered.labels
    rows = []
    right = [answered.right]
    right += [part(answered.answer) == part(answered.target) for part in (labels.state_of, labels.object_of)]
    for name, mask in zip(KINDS, (answered.is_seen, ~answered.is_seen), strict=True):
        if mask.any():
            shares = [number_cell(100 * float(each[mask].mean())) for each in right]
            rows.append(TableRow([text_cell(name), count_cell(mask.sum()), *shares]))
    header = headings("test images of", "images", "pair right, %", "state right, %", "object right, %")
    note = "The answer is the most probable pair. Seen pairs have training images, unseen ones have none."
    return Table("Accuracy of answers as listed", header, rows, note)


def share_table(by_share: Mapping[str, SharedAccuracies]) -> Table:
    """Accuracy at the stored, the estimated and the true share of new pairs."""
    origins = {"stored": "stored", "estimated": "estimated", "true": "of these images"}
    rows = []
    for name, shares in by_share.items():
        for origin, at in shares.items():
            share = f"{100 * at['new_share']:.1f}"
            if "error" in at:
                share += f" ± {100 * at['error']:.1f}"
            numbers = [number_cell(at[key]) for key in ("accuracy", "accuracy_seen", "accuracy_unseen")]
            rows.append(TableRow([text_cell(name), text_cell(f"{share} %, {origins[origin]}"), *numbers]))
    titles = ("answers of", "share of unseen pairs", "all right, %", "seen pairs right, %", "unseen pairs right, %")
    header = headings(*titles, texts=2)
    note = (
        "Answers depend on the share of images expected to show unseen pairs. Images are weighted to this share, "
        "except at the share that was estimated from them without labels."
    )
    return Table("Accuracy by share of unseen pairs", header, rows, note)


def primitive_table(kind: str, answered: AnsweredImages, part: Callable[[Ints], Ints], labels: Sequence[str]) -> Table:
    """Accuracy of each state (`part` is `state_of`) or object (`object_of`), the lowest first."""
    names = [prompt_name(name) for name in labels]
    target = part(answered.target)
    answer = part(answered.answer)
    images = pd.DataFrame({"label": target, "answer": answer, "seen": answered.is_seen, "right": answer == target})
    groups = images.groupby("label")
    rows = []
    for label in groups["right"].mean().sort_values(kind="stable").index[:ROWS]:
        own = groups.get_group(label)
        cells = [text_cell(names[label])]
        for each in (own[own["seen"]], own[~own["seen"]]):
            share = 100 * int(each["right"].sum()) / len(each) if len(each) else None
            cells += [count_cell(len(each)), number_cell(share)]
        wrong = own.loc[~own["right"], "answer"]
        rival = f"{names[wrong.mode()[0]]} ({wrong.value_counts().max()})" if len(wrong) else MISSING
        rows.append(TableRow([*cells, text_cell(rival)]))
    header = [Column(kind, False)]
    for name in KINDS:
        header += [Column(f"images of {name}"), Column(f"{kind} right, %")]
    header.append(RIVAL)
    note = f"The first {ROWS} of {len(groups)}." if len(groups) > ROWS else ""
    return Table(f"Accuracy of the {kind}, the lowest first", header, rows, note)


def confusion_parts(
    answered: AnsweredImages, answers: pd.DataFrame, training: pd.Series, thumbnails: Thumbnails | None
) -> list[ReportPart]:
    """Confusion matrices of states and of objects, and the most confused pairs."""
    labels = answered.labels
    kinds = (("States", labels.state_of, labels.states), ("Objects", labels.object_of, labels.objects))
    parts = [
        ReportPart(title, [_matrix(answered.matrix(part, len(names)), names, title)])
        for title, part, names in kinds
        if len(names) > 1
    ]
    if not answered.right.all():
        confused: Block = confused_table(answers, "Most confused pairs", CONFUSED)
        if thumbnails is not None:
            confused = _confused_gallery(answers, training, thumbnails)
        parts.append(ReportPart("Pairs", [confused]))
    return parts


def _matrix(counts: Ints, names: Sequence[str], title: str) -> ConfusionMatrix:
    errors = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    occurring = np.flatnonzero(counts.sum(0) + counts.sum(1))
    shown = np.sort(occurring[np.argsort(-errors[occurring], kind="stable")][:MATRIX])
    note = "A row is a label, a column an answer; a number counts test images."
    if len(shown) < len(occurring):
        note += f" The {len(shown)} of {len(occurring)} with the most errors."
    block = counts[np.ix_(shown, shown)].tolist()
    return ConfusionMatrix(f"{title}: label against answer", [prompt_name(names[i]) for i in shown], block, note)


def _confused_gallery(answers: pd.DataFrame, training: pd.Series, thumbnails: Thumbnails) -> Gallery:
    def thumbs(images: Sequence[str], name: str, right: bool | None) -> list[Thumb]:
        return [Thumb(thumbnails(image), name, f"image labelled {name}", right) for image in images[:EACH]]

    groups = []
    for label, answer, images, total in most_confused(answers)[:CONFUSED]:
        strips = [Strip("answered wrongly", thumbs(images, label, False))]
        examples = training.index[training == answer].tolist()
        if examples:
            strips.append(Strip(f"training images of {answer}", thumbs(examples, answer, None)))
        groups.append(Strips(f"{label} answered as {answer}: {len(images)} of {total}", strips))
    return Gallery(groups, "The most frequent wrong answers on test images.")


def wrong_answers_part(answers: pd.DataFrame, thumbnails: Thumbnails | None) -> ReportPart | None:
    """The most probable wrong answers; None if there are none, or no images to show."""
    wrong = answers[~answers["right"]].sort_values("probability", ascending=False, kind="stable")
    if thumbnails is None or not len(wrong):
        return None
    thumbs = []
    shown: list[Any] = list(wrong.head(WRONG).itertuples())
    for each in shown:
        lines = [Caption(f"answer: {each.answer}", False), Caption(f"probability {100 * each.probability:.0f} %")]
        alt = f"{each.image}, labelled {each.label}"
        thumbs.append(Thumb(thumbnails(each.image), each.label, alt, False, lines))
    count = f"All {len(wrong)}" if len(wrong) == len(thumbs) else f"The first {len(thumbs)} of {len(wrong)}"
    caption = f"{count} wrong answers on test images, the most probable first; some may be wrong labels."
    return ReportPart("Most probable first", [Gallery([Strips("", [Strip("", thumbs)])], caption)])


def probability_part(answered: AnsweredImages) -> ReportPart:
    groups = answered.reliability
    places = np.flatnonzero(groups.images)
    x = (100 * groups.probability[places]).tolist()
    y = (100 * groups.accuracy[places]).tolist()
    marks = [
        Mark(a, b, f"probability {a:.0f} %, right {b:.0f} %, {n} images")
        for a, b, n in zip(x, y, groups.images[places].tolist(), strict=True)
    ]
    ideal = Series("as often right as probable", [0.0, 100.0], [0.0, 100.0], tone=6)
    line = Series("answers", x, y, marks=marks, tone=0)
    error = 100 * groups.calibration_error
    alt = f"accuracy of answers by their probability; expected calibration error {error:.1f} %"
    drawing = draw(Chart(alt, "probability of the answer, %", "right answers, %", [line, ideal]))
    share = f"{100 * answered.new_share:g} %"
    caption = (
        f"Expected calibration error {error:.1f} %: the mean distance of accuracy and probability over "
        f"{len(groups.images)} bins, with images weighted so that {share} are of unseen pairs. "
        "Points below the diagonal are answers that are surer than they are right."
    )
    return ReportPart("Reliability", [Figure("reliability", drawing, caption)])
