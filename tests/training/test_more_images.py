"""The estimate of what more images bring, against loops and naive fits."""

from collections import Counter
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.data.tables import labels_of
from duplex.evaluation.probabilities import fit_probabilities
from duplex.methods.gaussian import ClassStatistics, ClosedForm
from duplex.methods.layers import unit
from duplex.training import more_images
from duplex.training.more_images import DRAWS, SampleSizeCurve, closed_form_answers, draw_share, extrapolate
from tests.report.own_data import examples_of, manifest


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
    made = closed_form_answers(data, labels, rows, 0.3)
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
    confidence = fit_probabilities(log_p["val"], label, seen, 0.3)
    prior = confidence.log_prior(seen, np.ones_like(seen))
    for image, scores in enumerate(log_p["test"]):
        posterior = (scores / confidence.temperature).numpy() + prior
        assert made[image] == candidates[int(posterior.argmax())]


def test_the_learning_curve_has_a_quarter_half_and_all_images(examples) -> None:
    data, labels = examples
    curve = SampleSizeCurve.of(data, labels, 0.3)
    pairs = len(labels.pairs["train"])
    assert [*curve.accuracies] == [2 * pairs, 4 * pairs, 8 * pairs]
    assert [len(drawn) for drawn in curve.accuracies.values()] == [DRAWS, DRAWS, 1]
    target = data["test"].compositions.numpy()
    right = closed_form_answers(data, labels, np.arange(len(data["train"])), 0.3) == target
    seen = np.isin(target, labels.pairs["train"])
    expected = 100 * (0.7 * right[seen].mean() + 0.3 * right[~seen].mean())
    assert curve.accuracies[8 * pairs] == [pytest.approx(expected)]
    means = [fmean(drawn) for drawn in curve.accuracies.values()]
    expected = extrapolate([*curve.accuracies], means, len(data["test"]))
    assert (curve.slope, curve.doubled) == expected


def test_answers_that_are_all_right_have_no_learning_curve(examples, monkeypatch) -> None:
    data, labels = examples
    target = data["test"].compositions.numpy()
    monkeypatch.setattr(more_images, "closed_form_answers", lambda *_: target)
    assert SampleSizeCurve.of(data, labels, 0.3) is None


def test_one_image_per_pair_has_no_learning_curve(examples) -> None:
    _, labels = examples
    rows = manifest()
    rows = rows[(rows["split"] != "train") | rows["image"].str.endswith("train0.png")].reset_index(drop=True)
    assert SampleSizeCurve.of(examples_of(rows, labels), labels, 0.3) is None
