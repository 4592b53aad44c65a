from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import UsageError
from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.curve import Margins
from duplex.evaluation.intervals import bootstrap_metrics
from duplex.evaluation.metrics import (
    MISSING,
    Metrics,
    group_table,
    interval_text,
    measure,
    metrics_line,
    vocabulary_accuracies,
)
from duplex.labels import GROUPS, FrequencyGroups, frequency_groups
from tests.evaluation.twins import problem


def test_only_accuracies_are_written_in_percent() -> None:
    found = Metrics(3, 4, 0, 0.5, None, 0.25, 0.125, (0.25, 0.75), None, (0.0, 1.0), None, 2.5, 0.5, None, 0.125)
    assert found.to_dict() == {
        **{"k": 3, "images_seen": 4, "images_unseen": 0, "bias": 2.5},
        **{"seen": 50.0, "unseen": None, "hm": 25.0, "auc": 12.5},
        **{"seen_interval": [25.0, 75.0], "unseen_interval": None, "hm_interval": [0.0, 100.0], "auc_interval": None},
        **{"state_accuracy": 50.0, "object_accuracy": None, "tied": 12.5},
        **{"unbiased_accuracy": None, "false_seen": None},
    }


def test_state_accuracy_counts_column_0_but_not_a_missing_prediction() -> None:
    scores = np.array([[3.0, 1, 0], [3, 1, 0], [-np.inf] * 3])
    rivals = ScoreAccumulator([0, 1, 2], [True, True, False]).add(scores).competitors()
    assert rivals.best_columns().tolist() == [0, 0, -1]
    found = measure(rivals, states=["a", "b", "c"], objects=["x", "x", "y"], rounds=0)
    assert (found.state_accuracy, found.object_accuracy) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), bias=st.sampled_from([-1.0, 0.0, 1.0]))
def test_the_first_of_the_best_columns_is_predicted_be_it_seen_unseen_or_the_label(seed: int, bias: float) -> None:
    p = problem(np.random.default_rng(seed), levels=3, feasible=0.8)
    rivals = ScoreAccumulator(p.target, p.seen, feasible_mask=p.feasible).add(p.scores).competitors()
    shifted = np.where(p.feasible, p.scores + np.where(p.seen, 0.0, bias), -np.inf)
    first = shifted.argmax(axis=1) if p.feasible.any() else np.full(len(p.scores), -1)
    assert rivals.best_columns(bias).tolist() == first.tolist()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_answers_without_a_bias_by_loops(seed: int) -> None:
    p = problem(np.random.default_rng(seed), levels=3, feasible=0.8)
    right, new, false = 0, 0, 0
    for row, label in zip(np.where(p.feasible, p.scores, -np.inf), p.target, strict=True):
        best = np.flatnonzero(row == row.max()) if p.feasible.any() else np.array([], dtype=int)
        right += best.tolist() == [label]
        new += not p.seen[label]
        false += not p.seen[label] and bool(p.seen[best].any())
    found = measure(ScoreAccumulator(p.target, p.seen, feasible_mask=p.feasible).add(p.scores).competitors(), rounds=0)
    assert found.unbiased_accuracy == pytest.approx(right / len(p.target))
    assert found.false_seen == (pytest.approx(false / new) if new else None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 2}, "k is 2, but the ScoreAccumulator was made with k=1"),
        ({"states": ["a", "b", "c", "d"]}, "one name per column"),
    ],
)
def test_names_and_k_must_fit_the_scores(arguments: Any, message: str) -> None:
    rivals = ScoreAccumulator([0, 1, 2], [True, True, False]).add(np.eye(3)).competitors()
    with pytest.raises(UsageError, match=message):
        measure(rivals, **arguments)
    assert measure(rivals, states=pd.Series(["a", "b", "c"], index=[7, 8, 9])).state_accuracy == 1


@pytest.mark.parametrize(("label", "tied"), [(5.0, 0.0), (3.0, 1.0), (2.0, 0.0), (-np.inf, 0.0)])
def test_only_a_tie_with_the_k_th_best_counts(label: float, tied: float) -> None:
    """The unseen columns score 5, 3 and less; seen ones, which do not count, score more."""
    scores = np.array([[label, 5.0, 3.0, -np.inf, 9.0, 9.0]])
    rivals = ScoreAccumulator([0], [False] * 4 + [True] * 2, k=3).add(scores).competitors()
    assert measure(rivals, 2, rounds=0).tied == tied


@pytest.mark.parametrize("seed", range(6))
def test_accuracies_by_new_words_equal_a_loop(seed: int) -> None:
    random = np.random.default_rng(seed)
    p = problem(random, 60, 12)
    states, objects = np.arange(12) // 3, np.arange(12) % 3
    trained = random.random(4) < 0.6, random.random(3) < 0.6
    seen = p.seen & trained[0][states] & trained[1][objects]
    rivals = ScoreAccumulator(p.target, seen).add(p.scores).competitors()
    bias = float(random.normal())
    right: dict[str, list[bool]] = {}
    named: dict[tuple[str, str], list[bool]] = {}
    for scores, label in zip(p.scores, p.target.tolist(), strict=True):
        shifted = scores + np.where(seen, 0, bias)
        best = int(shifted.argmax())
        m, n = bool(trained[0][states[label]]), bool(trained[1][objects[label]])
        group = {(1, 1): "(AO)*", (0, 1): "A*O", (1, 0): "AO*", (0, 0): "A*O*"}[m, n]
        wins = shifted[label] > np.delete(shifted, label).max()
        right.setdefault("AO" if seen[label] else group, []).append(wins)
        named.setdefault(("states", "trained" if m else "new"), []).append(states[best] == states[label])
        named.setdefault(("objects", "trained" if n else "new"), []).append(objects[best] == objects[label])
    found = vocabulary_accuracies(rivals, bias, states, objects, trained)
    for group, hits in right.items():
        assert found.pop(group) == {"images": len(hits), "accuracy": pytest.approx(100 * np.mean(hits))}
    for (kind, part), hits in named.items():
        assert found[kind].pop(part) == pytest.approx(100 * np.mean(hits))
    assert found == {"states": {}, "objects": {}}


def test_intervals_are_percentiles_of_the_bootstrap() -> None:
    p = problem(np.random.default_rng(1), 80, 9)
    p.scores[np.arange(80), p.target] += 1
    rivals = ScoreAccumulator(p.target, p.seen).add(p.scores).competitors()
    found, draws = measure(rivals, rounds=200, seed=3), bootstrap_metrics([Margins.of(rivals)], 200, 3)[0]
    for column, interval in enumerate((found.seen_interval, found.unseen_interval, found.hm_interval)):
        assert interval == pytest.approx(tuple(np.percentile(draws[:, column], [2.5, 97.5])))
    assert found.images_seen + found.images_unseen == 80
    without = measure(rivals, rounds=0)
    assert without.seen_interval is None is without.hm_interval and without.auc_interval == found.auc_interval


TRAIN = np.repeat(np.arange(10), [9, 8, 7, 6, 5, 1, 1, 1, 1, 1])  # ten seen compositions of twelve


def test_counts_shares_and_accuracy() -> None:
    test = np.array([0, 0, 1, 2, 10, 11, 11, 11])
    without = np.array([1, 0, 0, 1, 0, 0, 0, 1], bool)
    with_graph = np.array([1, 1, 0, 1, 1, 0, 0, 1], bool)
    table = group_table(frequency_groups(TRAIN, 12), TRAIN, test, {"without": without, "with": with_graph})
    assert table["group"].tolist() == list(GROUPS)
    assert table["compositions"].tolist() == [2, 3, 5, 2]
    assert table["train_images"].tolist() == [17, 18, 5, 0]
    assert table["train_percent"].tolist() == [42.5, 45, 12.5, 0]
    assert table["test_images"].tolist() == [3, 1, 0, 4]
    np.testing.assert_allclose(table["without"], [100 / 3, 100, np.nan, 25])
    np.testing.assert_allclose(table["with"], [200 / 3, 100, np.nan, 50])


def test_one_image_is_all_of_them() -> None:
    one = np.array([0])
    table = group_table(FrequencyGroups(2, one, one), one, one, {"run": np.array([True])})
    assert table["train_percent"].tolist() == [100.0, 0.0, 0.0, 0.0]
    assert table["run"].tolist()[0] == 100.0 and table["run"].isna().tolist() == [False, True, True, True]


def test_an_interval_is_two_numbers_or_a_dash() -> None:
    assert interval_text({"auc_low": 6.06, "auc_high": 7.84}) == "6.1–7.8"
    assert interval_text({"auc_low": 6.06}) == MISSING == interval_text({"auc_high": 7.84})


def test_a_headline_has_the_interval_and_the_open_worlds_number_where_they_are_known() -> None:
    values = {"seen": 41.3, "unseen": 20.0, "hm": 18.2, "auc": 6.9}
    assert metrics_line(values).endswith("AUC 6.90")
    values |= {"auc_low": 6.1, "auc_high": 7.8}
    assert metrics_line(values).endswith("AUC 6.90 [6.10, 7.80]")
    assert metrics_line(values | {"auc_all": 7.1}).endswith("AUC 6.90 [6.10, 7.80]  all pairs 7.10")
