"""Metrics as they are written, and their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from duplex.evaluation.accumulator import ScoreAccumulator
from duplex.evaluation.curve import Margins
from duplex.evaluation.metrics import Metrics, measure
from duplex.evaluation.uncertainty import bootstrap
from tests.evaluation.twins import problem


def test_only_accuracies_are_written_in_percent() -> None:
    found = Metrics(3, 4, 0, 0.5, None, 0.25, 0.125, (0.25, 0.75), None, (0.0, 1.0), None, 2.5, 0.5, None, 0.125)
    assert found.to_dict() == {
        **{"k": 3, "images_seen": 4, "images_unseen": 0, "bias": 2.5},
        **{"seen": 50.0, "unseen": None, "hm": 25.0, "auc": 12.5},
        **{"seen_interval": [25.0, 75.0], "unseen_interval": None, "hm_interval": [0.0, 100.0], "auc_interval": None},
        **{"state_accuracy": 50.0, "object_accuracy": None, "tied": 12.5},
    }


def test_state_accuracy_counts_column_0_but_not_a_missing_prediction() -> None:
    scores = np.array([[3.0, 1, 0], [3, 1, 0], [-np.inf] * 3])
    rivals = ScoreAccumulator([0, 1, 2], [True, True, False]).add(scores).competitors()
    assert rivals.predictions().tolist() == [0, 0, -1]
    found = measure(rivals, states=["a", "b", "c"], objects=["x", "x", "y"], rounds=0)
    assert (found.state_accuracy, found.object_accuracy) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


@pytest.mark.parametrize(("label", "tied"), [(5.0, 0.0), (3.0, 1.0), (2.0, 0.0), (-np.inf, 0.0)])
def test_only_a_tie_with_the_k_th_best_counts(label: float, tied: float) -> None:
    """The unseen columns score 5, 3 and less; seen ones, which do not count, score more."""
    scores = np.array([[label, 5.0, 3.0, -np.inf, 9.0, 9.0]])
    rivals = ScoreAccumulator([0], [False] * 4 + [True] * 2, k=3).add(scores).competitors()
    assert measure(rivals, 2, rounds=0).tied == tied


def test_intervals_are_percentiles_of_the_bootstrap() -> None:
    p = problem(np.random.default_rng(1), 80, 9)
    p.scores[np.arange(80), p.target] += 1
    rivals = ScoreAccumulator(p.target, p.seen).add(p.scores).competitors()
    found, draws = measure(rivals, rounds=200, seed=3), bootstrap([Margins.of(rivals)], 200, 3)[0]
    for column, interval in enumerate((found.seen_interval, found.unseen_interval, found.hm_interval)):
        assert interval == pytest.approx(tuple(np.percentile(draws[:, column], [2.5, 97.5])))
    assert found.images_seen + found.images_unseen == 80
