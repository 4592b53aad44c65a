"""Numbers of the page of one data set against loops and naive fits."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.evaluation.answered import AnsweredImages
from duplex.evaluation.metrics import MISSING
from duplex.labels import LabelSpace
from duplex.report.answers import WRONG, answers_of, most_confused, primitive_table, wrong_answers_part

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
