"""What validation chooses: the bias where the harmonic mean is best, and the threshold where the AUC is."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from duplex.errors import DuplexError
from duplex.evaluation.accumulator import Evidence
from duplex.evaluation.metrics import measure
from duplex.features.examples import Examples
from duplex.labels import LabelSpace
from duplex.layers.word_feasibility import feasibility
from duplex.methods.duplex import Duplex
from duplex.methods.duplex import DuplexOptions as Options
from duplex.training.calibration import Calibration, calibrate, likely, passing, plausible
from tests.methods.field import words
from tests.methods.world import features, scores_of, small_labels, small_method, small_setting

LABELS = small_labels()
IMAGES = 40
VAL = Examples(
    np.arange(IMAGES),
    {"cls": features(IMAGES, 4)},
    torch.as_tensor(np.random.default_rng(1).choice(LABELS.pairs["val"], IMAGES)),
)


def method():
    return small_method(Options(width=5)).eval()


class Judging(Duplex):
    """Composition `c` is the likelier the larger its number."""

    def likelihood(self) -> torch.Tensor:
        return torch.arange(self.labels.size)


def judging(kind: type[Duplex] = Judging) -> Duplex:
    torch.manual_seed(0)
    judge = kind(small_setting(), Options(width=5)).double()
    judge.load_state_dict(method().state_dict())
    return judge.eval()


def harmonic(scores: np.ndarray, target: np.ndarray, seen: np.ndarray, bias: float) -> float:
    """HM where unseen columns are raised by a bias, image by image."""
    right = (scores + np.where(seen, 0.0, bias)).argmax(1) == target
    s, u = right[seen[target]].mean(), right[~seen[target]].mean()
    return 2 * s * u / (s + u) if s + u else 0.0


def test_the_bias_is_where_the_harmonic_mean_is_best() -> None:
    columns = LABELS.target("closed", "val")
    found = calibrate(method(), VAL, LABELS, "closed", words(), 50)
    assert found.to_dict() == {"bias": found.bias}  # no threshold in the closed world
    scores = scores_of(method(), columns, VAL.inputs["cls"]).double().numpy()
    target, seen = np.searchsorted(columns, VAL.compositions.numpy()), LABELS.seen[columns]
    reached = harmonic(scores, target, seen, found.bias)
    others = [harmonic(scores, target, seen, bias) for bias in np.linspace(-2, 2, 401)]
    assert reached == pytest.approx(max(others)) and reached > harmonic(scores, target, seen, 0.0)


def test_the_threshold_is_where_the_auc_is_best_and_the_bias_is_read_under_it() -> None:
    found = calibrate(method(), VAL, LABELS, "open", words(), 50)
    feasible = feasibility(words().states.numpy(), words().objects.numpy(), LABELS)
    scores = scores_of(method(), LABELS.target("open", "val"), VAL.inputs["cls"]).numpy()
    target, seen = VAL.compositions.numpy(), LABELS.seen

    def auc(threshold: float) -> float:
        masked = np.where(feasible >= threshold, scores, -np.inf)
        value = measure(Evidence(target, seen).add(masked).rivals(), 1, rounds=0).auc
        assert value is not None
        return 100 * value

    by_step = [auc(step) for step in np.linspace(feasible[~seen].min(), feasible[~seen].max(), 50)]
    assert found.threshold is not None and auc(found.threshold) == pytest.approx(max(by_step))
    assert found.val_auc_at_threshold == pytest.approx(max(by_step))
    assert found.val_auc_all_feasible == pytest.approx(by_step[0])
    live = passing(method(), words(), found)
    assert live is not None and (live == (feasible >= found.threshold)).all() and live[seen].all()
    masked = np.where(live, scores.astype(np.float64), -np.inf)
    others = [harmonic(masked, target, seen, bias) for bias in np.linspace(-2, 2, 401)]
    assert harmonic(masked, target, seen, found.bias) == pytest.approx(max(others))


def test_without_words_every_composition_counts() -> None:
    assert plausible(LABELS, None) is None
    assert calibrate(method(), VAL, LABELS, "open", None, 50).threshold is None
    assert passing(method(), None, Calibration(0.0, threshold=0.1)) is None
    assert passing(method(), words(), Calibration(0.0)) is None


def test_nothing_unseen_leaves_nothing_to_judge() -> None:
    every = LabelSpace.from_pairs({"train": [(s, o) for s in LABELS.states for o in LABELS.objects]})
    assert plausible(every, words()) is None
    assert likely(small_method(Options(width=5))) is None  # and a method need not judge
    judge = SimpleNamespace(labels=every, likelihood=lambda: torch.zeros(every.size))
    assert likely(judge) is None  # type: ignore[arg-type]


def test_a_calibration_by_blocks_is_that_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores swept, feasibility made state by state, runs of columns forgotten: the same choices."""
    swept = small_method(Options(width=5, inference=("ch", "so")))
    at_once = calibrate(swept, VAL, LABELS, "open", words(), 7)
    live = passing(swept, words(), at_once)
    monkeypatch.setattr("duplex.training.scoring.BLOCK_SCORES", 11)
    monkeypatch.setattr("duplex.training.scoring.SWEPT", 6)
    monkeypatch.setattr("duplex.layers.word_feasibility.BLOCK", 3)
    monkeypatch.setattr("duplex.evaluation.accumulator.PLANNED", 1)
    found = calibrate(swept, VAL, LABELS, "open", words(), 7)
    assert found.threshold == at_once.threshold
    assert found.bias == pytest.approx(at_once.bias, abs=1e-5)
    assert (found.val_auc_all_feasible, found.val_auc_at_threshold) == (
        at_once.val_auc_all_feasible,
        at_once.val_auc_at_threshold,
    )
    again = passing(swept, words(), found)
    assert live is not None and again is not None and (again == live).all()


def test_two_judges_choose_beside_each_other() -> None:
    """Whichever decides, each one's choice is the same; a judge that is not there leaves it to words."""
    by_words = calibrate(judging(), VAL, LABELS, "open", words(), 50)
    by_likelihood = calibrate(judging(), VAL, LABELS, "open", words(), 50, "likelihood")
    alone = calibrate(method(), VAL, LABELS, "open", words(), 50)
    other = by_words.beside
    assert other is not None and other.judge == "likelihood" and by_words.judge == "words"
    assert dataclasses.replace(by_words, beside=None) == alone and alone.beside is None
    assert dataclasses.replace(by_likelihood, beside=None) == other
    assert by_likelihood.beside == alone
    assert calibrate(method(), VAL, LABELS, "open", words(), 50, "likelihood") == alone
    assert calibrate(judging(), VAL, LABELS, "closed", words(), 50, "likelihood").beside is None


def test_without_words_a_likelihood_may_decide() -> None:
    assert calibrate(judging(), VAL, LABELS, "open", None, 50, "likelihood").judge == "likelihood"
    left = calibrate(judging(), VAL, LABELS, "open", None, 50)
    assert left.threshold is None and left.beside is not None and left.beside.threshold is not None


def test_what_passes_is_what_the_likelihood_says() -> None:
    chosen = Calibration(0.0, threshold=3.5, judge="likelihood")
    live = passing(judging(), None, chosen)
    assert live is not None and (live == (LABELS.seen | (np.arange(LABELS.size) > 3.5))).all()


@pytest.mark.parametrize("values", [torch.zeros(3), torch.full((LABELS.size,), torch.nan)])
def test_an_odd_likelihood_is_one_sentence(values: torch.Tensor) -> None:
    class Odd(Judging):
        def likelihood(self) -> torch.Tensor:
            return values

    with pytest.raises(DuplexError, match=f"the likelihood of Odd .* finite number for each of the {LABELS.size}"):
        likely(judging(Odd))


def test_a_calibration_comes_back_from_its_record() -> None:
    for found in (Calibration(1.0), calibrate(judging(), VAL, LABELS, "open", words(), 50, "likelihood")):
        assert Calibration.from_dict(json.loads(json.dumps(found.to_dict()))) == found
