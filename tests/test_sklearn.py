"""`CompositionClassifier`: scikit-learn's own checks, its tools, and the numbers of the pipeline's closed form."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer
from sklearn.utils.estimator_checks import check_estimator

import duplex
from duplex.sklearn import CompositionClassifier
from tests.projects import draw_table

EXPECTED_FAILURES = {"check_classifier_multioutput": "it has three columns of labels; a composition has two"}


@dataclass(frozen=True)
class Shapes:
    """The drawn benchmark, a few images per pair, with cached features."""

    data: duplex.Dataset
    features: np.ndarray  # of unit length

    def split(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        rows = (self.data.manifest["split"] == name).to_numpy()
        return self.features[rows], self.data.manifest.loc[rows, ["state", "object"]].to_numpy()


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Shapes:
    data = duplex.load_dataset(**draw_table(tmp_path_factory.mktemp("shapes"), 0.06), encoder="tiny")
    features = np.empty((len(data.manifest), 128), np.float32)
    for part in data.inputs().examples.values():
        features[part.rows] = part.cls
    return Shapes(data, Normalizer().transform(features))


def drawn(rows: int = 80, width: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return features whose means are sums of a state's and an object's vector, and labels without the pair (2, 2)."""
    random = np.random.default_rng(seed)
    y = random.integers(0, 3, (rows, 2))
    y[(y == 2).all(axis=1)] = 0
    a, b = random.normal(size=(2, 3, width))
    return a[y[:, 0]] + b[y[:, 1]] + 0.3 * random.normal(size=(rows, width)), y


def test_scikit_learns_own_checks_pass():
    results = check_estimator(CompositionClassifier(), expected_failed_checks=EXPECTED_FAILURES, on_skip=None)
    assert len(results) > 50
    assert {result["check_name"] for result in results if result["status"] == "xfail"} == set(EXPECTED_FAILURES)


def test_it_is_the_closed_form_of_the_pipeline(shapes):
    run = duplex.fit(shapes.data, "closed_form", inference=["gaussian"], interactions=0.0, weights=[1.0])
    labels, candidates = shapes.data.labels, shapes.data.labels.candidates("closed", "test")
    states, objects = labels.state_of(candidates), labels.object_of(candidates)
    pairs = np.column_stack([np.array(labels.states)[states], np.array(labels.objects)[objects]])
    model = CompositionClassifier(pairs).fit(*shapes.split("train"))
    X, _ = shapes.split("test")
    expected = run.method.scorer(candidates)({"cls": torch.from_numpy(X).float()}).numpy()
    assert (model.candidates_ == pairs).all()
    assert np.abs(model.composition_scores(X) - expected).max() < 2e-3


def test_the_tools_of_model_selection_take_it(shapes):
    X, y = shapes.split("train")
    folds = KFold(3, shuffle=True, random_state=0)  # rows are sorted by pair: without shuffling, folds share none
    model = make_pipeline(Normalizer(), CompositionClassifier())
    scores = cross_val_score(model, X, y, cv=folds)
    assert (scores > 0.1).all(), "chance is one in 192"
    grid = {"compositionclassifier__ridge": [0.1, 1e6], "compositionclassifier__bias": [0.0, -2.0]}
    search = GridSearchCV(model, grid, cv=folds).fit(X, y)
    assert search.best_params_["compositionclassifier__ridge"] == 0.1, "with a larger one all means are equal"
    assert search.best_score_ >= scores.mean() - 1e-12
    assert search.predict(X[:5]).shape == (5, 2)
    assert (cross_val_predict(model, X, y, cv=folds) == y).all(axis=1).mean() == pytest.approx(scores.mean(), abs=0.05)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 79), max_size=6, unique=True), st.integers(0, 99))
def test_any_pieces_in_any_order_equal_one_fit(cuts, seed):
    X, y = drawn()
    order = np.random.default_rng(seed).permutation(len(X))
    pieces = CompositionClassifier()
    for rows in np.split(order, sorted(cuts)):
        pieces.partial_fit(X[rows] + 50, y[rows])
    whole = CompositionClassifier().fit(X + 50, y)
    assert np.abs(whole.composition_scores(X + 50) - pieces.composition_scores(X + 50)).max() < 1e-8


def test_fit_forgets_and_classes_add_labels():
    X, y = drawn()
    model = CompositionClassifier().fit(X, y)
    assert np.array_equal(model.fit(X[:40], y[:40]).predict(X), CompositionClassifier().fit(X[:40], y[:40]).predict(X))
    wider = CompositionClassifier([(0, 0), (7, 8)]).partial_fit(X, y, classes=[range(8), range(9)])
    assert wider.candidates_.tolist() == [[0, 0], [7, 8]]
    assert [len(names) for names in wider.classes_] == [8, 9]


def test_probabilities_are_sums_over_the_candidates():
    X, y = drawn()
    model = CompositionClassifier([(0, 0), (0, 1), (2, 2)]).fit(X, y)
    states, objects = model.predict_proba(X)
    joint = np.exp(model.composition_scores(X))
    assert np.allclose(states, np.column_stack([joint[:, 0] + joint[:, 1], np.zeros(len(X)), joint[:, 2]]))
    assert np.allclose(objects, joint)
    assert set(map(tuple, model.predict(X).tolist())) <= {(0, 0), (0, 1), (2, 2)}


def test_the_bias_counts_for_unseen_pairs_alone():
    X, y = drawn()
    low, high = (CompositionClassifier(bias=bias).fit(X, y).composition_scores(X) for bias in (0.0, 2.0))
    unseen = (CompositionClassifier().fit(X, y).candidates_ == 2).all(axis=1)
    gain = high - low
    assert unseen.sum() == 1
    assert np.allclose(gain[:, unseen] - gain[:, ~unseen], 2.0)


def test_many_images_are_scored_in_blocks(monkeypatch):
    X, y = drawn()
    model = CompositionClassifier().fit(X, y)
    whole = model.composition_scores(X)
    monkeypatch.setattr("duplex.sklearn.BLOCK", 20)
    assert np.allclose(whole, model.composition_scores(X), atol=1e-12)


def test_a_refused_piece_changes_nothing():
    X, y = drawn()
    model = CompositionClassifier().fit(X, y)
    before = model.composition_scores(X)
    for wrong in (np.column_stack([y, y]), y[:, 0], y.astype(object) + 0.5):
        with pytest.raises(ValueError):
            model.partial_fit(X, wrong)
    assert np.array_equal(model.composition_scores(X), before)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"candidates": [(0, 5)]}, "candidates: the object 5 is in no training image"),
        ({"candidates": [0, 1]}, r"candidates: the shape is \(2,\); expected an array of shape \[C, 2\]"),
        ({"ridge": 0.0}, "ridge: .*greater than 0"),
    ],
)
def test_wrong_parameters_are_one_line(parameters, message):
    with pytest.raises(duplex.DuplexError, match=message) as caught:
        CompositionClassifier(**parameters).fit(*drawn())
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_features_without_differences_leave_the_numbers_of_images_to_decide():
    X, y = drawn()
    pairs, counts = np.unique(y, axis=0, return_counts=True)
    for constant in (0 * X, np.ones_like(X)):
        assert (CompositionClassifier().fit(constant, y).predict(constant) == pairs[counts.argmax()]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": drawn()[1][:5]}, r"y: the shape is \(5, 2\); expected \(80, 2\)"),
        ({"y": drawn()[1][:, 0]}, r"y: the shape is \(80,\); expected \(80, 2\)"),
        ({"y": np.array([["red", "star"]] * 80)}, "y: labels are numbers in one argument or call and text"),
        ({"sample_weight": [1, 2]}, r"sample_weight"),
    ],
)
def test_accuracy_is_refused_where_it_means_nothing(change, message):
    """Shapes that broadcast, and words compared with numbers, would give an accuracy of 0 in silence."""
    X, y = drawn()
    model = CompositionClassifier().fit(X, y)
    with pytest.raises(ValueError, match=message):
        model.score(**{"X": X, "y": y, **change})


@pytest.mark.parametrize("name", ["candidates", "ridge", "bias"])
def test_parameters_act_when_images_are_added(name):
    X, y = drawn()
    values: dict[str, Any] = {"candidates": "seen", "ridge": 100.0, "bias": 5.0}
    value = values[name]
    other = CompositionClassifier(**{name: value}).fit(X, y).composition_scores(X)
    for model in (CompositionClassifier().fit(X, y), CompositionClassifier().partial_fit(X, y)):
        model.set_params(**{name: value})
        assert np.allclose(model.composition_scores(X), CompositionClassifier().fit(X, y).composition_scores(X))
    pieces = CompositionClassifier().partial_fit(X[:40], y[:40]).set_params(**{name: value})
    again = pieces.partial_fit(X[40:], y[40:]).composition_scores(X)
    assert again.shape == other.shape and np.allclose(again, other)


def test_classes_in_another_order_than_the_columns_are_refused():
    X, y = drawn()
    y = np.column_stack([np.array(["red", "blue", "green"])[y[:, 0]], np.array(["star", "heart", "ring"])[y[:, 1]]])
    classes = [["red", "blue", "green", "grey"], ["star", "heart", "ring"]]
    with pytest.raises(ValueError, match="classes: the label 'blue' of y is missing; expected all labels of y"):
        CompositionClassifier().partial_fit(X, y, classes=classes[::-1])
    assert len(CompositionClassifier().partial_fit(X, y, classes=classes).classes_[0]) == 4
