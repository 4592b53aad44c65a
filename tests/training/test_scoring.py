"""One pass over a split: what it refuses before it reads a score, its blocks, and the best compositions it keeps."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.accumulator import Evidence
from duplex.evaluation.feasibility import Threshold
from duplex.evaluation.metrics import Metrics, measure
from duplex.features.examples import Examples
from duplex.methods.closed_form import ClosedFormMethod, ClosedFormOptions
from duplex.methods.duplex import DuplexOptions as Options
from duplex.methods.plid import Plid, PlidOptions
from duplex.training import scoring
from duplex.training.scoring import Field, assess, assess_sums, tune, validation_auc
from tests.methods.world import batch_of, features, small_labels, small_method, small_setting


def test_k_goes_up_to_the_number_of_columns():
    labels = small_labels()
    columns = labels.target("closed", "test")
    own = np.resize(labels.pairs["test"], 8)
    examples = Examples(np.arange(8), {"cls": features(8, 0)}, torch.as_tensor(own))
    field = Field.of(small_method(Options(width=5)), columns)
    assert assess(field, examples, labels, k=len(columns)).evidence.k == len(columns)
    with pytest.raises(UsageError, match=rf"k = 500 is more than the {len(columns)} compositions.*evaluation.k"):
        assess(field, examples, labels, k=500)


def eight(split: str, own: Any = None) -> Examples:
    listed = small_labels().pairs[split]
    return Examples(
        np.arange(8), {"cls": features(8, 0)}, torch.as_tensor(np.resize(listed if own is None else own, 8))
    )


def test_inputs_on_the_disk_are_read_as_far_as_they_fit(monkeypatch):
    """Blocks of 96 numbers: seven images of 2 x 6 and of 1 number; inputs that are in memory set no limit."""
    monkeypatch.setattr(scoring, "BLOCK_SCORES", 96)
    disk: dict[str, Any] = {"patch": np.zeros((20, 2, 6)), "one": np.zeros((20, 1)), "cls": torch.zeros(20, 50)}
    blocks = list(scoring._cut(disk, 96))
    assert [(rows.start, rows.stop) for rows, _ in blocks] == [(0, 7), (7, 14), (14, 20)]
    assert [len(some[name]) for _, some in blocks for name in disk] == [7, 7, 7, 7, 7, 7, 6, 6, 6]
    assert len(list(scoring._cut({"cls": torch.zeros(20, 50)}, 96))) == 1
    assert len(list(scoring._cut({"cls": torch.zeros(20, 50)}, 7))) == 3


def test_blocks_of_images_change_nothing(monkeypatch):
    field = Field.of(small_method(Options(width=5)), small_labels().target("closed", "test"))
    examples = eight("test")
    whole = field.scorer(examples.inputs)
    monkeypatch.setattr("duplex.training.scoring.BLOCK_SCORES", 3 * len(field.columns))
    found = list(field.blocks(examples.inputs))
    assert [(rows.start, rows.stop) for rows, _ in found] == [(0, 3), (3, 6), (6, 8)]
    torch.testing.assert_close(torch.cat([scores for _, scores in found]), whole)


@pytest.mark.parametrize("inference", [("ch",), ("so",), ("ch", "so")])
@pytest.mark.parametrize("unseen", ["compose", "random", "empty"])
def test_an_open_world_of_more_scores_than_can_be_held_is_swept(monkeypatch, inference, unseen):
    """In blocks of two of four states, and of all but one of them: scores, metrics and the best as at once."""
    labels, examples = small_labels(), eight("test")
    method = small_method(Options(width=5, inference=inference, unseen_rows=unseen))
    method.codebook.commit(np.array([2, 4, 9]), features(3, 6))
    columns, live = labels.target("open", "test"), np.arange(labels.size) != 4
    whole = Field.of(method, columns)
    assert whole.sweep is None
    at_once = assess(whole, examples, labels, k=2, feasible_mask=live, top=3, bias=0.1)
    shifted = np.where(live, whole.scorer(examples.inputs).numpy() + np.where(labels.seen, 0, 0.1), -np.inf)
    monkeypatch.setattr("duplex.training.scoring.BLOCK_SCORES", 11)
    for swept in (6, 9, 3):
        monkeypatch.setattr("duplex.training.scoring.SWEPT", swept)
        field = Field.of(method, columns)
        parts = list(field.parts(examples.inputs))
        assert len(parts) == len({(rows.start, first) for rows, first, _ in parts}) > len(examples)
        for rows, first, scores in parts:
            expected = whole.scorer(examples.inputs)[rows, first : first + scores.shape[1]]
            torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
        found = assess(field, examples, labels, k=2, feasible_mask=live, top=3, bias=0.1)
        values, wanted = (np.take_along_axis(shifted, one.top, axis=1) for one in (found, at_once))
        np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-5)  # equal ones come in any order
        ours, theirs = (measure(one.evidence.rivals(), 2, rounds=0).to_dict() for one in (found, at_once))
        assert ours.pop("bias") == pytest.approx(theirs.pop("bias"), abs=1e-5)  # a difference of scores
        assert ours == theirs


def test_what_asks_prompts_of_all_pairs_is_not_swept(monkeypatch):
    monkeypatch.setattr("duplex.training.scoring.BLOCK_SCORES", 1)
    columns, examples = small_labels().target("open", "test"), eight("test")
    for row in ({"inference": ("ct", "ch")}, {"inference": ("ch",), "codebook": "trainable"}):
        field = Field.of(small_method(Options(width=5, **row)), columns)
        assert field.sweep is None
        assert [scores.shape for _, _, scores in field.parts(examples.inputs)] == [(1, 12)] * 8


def test_the_best_compositions_are_those_that_may_be_with_the_bias_added():
    labels = small_labels()
    field = Field.of(small_method(Options(width=5)), labels.target("open", "test"))
    examples, live = eight("test"), np.arange(labels.size) % 4 != 1
    live |= labels.seen
    assert not live.all()
    scores = field.scorer(examples.inputs).numpy()
    assert assess(field, examples, labels).top.shape == (8, 0)
    for bias in (-1.0, 0.5):
        shifted = np.where(live, scores + np.where(labels.seen, 0, np.float32(bias)), -np.inf)
        found = assess(field, examples, labels, feasible_mask=live, top=3, bias=bias).top
        assert (found == np.argsort(-shifted, axis=1)[:, :3]).all()
    assert assess(field, examples, labels, top=100).top.shape == (8, labels.size)


def test_a_label_outside_of_the_target_set_and_a_split_without_pictures_are_refused():
    labels = small_labels()
    columns = labels.target("closed", "val")
    outside = np.setdiff1d(np.arange(labels.size), columns)
    field = Field.of(small_method(Options(width=5)), columns)
    for own in outside[[0, -1]]:
        with pytest.raises(DuplexError, match="outside of its target set"):
            assess(field, eight("val", [own]), labels)
    with pytest.raises(DuplexError, match="no readable image"):
        assess(field, Examples(np.arange(0), {"cls": features(0, 0)}, torch.zeros(0, dtype=torch.long)), labels)


def test_validation_needs_images_of_both_kinds():
    labels, method = small_labels(), small_method(Options(width=5))
    seen = labels.pairs["val"][labels.seen[labels.pairs["val"]]]
    with pytest.raises(DuplexError, match="seen and of unseen pairs"):
        validation_auc(method, eight("val", seen), labels)
    assert 0 <= validation_auc(method, eight("val"), labels) <= 1


@pytest.mark.parametrize("world", ["closed", "open"])
def test_the_validation_auc_is_that_of_the_world_trained_for(world):
    labels, method = small_labels(), small_method(Options(width=5))
    columns, examples = labels.target(world, "val"), eight("val")
    target = np.searchsorted(columns, examples.compositions.numpy())
    rivals = Evidence(target, labels.seen[columns]).add(Field.of(method, columns).scorer(examples.inputs)).rivals()
    assert validation_auc(method, examples, labels, world) == pytest.approx(measure(rivals, 1, rounds=0).auc)


def numbers(evidence: Evidence) -> Metrics:
    """All but the best bias, which has the scores' own last bits."""
    return dataclasses.replace(measure(evidence.rivals(), rounds=0), bias=None)


NAMED = {"ct": "semantic", "so": "factors", "ch": "visual"}


def test_every_sum_of_parts_is_the_model_asked_for_these_alone(monkeypatch):
    """As if its options named no other terms; block by block."""
    labels, method = small_labels(), small_method(Options(width=5))
    columns, examples = labels.target("closed", "test"), eight("test")
    monkeypatch.setattr(scoring, "BLOCK_SCORES", 3 * len(columns))
    sums = {frozenset(names): found for names, found in assess_sums(method, columns, examples, labels).items()}
    expected = [some for size in (1, 2) for some in combinations(NAMED, size)]
    assert set(sums) == {frozenset(NAMED[term] for term in some) for some in expected}
    for some in expected:
        other = small_method(Options(width=5, inference=some))  # type: ignore[arg-type]
        other.load_state_dict(method.state_dict())
        alone = assess(Field.of(other, columns), examples, labels).evidence
        found = sums[frozenset(NAMED[term] for term in some)]
        assert numbers(found) == numbers(alone)


def test_a_part_of_weight_nought_is_not_asked():
    labels, columns, examples = small_labels(), small_labels().target("closed", "test"), eight("test")
    train = batch_of(features(40, 5), np.resize(labels.pairs["train"], 40))
    for weights, sums in (((0.0, 0.25, 2.0), 2), ((0.0, 0.0, 1.0), 0)):
        method = ClosedFormMethod(small_setting(), ClosedFormOptions(width=5, weights=weights)).double()
        method.start(train)
        assert len(assess_sums(method, columns, examples, labels)) == sums


def test_parts_of_a_product_are_added_as_weighted_logarithms():
    labels, columns, examples = small_labels(), small_labels().target("closed", "test"), eight("test")
    torch.manual_seed(0)
    method = ClosedFormMethod(small_setting(), ClosedFormOptions(width=5, weights=(0.5, 0.25, 2.0))).double()
    train = batch_of(features(40, 5), np.resize(labels.pairs["train"], 40))
    method.start(train)
    found = assess_sums(method, columns, examples, labels)
    assert len(found) == 6
    parts = dict(method.evidence(columns)(examples.inputs))
    target = np.searchsorted(columns, examples.compositions.numpy())
    for names, evidence in found.items():
        whole = sum(parts[name] for name in names)
        plain = Evidence(target, labels.seen[columns]).add(whole)
        assert numbers(evidence) == numbers(plain)


def test_a_score_that_is_no_sum_has_no_parts():
    labels = small_labels()
    method = Plid(small_setting(), PlidOptions())
    assert assess_sums(method, labels.target("closed", "test"), eight("test"), labels) == {}


def test_whatever_is_asked_of_a_method_it_is_not_training():
    """Dropout would move every score."""
    labels, method = small_labels(), small_method(Options(width=5))
    columns = labels.target("closed", "test")
    for ask in (
        lambda: Field.of(method, columns),
        lambda: assess_sums(method, columns, eight("test"), labels),
        lambda: tune(method, eight("val"), labels),
        lambda: validation_auc(method, eight("val"), labels),
    ):
        method.train()
        ask()
        assert not method.training


class Choosing:
    """A method that asks what its validation AUC would be."""

    asked: Any = None

    def eval(self) -> None:
        pass

    def tune(self, inputs: Any, columns: np.ndarray, auc: Any) -> None:
        self.asked = inputs, columns, auc


def test_a_method_chooses_by_the_validation_auc_of_its_scores():
    labels = small_labels()
    columns, examples, method = labels.target("closed", "val"), eight("val"), Choosing()
    tune(method, examples, labels)  # type: ignore[arg-type]
    inputs, given, auc = method.asked
    assert inputs is examples.inputs and (given == columns).all()
    scores = torch.randn(8, len(columns), generator=torch.Generator().manual_seed(3))
    target = np.searchsorted(columns, examples.compositions.numpy())
    scores[torch.arange(8), torch.from_numpy(target)] += 2
    expected = measure(Evidence(target, labels.seen[columns]).add(scores).rivals(), rounds=0).auc
    assert 0 < auc(scores) == pytest.approx(expected)
    seen = labels.pairs["val"][labels.seen[labels.pairs["val"]]]
    tune(method, eight("val", seen), labels)  # type: ignore[arg-type]
    assert method.asked[2](scores) == 0.0  # undefined: nothing is better than anything


@pytest.mark.parametrize("widths", [(6, 6), (2, 3, 7), (12,), (1,) * 12])
@pytest.mark.parametrize("top", [1, 3, 12])
def test_the_best_over_blocks_of_columns_are_the_best_of_all(widths: tuple[int, ...], top: int):
    scores = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    best, first = scoring.Best(5, top, torch.device("cpu")), 0
    for width in widths:
        for rows in (slice(0, 2), slice(2, 5)):
            best.add(scores[rows, first : first + width], rows, first)
        first += width
    assert torch.equal(best.columns, scores.topk(top, dim=1).indices)


def test_a_bias_and_what_is_not_live_shift_the_columns_asked_for():
    seen, live = np.array([True, False, True, False]), np.array([True, True, False, False])
    shifts = scoring.Shifts(seen, live, 0.5, torch.device("cpu"))
    assert shifts(0, 4).tolist() == [0.0, 0.5, -np.inf, -np.inf]
    assert shifts(0, 2).tolist() == [0.0, 0.5] and shifts(1, 2).tolist() == [0.5, -np.inf]
    assert shifts(0, 2).dtype == torch.float32
    assert scoring.Shifts(seen, None, -1.0, torch.device("cpu"))(1, 3).tolist() == [-1.0, 0.0, -1.0]


def test_the_best_are_ranked_as_they_are_unless_a_bias_is_asked_for():
    labels = small_labels()
    field = Field.of(small_method(Options(width=5)), labels.target("open", "test"))
    scores = field.scorer(eight("test").inputs)
    found = assess(field, eight("test"), labels, top=3)
    assert (found.top == scores.topk(3, dim=1).indices.numpy()).all() and found.evidence.k == 1


def test_eight_times_the_scores_of_a_sum_are_held_at_once(monkeypatch):
    asked: list[int] = []
    cut = scoring._cut
    monkeypatch.setattr(scoring, "_cut", lambda inputs, most: (asked.append(most), cut(inputs, most))[1])
    columns = small_labels().target("closed", "test")
    monkeypatch.setattr(scoring, "BLOCK_SCORES", 16 * len(columns))
    assess_sums(small_method(Options(width=5)), columns, eight("test"), small_labels())
    assert asked == [2]


@pytest.mark.parametrize("place", [0, 1, 3, 6])
def test_what_passes_is_as_feasible_as_the_threshold_or_more(monkeypatch, place: int):
    """Whichever candidate is chosen; those that fall just short of it do not pass."""
    labels, examples = small_labels(), eight("val")
    feasible = np.where(labels.seen, np.inf, np.arange(labels.size) / 4)
    monkeypatch.setattr(scoring, "choose_threshold", lambda evidence, steps: Threshold(steps[place], steps, steps))
    field = Field.of(small_method(Options(width=5)), labels.target("open", "val"))
    chosen, live = scoring.choose_feasible(field, examples, labels, feasible, 7)
    assert (live == (feasible >= chosen.value)).all()
    assert live[~labels.seen].sum() < (~labels.seen).sum() or place == 0
