"""Numbers of the page of one data set against loops and naive fits."""

from collections import Counter
from statistics import fmean

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.data.tables import labels_of
from duplex.evaluation.metrics import MISSING
from duplex.evaluation.probabilities import AnsweredImages, fit_probabilities
from duplex.labels import LabelSpace
from duplex.methods.gaussian import ClassStatistics, ClosedForm
from duplex.methods.layers import unit
from duplex.report.answers import WRONG, answers_of, most_confused, primitive_table, wrong_answers_part
from duplex.report.own import DRAWS, SampleSizeCurve, closed_form_answers, draw_share, extrapolate
from tests.report.own_data import examples_of, manifest

LABELS = LabelSpace(("a", "b", "c"), ("x", "y"), {"train": np.array([0, 1, 4]), "test": np.array([2, 5])})
ANSWERS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0, 1)), min_size=1, max_size=50)


def answered(images) -> AnsweredImages:
    target, answer, probability = (np.array(column) for column in zip(*images, strict=True))
    return AnsweredImages(LABELS, np.arange(len(images)), target, answer, probability)


@settings(max_examples=60, deadline=None)
@given(ANSWERS, st.sampled_from(["state", "object"]))
def test_accuracies_by_label_equal_those_of_a_loop(images, kind) -> None:
    part, names = (LABELS.state_of, LABELS.states) if kind == "state" else (LABELS.object_of, LABELS.objects)
    rows = {row.cells[0].text: row.cells[1:] for row in primitive_table(kind, answered(images), part, names).rows}
    assert set(rows) == {names[part(target)] for target, *_ in images}
    for name, cells in rows.items():
        own = [(target, answer) for target, answer, _ in images if names[part(target)] == name]
        for place, seen in enumerate((True, False)):
            of_kind = [(t, a) for t, a in own if (t in (0, 1, 4)) == seen]
            right = sum(part(t) == part(a) for t, a in of_kind)
            assert cells[2 * place].value == len(of_kind)
            assert cells[2 * place + 1].value == (pytest.approx(100 * right / len(of_kind)) if of_kind else None)
        wrong = Counter(part(a) for t, a in own if part(a) != part(t))
        times = max(wrong.values(), default=0)
        best = min((label for label in wrong if wrong[label] == times), default=None)
        assert cells[4].text == (MISSING if best is None else f"{names[best]} ({times})")


@settings(max_examples=60, deadline=None)
@given(ANSWERS)
def test_matrix_confusions_and_wrong_answers_equal_those_of_a_loop(images) -> None:
    data = answered(images)
    matrix = np.zeros((3, 3), dtype=int)
    for target, answer, _ in images:
        matrix[target // 2, answer // 2] += 1
    assert data.matrix(LABELS.state_of, 3).tolist() == matrix.tolist()
    answers = answers_of(data, pd.DataFrame({"image": [str(i) for i in range(len(images))]}))
    pairs = Counter((t, a) for t, a, _ in images if t != a)
    confused = most_confused(answers)
    assert [len(found) for _, _, found, _ in confused] == sorted(pairs.values(), reverse=True)
    for label, answer, found, total in confused:
        pair = [(LABELS.name(t), LABELS.name(a)) for t, a, _ in images]
        assert found == [str(i) for i, each in enumerate(pair) if each == (label, answer)]
        assert total == sum(each[0] == label for each in pair)
    wrong = sorted((i for i, (t, a, _) in enumerate(images) if t != a), key=lambda i: -images[i][2])
    part = wrong_answers_part(answers, lambda image: None)
    thumbs = [] if part is None else part.blocks[0].groups[0].strips[0].thumbs
    assert [thumb.alt.partition(",")[0] for thumb in thumbs] == [str(i) for i in wrong[:WRONG]]


def test_accuracy_has_the_expected_share_of_new_pairs() -> None:
    data = answered([(0, 0, 0.5), (1, 0, 0.5), (2, 2, 0.5), (5, 5, 0.5), (5, 2, 0.5)])
    assert data.accuracy == pytest.approx(100 * (0.9 * 1 / 2 + 0.1 * 2 / 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.sampled_from([0.25, 0.5, 1.0]), st.integers(0, 9))
def test_a_drawn_share_keeps_that_share_of_every_pair_and_at_least_one_image(labels, share, seed) -> None:
    compositions = np.array(labels)
    rows = draw_share(compositions, share, seed)
    assert rows.tolist() == sorted(set(rows.tolist()))
    drawn, all_images = Counter(compositions[rows].tolist()), Counter(labels)
    assert drawn == {pair: max(1, int(share * count + 0.5)) for pair, count in all_images.items()}
    assert draw_share(compositions, share, seed).tolist() == rows.tolist()


def test_draws_of_other_seeds_differ() -> None:
    compositions = np.zeros(40, dtype=int)
    assert len({tuple(draw_share(compositions, 0.5, seed)) for seed in range(DRAWS)}) == DRAWS


def test_extrapolation_continues_a_power_law_exactly() -> None:
    images = [100, 200, 400]
    slope, doubled = extrapolate(images, [100 - 60 * (n / 100) ** -0.3 for n in images], 1000)
    assert slope == pytest.approx(-0.3)
    assert doubled == pytest.approx(100 - 60 * 8**-0.3)
    assert extrapolate(images, [100.0, 100.0, 100.0], 50) == (pytest.approx(0), pytest.approx(99))
    assert extrapolate([1, 2, 4], [50.0, 5.0, 0.0], 9)[1] == 0


@pytest.fixture(scope="module")
def examples():
    rows = manifest()
    labels = labels_of(rows)
    return examples_of(rows, labels), labels


def test_closed_form_answers_equal_a_naive_argmax(examples) -> None:
    data, labels = examples
    rows = draw_share(data["train"].compositions.numpy(), 0.5, 0)
    made = closed_form_answers(data, labels, rows)
    train = data["train"]
    statistics = ClassStatistics.of(
        unit(train.cls[rows]), train.compositions[rows], len(labels.states), len(labels.objects)
    )
    model = ClosedForm.fit(statistics)
    candidates = sorted({pair for split in ("train", "val", "test") for pair in labels.pairs[split].tolist()})
    seen = np.array([pair in labels.pairs["train"] for pair in candidates])
    log_p = {
        split: model.scorer(torch.tensor(candidates))(unit(data[split].cls)).log_softmax(1) for split in ("val", "test")
    }
    label = [candidates.index(pair) for pair in data["val"].compositions.tolist()]
    confidence = fit_probabilities(log_p["val"], label, seen)
    prior = confidence.log_prior(seen, np.ones_like(seen))
    for image, scores in enumerate(log_p["test"]):
        posterior = (scores / confidence.temperature).numpy() + prior
        assert made[image] == candidates[int(posterior.argmax())]


def test_the_learning_curve_has_a_quarter_half_and_all_images(examples) -> None:
    data, labels = examples
    curve = SampleSizeCurve.of(data, labels)
    pairs = len(labels.pairs["train"])
    assert [*curve.accuracies] == [2 * pairs, 4 * pairs, 8 * pairs]
    assert [len(drawn) for drawn in curve.accuracies.values()] == [DRAWS, DRAWS, 1]
    target = data["test"].compositions.numpy()
    right = closed_form_answers(data, labels, np.arange(len(data["train"]))) == target
    seen = np.isin(target, labels.pairs["train"])
    expected = 100 * (0.9 * right[seen].mean() + 0.1 * right[~seen].mean())
    assert curve.accuracies[8 * pairs] == [pytest.approx(expected)]
    means = [fmean(drawn) for drawn in curve.accuracies.values()]
    expected = extrapolate([*curve.accuracies], means, len(data["test"]))
    assert (curve.slope, curve.doubled) == expected


def test_one_image_per_pair_has_no_learning_curve(examples) -> None:
    _, labels = examples
    rows = manifest()
    rows = rows[(rows["split"] != "train") | rows["image"].str.endswith("train0.png")].reset_index(drop=True)
    assert SampleSizeCurve.of(examples_of(rows, labels), labels) is None
