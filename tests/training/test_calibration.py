"""Calibration: the bias maximises the harmonic mean, the threshold the AUC, on validation images."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.feasibility import CrossFitGain
from duplex.evaluation.metrics import measure
from duplex.features.tokens import Examples
from duplex.labels import LabelSpace
from duplex.methods.duplex import DuplexOptions as Options
from duplex.methods.word_feasibility import feasibility
from duplex.training import scoring
from duplex.training.scoring import Calibration, count_unseen_pairs, feasibility_by_words, feasible_compositions
from tests.methods.field import words
from tests.methods.world import features, scores_of, small_labels, small_method

LABELS = small_labels()
IMAGES = 40
VAL = Examples(
    np.arange(IMAGES),
    {"cls": features(IMAGES, 4)},
    torch.as_tensor(np.random.default_rng(1).choice(LABELS.pairs["val"], IMAGES)),
)


def method():
    return small_method(Options(width=5)).eval()


def calibrate(*arguments: Any) -> Calibration:
    return scoring.calibrate(*arguments)[0]


def harmonic(scores: np.ndarray, target: np.ndarray, seen: np.ndarray, bias: float) -> float:
    """The harmonic mean at a bias, image by image."""
    right = (scores + np.where(seen, 0.0, bias)).argmax(1) == target
    s, u = right[seen[target]].mean(), right[~seen[target]].mean()
    return 2 * s * u / (s + u) if s + u else 0.0


def test_the_bias_maximises_the_harmonic_mean() -> None:
    columns = LABELS.candidates("closed", "val")
    found = calibrate(method(), VAL, LABELS, "closed", words(), 50)
    assert found.to_dict() == {"bias": found.bias}  # no threshold in the closed world
    scores = scores_of(method(), columns, VAL.inputs["cls"]).double().numpy()
    target, seen = np.searchsorted(columns, VAL.compositions.numpy()), LABELS.seen[columns]
    reached = harmonic(scores, target, seen, found.bias)
    others = [harmonic(scores, target, seen, bias) for bias in np.linspace(-2, 2, 401)]
    assert reached == pytest.approx(max(others)) and reached > harmonic(scores, target, seen, 0.0)


def test_the_threshold_maximises_the_auc_and_the_bias_is_chosen_at_it() -> None:
    found = calibrate(method(), VAL, LABELS, "open", words(), 50, "words")
    feasible = feasibility(words().states.numpy(), words().objects.numpy(), LABELS)
    scores = scores_of(method(), LABELS.candidates("open", "val"), VAL.inputs["cls"]).numpy()
    target, seen = VAL.compositions.numpy(), LABELS.seen

    def auc(threshold: float) -> float:
        masked = np.where(feasible >= threshold, scores, -np.inf)
        value = measure(ScoreAccumulator(target, seen).add(masked).competitors(), 1, rounds=0).auc
        assert value is not None
        return 100 * value

    by_step = [auc(step) for step in np.linspace(feasible[~seen].min(), feasible[~seen].max(), 50)]
    assert found.threshold is not None and auc(found.threshold) == pytest.approx(max(by_step))
    assert found.val_auc_at_threshold == pytest.approx(max(by_step))
    assert found.val_auc_all_feasible == pytest.approx(by_step[0])
    mask = feasible_compositions(method(), words(), found)
    assert mask is not None and (mask == (feasible >= found.threshold)).all() and mask[seen].all()
    masked = np.where(mask, scores.astype(np.float64), -np.inf)
    others = [harmonic(masked, target, seen, bias) for bias in np.linspace(-2, 2, 401)]
    assert harmonic(masked, target, seen, found.bias) == pytest.approx(max(others))


def test_without_words_every_composition_is_feasible() -> None:
    assert feasibility_by_words(LABELS, None) is None
    assert calibrate(method(), VAL, LABELS, "open", None, 50).threshold is None
    assert feasible_compositions(method(), None, Calibration(0.0, threshold=0.1)) is None
    assert feasible_compositions(method(), words(), Calibration(0.0)) is None


def test_without_unseen_compositions_there_is_no_feasibility() -> None:
    every = LabelSpace.from_pairs({"train": [(s, o) for s in LABELS.states for o in LABELS.objects]})
    assert feasibility_by_words(every, words()) is None


def test_calibration_in_blocks_equals_calibration_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    swept = small_method(Options(width=5, inference=("visual", "factors")))
    at_once = calibrate(swept, VAL, LABELS, "open", words(), 7, "words")
    mask = feasible_compositions(swept, words(), at_once)
    monkeypatch.setattr("duplex.training.scoring.BLOCK_SCORES", 11)
    found = calibrate(swept, VAL, LABELS, "open", words(), 7, "words")
    assert found.threshold == at_once.threshold
    assert found.bias == pytest.approx(at_once.bias, abs=1e-5)
    for name in ("val_auc_all_feasible", "val_auc_at_threshold"):
        assert getattr(found, name) == getattr(at_once, name)
    again = feasible_compositions(swept, words(), found)
    assert mask is not None and again is not None and (again == mask).all()


def test_auto_keeps_a_threshold_that_does_not_pay_beside_a_calibration_of_all_compositions() -> None:
    by_words = calibrate(method(), VAL, LABELS, "open", words(), 50, "words")
    assert not by_words.alternatives and by_words.val_auc_gain is not None and by_words.val_auc_gain_se is not None
    assert by_words.val_auc_gain <= by_words.val_auc_gain_se  # of these random scores
    chosen = calibrate(method(), VAL, LABELS, "open", words(), 50)
    nothing = calibrate(method(), VAL, LABELS, "open", words(), 50, "none")
    assert chosen == dataclasses.replace(nothing, alternatives=(by_words,))
    assert nothing == Calibration(nothing.bias) == calibrate(method(), VAL, LABELS, "open", None, 50, "none")


@pytest.mark.parametrize(
    ("gain", "is_used"), [((0.05, 0.02), True), ((0.03, 0.02), False), ((0.02, 0.01), False), ((0.5, None), False)]
)
def test_auto_uses_a_threshold_with_a_gain_beyond_twice_its_standard_error(monkeypatch, gain, is_used) -> None:
    by_words = calibrate(method(), VAL, LABELS, "open", words(), 50, "words")
    monkeypatch.setattr("duplex.evaluation.feasibility.crossfit_gain", lambda *_: CrossFitGain(*gain, pairs=9))
    found = calibrate(method(), VAL, LABELS, "open", words(), 50)
    assert found.threshold == (by_words.threshold if is_used else None)
    assert [other.threshold for other in found.alternatives] == ([] if is_used else [by_words.threshold])


def test_auto_lets_all_compositions_compete_without_two_unseen_validation_pairs() -> None:
    seen = LABELS.pairs["val"][LABELS.seen[LABELS.pairs["val"]]]
    unseen = LABELS.pairs["val"][~LABELS.seen[LABELS.pairs["val"]]]
    for pairs, count in (([*seen, unseen[0]], 1), (seen, 0)):
        images = Examples(np.arange(8), {"cls": features(8, 4)}, torch.as_tensor(np.resize(pairs, 8)))
        assert count_unseen_pairs(images, LABELS) == count
        found = calibrate(method(), images, LABELS, "open", words(), 50)
        assert found == Calibration(found.bias)
