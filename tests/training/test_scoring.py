"""Scoring of a split: refused requests, blocks, statistics and best compositions."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from duplex.config.params import EvaluationParams
from duplex.errors import DuplexError, UsageError
from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.curve import AucComponents, Margins
from duplex.evaluation.feasibility import CrossFitGain, Threshold
from duplex.evaluation.metrics import Metrics, measure
from duplex.features.tokens import Examples
from duplex.methods.closed_form import ClosedFormMethod, ClosedFormOptions
from duplex.methods.duplex import DuplexOptions as Options
from duplex.methods.plid import Plid, PlidOptions
from duplex.recognition.worlds import evaluate_world, frequency_accuracies, metrics_at_bias
from duplex.training import scoring
from duplex.training.inputs import RunInputs
from duplex.training.run import tune_and_score
from duplex.training.scoring import (
    Calibration,
    SplitScorer,
    Validation,
    answer_groups,
    choose_options,
    feasibility_by_words,
    fit_confidence,
    score_split,
    term_sum_statistics,
)
from tests.methods.field import words
from tests.methods.world import batch_of, features, small_context, small_labels, small_method


def eight(split: str, own: Any = None) -> Examples:
    compositions = np.resize(small_labels().pairs[split] if own is None else own, 8)
    return Examples(np.arange(8), {"cls": features(8, 0)}, torch.as_tensor(compositions))


def test_k_is_at_most_the_number_of_candidates():
    labels, examples = small_labels(), eight("test")
    columns = labels.candidates("closed", "test")
    task = SplitScorer.of(small_method(Options(width=5)), columns)
    assert score_split(task, examples, labels, k=len(columns)).accumulator.k == len(columns)
    with pytest.raises(UsageError, match=rf"evaluation.k is 500; expected at most {len(columns)}"):
        score_split(task, examples, labels, k=500)


def test_inputs_on_disk_limit_the_images_per_block(monkeypatch):
    """Blocks of 96 numbers hold seven images of 13 numbers; inputs in memory set no limit."""
    monkeypatch.setattr(scoring, "BLOCK_SCORES", 96)
    disk: dict[str, Any] = {"patch": np.zeros((20, 2, 6)), "one": np.zeros((20, 1)), "cls": torch.zeros(20, 50)}
    blocks = list(scoring._cut(disk, 96))
    assert [(rows.start, rows.stop) for rows, _ in blocks] == [(0, 7), (7, 14), (14, 20)]
    assert [len(some[name]) for _, some in blocks for name in disk] == [7, 7, 7, 7, 7, 7, 6, 6, 6]
    assert len(list(scoring._cut({"cls": torch.zeros(20, 50)}, 96))) == 1
    assert len(list(scoring._cut({"cls": torch.zeros(20, 50)}, 7))) == 3


def test_the_best_compositions_are_feasible_and_ranked_with_the_bias():
    labels = small_labels()
    task = SplitScorer.of(small_method(Options(width=5)), labels.candidates("open", "test"))
    examples, feasible = eight("test"), np.arange(labels.size) % 4 != 1
    feasible |= labels.seen
    assert not feasible.all()
    scores = task.scorer(examples.inputs).numpy()
    assert score_split(task, examples, labels).top.shape == (8, 0)
    plain = score_split(task, examples, labels, top=3)
    assert (plain.top == np.argsort(-scores, axis=1)[:, :3]).all() and plain.accumulator.k == 1
    for bias in (-1.0, 0.5):
        shifted = np.where(feasible, scores + np.where(labels.seen, 0, np.float32(bias)), -np.inf)
        found = score_split(task, examples, labels, feasible_mask=feasible, top=3, bias=bias).top
        assert (found == np.argsort(-shifted, axis=1)[:, :3]).all()
    assert score_split(task, examples, labels, top=100).top.shape == (8, labels.size)


@pytest.fixture
def open_world() -> tuple[Any, RunInputs, Any]:
    """A method, test images, and its scores of all compositions."""
    labels = small_labels()
    count = 60
    compositions = torch.as_tensor(np.random.default_rng(2).choice(labels.pairs["test"], count))
    images = Examples(np.arange(count), {"cls": features(count, 3)}, compositions)
    manifest = pd.DataFrame({"image": [f"{row}.png" for row in range(count)]})
    inputs = RunInputs(manifest, labels, {"test": images}, None, {}, {}, 0)
    vars(inputs)["words"] = words()
    method = small_method(Options(width=5)).eval()
    scores = SplitScorer.of(method, labels.candidates("open", "test")).scorer(images.inputs).double().numpy()
    return method, inputs, scores


def test_a_threshold_of_feasibility_decides_the_metrics_of_the_open_world_but_those_of_all_pairs(open_world):
    method, inputs, scores = open_world
    labels = inputs.labels
    feasibility = feasibility_by_words(labels, words())
    assert feasibility is not None
    target = inputs.examples["test"].compositions.numpy()

    def auc(mask: Any) -> float:
        masked = np.where(mask, scores, -np.inf)
        value = measure(ScoreAccumulator(target, labels.seen).add(masked).competitors(), rounds=0).auc
        assert value is not None
        return 100 * value

    unseen = np.sort(feasibility[~labels.seen])
    low, high = unseen[2], unseen[3]
    expected = {None: auc(True), low: auc(feasibility >= low), high: auc(feasibility >= high)}
    assert len({round(value, 3) for value in expected.values()}) == 3, "each threshold counts"
    settings = EvaluationParams(bootstrap=20)
    for threshold, other in ((None, high), (low, high), (high, low)):
        calibration = Calibration(0.1, threshold, alternatives=(Calibration(0.2, other),))
        found = evaluate_world(method, inputs, settings, "open", calibration).metrics
        assert found["auc"] == pytest.approx(expected[threshold])
        assert found["auc_all"] == pytest.approx(expected[None])
        assert found["words"]["auc"] == pytest.approx(expected[other])
        assert found["words"]["feasible"] == (feasibility >= other).sum()
        assert found.get("feasible") == (None if threshold is None else (feasibility >= threshold).sum())


def test_images_whose_margin_is_the_bias_count_as_wrong_in_the_metrics_at_it():
    is_seen = np.array([True, False, True, False, True, True])
    margins = Margins(np.array([0.0, 1.0, 2.0, np.nan]), np.array([-1.0, 1.0]), is_seen)
    found = metrics_at_bias(margins, 1.0)
    assert (found["seen_at_val_bias"], found["unseen_at_val_bias"]) == (25.0, 50.0)
    assert found["hm_at_val_bias"] == pytest.approx(100 / 3)


def test_images_with_a_partial_label_are_in_no_frequency_group():
    labels = small_labels()
    counts = np.arange(len(labels.pairs["train"]), 0, -1)
    train = torch.as_tensor(np.repeat(labels.pairs["train"], counts))
    partial = torch.as_tensor(labels.partial_index(["red", "", "", "red"], ["", "star", "heart", ""]))
    assert (partial < 0).all()
    result: Any = SimpleNamespace(right=np.arange(8) % 2 == 0, right_at_ends=np.arange(8) % 3 == 0)

    def accuracies(compositions: torch.Tensor) -> dict[str, dict[str, float]]:
        images = Examples(np.arange(len(compositions)), {"cls": features(len(compositions), 0)}, compositions)
        examples = {"train": images, "test": eight("test")}
        return frequency_accuracies(result, RunInputs(pd.DataFrame(), labels, examples, None, {}, {}, 0))

    assert accuracies(torch.cat([partial, train])) == accuracies(train)


def test_labels_that_are_no_candidates_and_empty_splits_are_refused():
    labels = small_labels()
    columns = labels.candidates("closed", "val")
    outside = np.setdiff1d(np.arange(labels.size), columns)
    task = SplitScorer.of(small_method(Options(width=5)), columns)
    for own in outside[[0, -1]]:
        with pytest.raises(DuplexError, match="does not list an image's pair for its split"):
            score_split(task, eight("val", [own]), labels)
    with pytest.raises(DuplexError, match="no image to evaluate is readable"):
        score_split(task, Examples(np.arange(0), {"cls": features(0, 0)}, torch.zeros(0, dtype=torch.long)), labels)


def test_validation_needs_images_of_seen_and_unseen_pairs():
    labels, method = small_labels(), small_method(Options(width=5))
    seen = labels.pairs["val"][labels.seen[labels.pairs["val"]]]
    with pytest.raises(DuplexError, match="has no images of unseen pairs"):
        Validation(eight("val", seen), labels)(method).metrics["auc"]
    assert 0 <= Validation(eight("val"), labels)(method).metrics["auc"] <= 1


def test_the_validation_auc_is_of_the_closed_world():
    labels, method = small_labels(), small_method(Options(width=5))
    columns, examples = labels.candidates("closed", "val"), eight("val")
    target = np.searchsorted(columns, examples.compositions.numpy())
    scores = SplitScorer.of(method, columns).scorer(examples.inputs)
    competitors = ScoreAccumulator(target, labels.seen[columns]).add(scores).competitors()
    assert Validation(examples, labels)(method).metrics["auc"] == pytest.approx(measure(competitors, 1, rounds=0).auc)


def numbers(statistics: ScoreAccumulator) -> Metrics:
    """All metrics but the bias, which depends on rounding."""
    return dataclasses.replace(measure(statistics.competitors(), rounds=0), bias=None)


TERMS = ("semantic", "factors", "visual")


def test_every_sum_of_terms_equals_a_method_with_these_terms_only(monkeypatch):
    labels, method = small_labels(), small_method(Options(width=5))
    columns, examples = labels.candidates("closed", "test"), eight("test")
    monkeypatch.setattr(scoring, "BLOCK_SCORES", 3 * len(columns))
    sums = {frozenset(names): found for names, found in term_sum_statistics(method, columns, examples, labels).items()}
    expected = [some for size in (1, 2) for some in combinations(TERMS, size)]
    assert set(sums) == set(map(frozenset, expected))
    for some in expected:
        other = small_method(Options(width=5, inference=some))  # type: ignore[arg-type]
        other.load_state_dict(method.state_dict())
        alone = score_split(SplitScorer.of(other, columns), examples, labels).accumulator
        found = sums[frozenset(some)]
        assert numbers(found) == numbers(alone)


def test_a_term_of_weight_0_is_left_out():
    labels, columns, examples = small_labels(), small_labels().candidates("closed", "test"), eight("test")
    for weights, sums in (((0.0, 0.25, 2.0), 2), ((0.0, 0.0, 1.0), 0)):
        assert len(term_sum_statistics(closed_form(weights), columns, examples, labels)) == sums


def closed_form(weights: tuple[float, float, float]) -> ClosedFormMethod:
    torch.manual_seed(0)
    method = ClosedFormMethod(small_context(), ClosedFormOptions(width=5, weights=weights)).double()
    method.start(batch_of(features(40, 5), np.resize(small_labels().pairs["train"], 40)))
    return method


def test_terms_of_a_product_are_sums_of_weighted_logarithms():
    labels, columns, examples = small_labels(), small_labels().candidates("closed", "test"), eight("test")
    method = closed_form((0.5, 0.25, 2.0))
    found = term_sum_statistics(method, columns, examples, labels)
    assert len(found) == 6
    parts = dict(method.score_terms(columns)(examples.inputs))
    target = np.searchsorted(columns, examples.compositions.numpy())
    for names, statistics in found.items():
        whole = sum(parts[name] for name in names)
        plain = ScoreAccumulator(target, labels.seen[columns]).add(whole)
        assert numbers(statistics) == numbers(plain)


def test_a_score_that_is_no_sum_has_no_terms():
    labels = small_labels()
    method = Plid(small_context(), PlidOptions())
    assert term_sum_statistics(method, labels.candidates("closed", "test"), eight("test"), labels) == {}


def test_scoring_sets_the_method_to_evaluation_mode():
    labels, method = small_labels(), small_method(Options(width=5))
    columns = labels.candidates("closed", "test")
    for ask in (
        lambda: SplitScorer.of(method, columns),
        lambda: term_sum_statistics(method, columns, eight("test"), labels),
        lambda: choose_options(method, eight("val"), labels),
        lambda: Validation(eight("val"), labels)(method).metrics["auc"],
    ):
        method.train()
        ask()
        assert not method.training


class Choosing:
    asked: Any = None
    class_name = "Choosing"

    def eval(self) -> Choosing:
        return self

    def choose_options(self, inputs: Any, columns: np.ndarray, auc: Any) -> None:
        self.asked = inputs, columns, auc


def test_a_method_that_chooses_options_gets_the_validation_auc_of_scores():
    labels = small_labels()
    columns, examples, method = labels.candidates("closed", "val"), eight("val"), Choosing()
    choose_options(method, examples, labels)  # type: ignore[arg-type]
    inputs, given, auc = method.asked
    assert inputs is examples.inputs and (given == columns).all()
    scores = torch.randn(8, len(columns), generator=torch.Generator().manual_seed(3))
    target = np.searchsorted(columns, examples.compositions.numpy())
    scores[torch.arange(8), torch.from_numpy(target)] += 2
    expected = measure(ScoreAccumulator(target, labels.seen[columns]).add(scores).competitors(), rounds=0).auc
    assert 0 < auc(scores) == pytest.approx(expected)
    choose_options(method, eight("val", labels.pairs["val"][labels.seen[labels.pairs["val"]]]), labels)  # type: ignore[arg-type]
    assert method.asked[2](scores) == 0.0  # undefined
    with pytest.raises(DuplexError, match=r"called auc with a function; pass a tensor of scores"):
        auc(lambda inputs: scores)


@pytest.mark.parametrize("place", [0, 1, 3, 6])
def test_margins_at_the_chosen_threshold_are_those_without_the_compositions_below_it(monkeypatch, place: int):
    labels, examples = small_labels(), eight("val")
    feasibility = np.where(labels.seen, np.inf, np.arange(labels.size) / 4)
    gain = CrossFitGain(0.0, None, 1)
    monkeypatch.setattr(
        scoring, "choose_threshold", lambda accumulator, steps: Threshold(steps[place], steps, steps, gain)
    )
    monkeypatch.setattr(scoring, "feasibility_by_words", lambda *_: feasibility)
    method = small_method(Options(width=5))
    chosen, margins_all = scoring.calibrate(method, examples, labels, "open", None, 7, "words")
    mask = feasibility >= (chosen.threshold or 0)
    assert mask[~labels.seen].sum() < (~labels.seen).sum() or place == 0
    task = SplitScorer.of(method, labels.candidates("open", "val"))
    alone = score_split(task, examples, labels, feasible_mask=mask).accumulator.competitors()
    assert chosen.bias == scoring.best_bias(Margins.of(alone))
    every = Margins.of(score_split(task, examples, labels).accumulator.competitors())
    assert np.array_equal(margins_all.seen, every.seen, equal_nan=True)
    assert np.array_equal(margins_all.unseen, every.unseen, equal_nan=True)


def test_further_statistics_are_those_of_passes_of_their_own():
    labels, examples = small_labels(), eight("val")
    task = SplitScorer.of(small_method(Options(width=5)), labels.candidates("open", "val"))
    excluded = ~labels.seen & (np.arange(labels.size) % 2 == 0)
    result = score_split(task, examples, labels, feasible_mask=~excluded, further=[excluded, np.zeros_like(excluded)])
    with_mask, without = result.further
    for one, other in (
        (with_mask.competitors(1), result.accumulator.competitors()),
        (without.competitors(), score_split(task, examples, labels).accumulator.competitors()),
    ):
        for name in ("label", "seen", "unseen", "unseen_column"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("scores_at_once", [2**24, 11])
def test_one_pass_per_world_gives_what_passes_of_their_own_give(monkeypatch, capsys, scores_at_once: int):
    monkeypatch.setattr(scoring, "BLOCK_SCORES", scores_at_once)
    labels, val, method = small_labels(), eight("val"), small_method(Options(width=5))
    inputs = SimpleNamespace(labels=labels, words=None)
    spec = SimpleNamespace(name="m", worlds=("closed", "open"))
    settings = SimpleNamespace(feasibility="auto", thresholds=7)
    _, found = tune_and_score(spec, method, inputs, val, settings)  # type: ignore[arg-type]
    assert found["val_auc"] == Validation(val, labels)(method).metrics["auc"]
    everywhere = score_split(SplitScorer.of(method, labels.candidates("open", "val")), val, labels)
    assert found["val_auc_all"] == AucComponents.of(Margins.of(everywhere.accumulator.competitors())).auc
    untouched = dataclasses.replace(found["confidence"], new_share=0.1, unseen_mass={})
    assert untouched == fit_confidence(method, val, labels)
    assert found["confidence"].new_share == answer_groups(method, val, labels, untouched, "closed").balanced_share
    assert not capsys.readouterr().err
    monkeypatch.setattr("duplex.training.run.FEWEST_PAIRS", 3)
    tune_and_score(spec, method, inputs, val, settings)  # type: ignore[arg-type]
    assert "show 2 unseen pairs, but a feasibility threshold needs 3 or more" in capsys.readouterr().err
