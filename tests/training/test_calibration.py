"""Calibration: the bias maximises the harmonic mean, the threshold the AUC, on validation images."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.feasibility import CrossFitGain
from duplex.evaluation.metrics import measure
from duplex.features.tokens import Examples
from duplex.labels import LabelSpace
from duplex.methods.duplex import Duplex
from duplex.methods.duplex import DuplexOptions as Options
from duplex.methods.word_feasibility import feasibility
from duplex.training import scoring
from duplex.training.scoring import (
    Calibration,
    count_unseen_pairs,
    feasibility_by_likelihood,
    feasibility_by_words,
    feasible_compositions,
)
from tests.methods.field import words
from tests.methods.world import features, scores_of, small_context, small_labels, small_method

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


class WithLikelihood(Duplex):
    """A method whose likelihood grows with the number of the composition."""

    def composition_plausibility(self) -> torch.Tensor:
        return torch.arange(self.labels.size)


def with_likelihood(kind: type[Duplex] = WithLikelihood) -> Duplex:
    torch.manual_seed(0)
    built = kind(small_context(), Options(width=5)).double()
    built.load_state_dict(method().state_dict())
    return built.eval()


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
    assert feasibility_by_likelihood(small_method(Options(width=5))) is None  # without a likelihood
    likely = SimpleNamespace(labels=every, composition_plausibility=lambda: torch.zeros(every.size))
    assert feasibility_by_likelihood(likely) is None  # type: ignore[arg-type]


def test_calibration_in_blocks_equals_calibration_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    swept = small_method(Options(width=5, inference=("visual", "factors")))
    at_once = calibrate(swept, VAL, LABELS, "open", words(), 7, "words")
    mask = feasible_compositions(swept, words(), at_once)
    monkeypatch.setattr("duplex.training.scoring.BLOCK_SCORES", 11)
    monkeypatch.setattr("duplex.training.scoring.BLOCK_COLUMNS", 6)
    monkeypatch.setattr("duplex.methods.word_feasibility.BLOCK", 3)
    monkeypatch.setattr("duplex.evaluation.accumulate.CACHED_COLUMNS", 1)
    found = calibrate(swept, VAL, LABELS, "open", words(), 7, "words")
    assert found.threshold == at_once.threshold
    assert found.bias == pytest.approx(at_once.bias, abs=1e-5)
    for name in ("val_auc_all_feasible", "val_auc_at_threshold"):
        assert getattr(found, name) == getattr(at_once, name)
    again = feasible_compositions(swept, words(), found)
    assert mask is not None and again is not None and (again == mask).all()


def test_the_choices_of_both_sources_of_feasibility_are_kept() -> None:
    by_words = calibrate(with_likelihood(), VAL, LABELS, "open", words(), 50, "words")
    by_likelihood = calibrate(with_likelihood(), VAL, LABELS, "open", words(), 50, "likelihood")
    alone = calibrate(method(), VAL, LABELS, "open", words(), 50, "words")
    (other,) = by_words.alternatives
    assert other.feasibility_source == "likelihood" and by_words.feasibility_source == "words"
    assert dataclasses.replace(by_words, alternatives=()) == alone and not alone.alternatives
    assert dataclasses.replace(by_likelihood, alternatives=()) == other
    assert by_likelihood.alternatives == (alone,)
    assert calibrate(method(), VAL, LABELS, "open", words(), 50, "likelihood") == alone
    assert calibrate(with_likelihood(), VAL, LABELS, "closed", words(), 50, "likelihood").alternatives == ()
    assert calibrate(with_likelihood(), VAL, LABELS, "open", None, 50, "likelihood") == other  # without words
    without = calibrate(with_likelihood(), VAL, LABELS, "open", None, 50, "words")
    assert without.threshold is None and without.alternatives == (other,)


def test_auto_keeps_the_choices_that_do_not_pay_beside_a_calibration_of_all_compositions() -> None:
    by_words = calibrate(with_likelihood(), VAL, LABELS, "open", words(), 50, "words")
    alone, by_likelihood = dataclasses.replace(by_words, alternatives=()), by_words.alternatives[0]
    for each in (alone, by_likelihood):
        assert each.val_auc_gain is not None and each.val_auc_gain_se is not None
        assert each.val_auc_gain <= each.val_auc_gain_se  # of these random scores: no threshold pays
    chosen = calibrate(with_likelihood(), VAL, LABELS, "open", words(), 50)
    nothing = calibrate(with_likelihood(), VAL, LABELS, "open", words(), 50, "none")
    assert chosen == dataclasses.replace(nothing, alternatives=(alone, by_likelihood))
    assert nothing == Calibration(nothing.bias)
    everywhere = calibrate(with_likelihood(), VAL, LABELS, "open", None, 50, "none")
    assert everywhere == nothing


@pytest.mark.parametrize(
    ("gains", "used"),
    [
        ([(0.03, 0.01), (0.05, 0.02)], "likelihood"),
        ([(0.03, 0.01), (0.05, 0.03)], "words"),
        ([(0.02, 0.01), (-0.1, 0.0)], None),
        ([(0.5, None), (0.1, 0.01)], "likelihood"),
    ],
)
def test_auto_uses_the_source_with_the_largest_gain_beyond_twice_its_standard_error(monkeypatch, gains, used) -> None:
    alone = calibrate(with_likelihood(), VAL, LABELS, "open", words(), 50, "words")
    thresholds = {"words": alone.threshold, "likelihood": alone.alternatives[0].threshold}
    pretended = iter(CrossFitGain(*gain, pairs=9) for gain in gains)
    monkeypatch.setattr("duplex.evaluation.feasibility.crossfit_gain", lambda *_: next(pretended))
    found = calibrate(with_likelihood(), VAL, LABELS, "open", words(), 50)
    assert found.threshold == (None if used is None else thresholds[used])
    assert found.threshold is None or found.feasibility_source == used
    assert [other.feasibility_source for other in found.alternatives] == [name for name in thresholds if name != used]


def test_auto_lets_all_compositions_compete_without_two_unseen_validation_pairs() -> None:
    seen = LABELS.pairs["val"][LABELS.seen[LABELS.pairs["val"]]]
    unseen = LABELS.pairs["val"][~LABELS.seen[LABELS.pairs["val"]]]
    for pairs, count in (([*seen, unseen[0]], 1), (seen, 0)):
        images = Examples(np.arange(8), {"cls": features(8, 4)}, torch.as_tensor(np.resize(pairs, 8)))
        assert count_unseen_pairs(images, LABELS) == count
        found = calibrate(method(), images, LABELS, "open", words(), 50)
        assert found == Calibration(found.bias)


def test_compositions_above_the_likelihood_threshold_are_feasible() -> None:
    chosen = Calibration(0.0, threshold=3.5, feasibility_source="likelihood")
    mask = feasible_compositions(with_likelihood(), None, chosen)
    assert mask is not None and (mask == (LABELS.seen | (np.arange(LABELS.size) > 3.5))).all()
