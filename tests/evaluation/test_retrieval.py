"""Retrieval equals plain loops over sorted pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from duplex.errors import UsageError
from duplex.evaluation import retrieval
from duplex.evaluation.retrieval import accuracy_by_label, confusions, nearest, precision

SMALL = st.integers(-2, 2).map(float)  # small whole numbers: cosines tie often


def plain_nearest(queries, gallery, k, allowed):
    rows, cosines = [], []
    for q in queries:
        scored = []
        for i, g in enumerate(gallery):
            if allowed[i]:
                lengths = np.sqrt(q @ q) * np.sqrt(g @ g)
                scored.append((-(q @ g) / lengths if lengths else 0.0, i))
        scored.sort(key=lambda pair: (round(pair[0], 9), pair[1]))
        rows.append([i for _, i in scored[:k]])
        cosines.append([-c for c, _ in scored[:k]])
    return np.array(rows, dtype=int).reshape(len(queries), -1), np.array(cosines).reshape(len(queries), -1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nearest_equals_sorting_by_cosine(data):
    n, d, q = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    gallery, queries = (data.draw(arrays(float, (rows, d), elements=SMALL)) for rows in (n, q))
    allowed, k = data.draw(arrays(bool, n)), data.draw(st.integers(1, 5))
    rows, cosines = nearest(queries, gallery, k, allowed)
    _, expected = plain_nearest(queries, gallery, k, allowed)
    assert rows.shape == expected.shape
    np.testing.assert_allclose(cosines, expected, atol=1e-9)
    assert allowed[rows].all()
    assert all(len(set(line)) == len(line) for line in rows.tolist())


def test_equal_cosines_keep_the_order_of_rows_at_any_block_size(monkeypatch):
    gallery = np.array([[0.0, 1.0], [2.0, 0.0], [1.0, 0.0], [3.0, 0.0]])
    queries = np.array([[1.0, 0.0], [0.0, 5.0]])
    rows, _ = nearest(queries, gallery, 2)
    assert rows.tolist() == [[1, 2], [0, 1]]
    monkeypatch.setattr(retrieval, "BLOCK", 1)
    assert nearest(queries, gallery, 2)[0].tolist() == rows.tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_confusions_count_wrong_pairs(answers):
    label, predicted = (np.array([a[i] for a in answers], dtype=np.int64) for i in (0, 1))
    pairs, counts = confusions(label, predicted)
    wrong = [answer for answer in answers if answer[0] != answer[1]]
    expected = {pair: wrong.count(pair) for pair in set(wrong)}
    assert dict(zip(map(tuple, pairs.tolist()), counts.tolist(), strict=True)) == expected
    assert (np.diff(counts) <= 0).all()


@pytest.mark.parametrize(
    ("queries", "gallery"), [((2, 3), (4, 2)), ((2,), (4, 2)), ((2, 3, 1), (4, 3)), ((2, 3), (3,)), ((1, 2), (3, 2, 1))]
)
def test_shapes_that_do_not_match_are_refused(queries, gallery):
    with pytest.raises(UsageError, match="must be matrices of the same width"):
        nearest(np.ones(queries), np.ones(gallery), 1)


def test_no_allowed_row_gives_empty_results():
    rows, cosines = nearest(np.ones((2, 3)), np.ones((4, 3)), 2, np.zeros(4, bool))
    assert rows.shape == cosines.shape == (2, 0)
    assert np.isnan(precision(rows, np.arange(4), np.arange(2)))
    assert nearest(np.ones((2, 3)), np.ones((4, 3)), 0)[0].shape == (2, 0)


def test_unit_rows_have_length_one_and_zeros_stay_zero():
    found = retrieval.unit(np.array([[3, 4], [0, 0], [1e-150, 0], [0.1, 0.0]]))
    assert found.tolist() == [[0.6, 0.8], [0, 0], [1, 0], [1, 0]]


def test_labels_of_equal_accuracy_are_sorted_by_images_then_label():
    label = np.array([5, 5, 3, 3, 9, 9, 9, 9, 1])
    right = np.array([1, 0, 0, 1, 1, 1, 0, 0, 0], dtype=bool)
    names, images, share = accuracy_by_label(label, right)
    assert (names.tolist(), images.tolist(), share.tolist()) == ([9, 3, 5, 1], [4, 2, 2, 1], [0.5, 0.5, 0.5, 0.0])
    better = accuracy_by_label(label, np.isin(label, [3, 5]))
    assert (better[0].tolist(), better[2].tolist()) == ([3, 5, 9, 1], [1.0, 1.0, 0.0, 0.0])


def test_precision_is_the_share_of_wanted_labels():
    label = np.array([4, 4, 1, 1, 1, 7])
    assert precision(np.array([[0, 2], [5, 5]]), label, np.array([4, 7])) == 0.75


def test_confusions_are_sorted_by_count_then_label():
    pairs, counts = confusions(np.array([2, 0, 2, 1, 0, 3]), np.array([1, 1, 1, 0, 1, 3]))
    assert pairs.tolist() == [[0, 1], [2, 1], [1, 0]] and counts.tolist() == [2, 2, 1]
    assert [one.tolist() for one in confusions(np.array([1]), np.array([1]))] == [[], []]
