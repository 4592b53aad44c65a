import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from duplex.evaluation import vectors
from duplex.evaluation.vectors import nearest, precision

SMALL = st.integers(-2, 2).map(float)  # small whole numbers: cosines tie often


def plain_cosines(queries, gallery, k):
    cosines = []
    for q in queries:
        lengths = [np.sqrt(q @ q) * np.sqrt(g @ g) for g in gallery]
        found = [q @ g / length if length else 0.0 for g, length in zip(gallery, lengths, strict=True)]
        cosines.append(sorted(found, reverse=True)[:k])
    return np.array(cosines)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nearest_equals_sorting_by_cosine(data):
    n, d, q = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    gallery, queries = (data.draw(arrays(float, (rows, d), elements=SMALL)) for rows in (n, q))
    k = data.draw(st.integers(1, 5))
    rows, cosines = nearest(queries, gallery, k)
    assert rows.shape == cosines.shape
    np.testing.assert_allclose(cosines, plain_cosines(queries, gallery, k), atol=1e-9)
    assert all(len(set(line)) == len(line) for line in rows.tolist())


def test_equal_cosines_keep_the_order_of_rows_at_any_block_size(monkeypatch):
    gallery = np.array([[0.0, 1.0], [2.0, 0.0], [1.0, 0.0], [3.0, 0.0]])
    queries = np.array([[1.0, 0.0], [0.0, 5.0]])
    rows, _ = nearest(queries, gallery, 2)
    assert rows.tolist() == [[1, 2], [0, 1]]
    monkeypatch.setattr(vectors, "BLOCK", 1)
    assert nearest(queries, gallery, 2)[0].tolist() == rows.tolist()


def test_an_empty_gallery_gives_empty_results():
    rows, cosines = nearest(np.ones((2, 3)), np.ones((0, 3)), 2)
    assert rows.shape == cosines.shape == (2, 0)
    assert np.isnan(precision(rows, np.arange(4), np.arange(2)))
    assert nearest(np.ones((2, 3)), np.ones((4, 3)), 0)[0].shape == (2, 0)


def test_unit_rows_have_length_one_and_zeros_stay_zero():
    found = vectors.unit(np.array([[3, 4], [0, 0], [1e-150, 0], [0.1, 0.0]]))
    assert found.tolist() == [[0.6, 0.8], [0, 0], [1, 0], [1, 0]]


def test_precision_is_the_share_of_wanted_labels():
    label = np.array([4, 4, 1, 1, 1, 7])
    assert precision(np.array([[0, 2], [5, 5]]), label, np.array([4, 7])) == 0.75
