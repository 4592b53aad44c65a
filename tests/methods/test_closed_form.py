"""The closed form as a method: its terms joined by hand, statistics that come back, weights by validation alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from duplex.layers import portable
from duplex.layers.factors import unit
from duplex.layers.gaussian_prototypes import ClosedForm, Posterior, Settings
from duplex.layers.statistics import Statistics
from duplex.methods.base import Batch, Words
from duplex.methods.closed_form import ClosedFormMethod, ClosedFormOptions
from duplex.methods.prompts import PromptMethod, PromptOptions
from duplex.methods.registry import make
from duplex.options import OptionError
from duplex.recognition import numpy_example
from tests.methods.world import DIM, batch_of, features, scores_of, small_labels, small_setting, step_of

LABELS = small_labels()
ALONE: dict[str, Any] = {"losses": (), "inference": ("g",), "adapter": "none"}
FREE: dict[str, Any] = {
    "context": "fixed",
    "vocabulary": "fixed",
    "paths": "c",
    "adapter": "none",
    "losses": (),
    "inference": ("ct", "g"),
}
TRAIN = batch_of(features(60, 5), np.resize(LABELS.pairs["train"], 60))


def begun(seed: int = 0, **row) -> ClosedFormMethod:
    torch.manual_seed(seed)
    method = ClosedFormMethod(small_setting(), ClosedFormOptions(**row)).double()
    method.start(TRAIN)
    return method


def model(settings: Settings = Settings(), few: Batch = TRAIN) -> ClosedForm:
    shape = len(LABELS.states), len(LABELS.objects)
    return ClosedForm.fit(Statistics.of(unit(few.z), few.compositions, *shape), settings)


@pytest.mark.parametrize("world", ["closed", "open"])
def test_alone_it_is_the_parts_likelihood(world):
    columns, z = LABELS.target(world, "test"), features(4, 1)
    expected = model().scorer(torch.as_tensor(columns))(unit(z)).log_softmax(-1)
    found = scores_of(begun(**ALONE, weights=(1.0,)), columns, z).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fusion", ["product", "sum"])
def test_terms_are_joined_with_their_weights(fusion):
    method = begun(fusion=fusion, weights=(0.5, 0.25, 0.125), width=5)
    twin = PromptMethod(small_setting(), PromptOptions(width=5)).double()
    twin.paths.load_state_dict(method.paths.state_dict())
    columns, z = LABELS.target("closed", "test"), features(5, 2)
    g = model().scorer(torch.as_tensor(columns))(unit(z)).softmax(-1)
    parts = []
    for term in ("ct", "so"):
        twin.options = dataclasses.replace(twin.options, inference=(term,))
        parts.append(scores_of(twin, columns, z).double())
    parts.append(g)
    weighed = list(zip((0.5, 0.25, 0.125), parts, strict=True))
    expected = sum(w * (p if fusion == "sum" else p.log()) for w, p in weighed)
    torch.testing.assert_close(scores_of(method, columns, z).double(), expected, rtol=1e-4, atol=1e-4)


def test_primitives_by_the_same_model_are_one_more_term():
    """`p_g(s|x)`, `p_g(o|x)` from the statistics that the pairs' own come from."""
    shape = len(LABELS.states), len(LABELS.objects)
    known = Statistics.of(unit(TRAIN.z), TRAIN.compositions, *shape)
    columns, z = LABELS.target("open", "test"), unit(features(4, 6))
    log_s, log_o = Posterior.fit(known.by_state())(z), Posterior.fit(known.by_object())(z)
    expected = log_s[:, LABELS.state_of(columns)] + log_o[:, LABELS.object_of(columns)]
    row = {**ALONE, "inference": ("g", "gso")}
    with_them, without = (scores_of(begun(**row, weights=(1.0, w)), columns, z).double() for w in (0.5, 0.0))
    torch.testing.assert_close(with_them - without, 0.5 * expected, rtol=1e-3, atol=1e-3)
    assert ClosedFormMethod.needs(ClosedFormOptions(**row)) == {"cls"}


def test_losses_are_those_of_the_three_paths():
    method = begun(width=5, adapter_dropout=0.0)
    twin = PromptMethod(small_setting(), PromptOptions(width=5, adapter_dropout=0.0)).double()
    twin.paths.load_state_dict(method.paths.state_dict())
    compositions = torch.as_tensor(LABELS.pairs["train"][:4])
    ours, theirs = (step_of(one, features(4, 3), compositions).losses for one in (method, twin))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0)


def test_a_checkpoint_holds_the_statistics_and_nothing_is_drawn_anew():
    """Counts, sums and the moment come back; the fit made of them scores the same, without another search."""
    method = begun(**ALONE)
    state = method.state_dict()
    assert state["counts"].sum() == len(TRAIN) and state["sums"].shape == (len(LABELS.pairs["train"]), DIM)
    again = ClosedFormMethod(small_setting(), ClosedFormOptions(**ALONE)).double()
    again.load_state_dict(state)
    columns, z = LABELS.target("open", "test"), features(6, 4)
    assert torch.equal(scores_of(method, columns, z), scores_of(again, columns, z))
    method.start(Batch({"cls": TRAIN.z * 1.5 + 0.5}, TRAIN.compositions))
    assert not torch.equal(scores_of(method, columns, z), scores_of(again, columns, z)), "a new start is a new fit"
    again.load_state_dict(method.state_dict())
    assert torch.equal(scores_of(method, columns, z), scores_of(again, columns, z)), "so is a state that is loaded"
    assert again.fitted() is again.fitted()


def test_without_text_it_is_a_recogniser_of_features():
    setting = dataclasses.replace(small_setting(), text=None, words=None)
    method = make("closed_form", ClosedFormOptions(**ALONE), setting)
    assert method.needs(method.options) == {"cls"} and method.groups() == []
    method.start(TRAIN)
    assert torch.isfinite(scores_of(method, LABELS.target("open", "test"), features(3, 0))).all()


def test_its_texts_are_shown_in_the_space_of_the_prompts():
    """Their cosines with `spoken` make `p(c^t|x)`; those of visual prototypes are in the space of `g`."""
    method, z = begun(weights=(0.5, 0.25, 0.125), width=5).eval(), features(4, 1)
    columns = LABELS.target("closed", "test")
    method.start(batch_of(TRAIN.z * torch.linspace(0.1, 1, DIM), TRAIN.compositions.numpy()))
    shown = method.exhibits()
    logits = method.paths.scale * shown.spoken({"cls": z}) @ shown.semantic(columns).T
    parts = dict(method.evidence(columns)({"cls": z}))
    torch.testing.assert_close(parts["semantic"].double(), 0.5 * logits.log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(shown.spoken({"cls": z}).float(), shown.features({"cls": z.float()}), atol=0.1)
    alone = begun(**ALONE).exhibits()
    assert alone.spoken is None and alone.semantic is None


def test_words_are_needed_for_interactions_alone():
    assert "words" not in ClosedFormMethod.needs(ClosedFormOptions())
    assert "words" in ClosedFormMethod.needs(ClosedFormOptions(interactions=None))
    words = Words(features(len(LABELS.states), 7), features(len(LABELS.objects), 8))
    method = ClosedFormMethod(small_setting(words=words), ClosedFormOptions(**ALONE, interactions=1.0)).double()
    method.start(TRAIN)
    columns, z = LABELS.target("open", "test"), features(4, 1)
    assert not torch.allclose(scores_of(method, columns, z), scores_of(begun(**ALONE), columns, z))


@pytest.mark.parametrize("images", [0, 1])
def test_a_pair_of_no_readable_image_is_composed_and_one_of_a_single_image_is_not(images):
    own = int(LABELS.pairs["train"][2])
    kept = (TRAIN.compositions != own) | ((TRAIN.compositions == own).cumsum(0) <= images)
    few = Batch({"cls": TRAIN.z[kept]}, TRAIN.compositions[kept])
    method = ClosedFormMethod(small_setting(), ClosedFormOptions(**ALONE, weights=(1.0,))).double()
    method.start(few)
    assert method.counts[2] == images and method.fitted().pairs.tolist().count(own) == images
    columns, z = LABELS.target("closed", "test"), features(3, 0)
    expected = model(few=few).scorer(torch.as_tensor(columns))(unit(z)).log_softmax(-1)
    torch.testing.assert_close(scores_of(method, columns, z).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_new_start_leaves_nothing_of_the_one_before():
    method = begun(**ALONE)
    few = Batch({"cls": TRAIN.z[:5]}, TRAIN.compositions[:5])
    method.start(few)
    fresh = ClosedFormMethod(small_setting(), ClosedFormOptions(**ALONE)).double()
    fresh.start(few)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in method.state_dict().items())


def test_statistics_stay_where_features_do():
    """Nothing moves the features of a method without a tail; it need not read them again."""
    method = begun(**ALONE)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    method.follow(Batch({"cls": TRAIN.z * 1.5 + 0.5}, TRAIN.compositions))
    assert all(torch.equal(value, before[name]) for name, value in method.state_dict().items())


@pytest.mark.parametrize("liked", [2.0, 8.0, 0.02, 0.7])
def test_weights_are_those_with_the_best_validation_auc(liked):
    """A measure that only one weight pleases: the search ends there, and a row that names its weights keeps them."""
    z, columns = features(6, 0), LABELS.target("closed", "val")
    method = begun(**FREE)

    def likes(scores: torch.Tensor) -> float:
        return -abs(float(method_weight(scores).log()) - float(np.log(liked)))

    def method_weight(scores: torch.Tensor) -> torch.Tensor:
        """The share of `ct` in scores made of known terms, by least squares."""
        ct, g = (term.flatten() for term in method._terms(columns)({"cls": z}))
        return torch.linalg.lstsq(torch.stack([ct, g], 1).double(), scores.flatten().double()[:, None]).solution[0, 0]

    method.tune({"cls": z}, columns, likes)
    assert method.weights.tolist() == pytest.approx([liked, 0.25], rel=0.2)
    named = begun(**FREE, weights=(0.75, 0.5))
    named.tune({"cls": z}, columns, likes)
    assert named.weights.tolist() == [0.75, 0.5]


def test_weights_are_tried_in_steps_of_half_a_doubling_from_where_they_stand(monkeypatch):
    method, tried = begun(inference=("g", "gso", "so", "ct"), width=5), []
    assert method.weights.tolist() == [0.25, 0.125, 0.5, 0.5]
    monkeypatch.setattr(method, "_fuse", lambda terms, weights: tried.append(weights) or torch.tensor(weights))
    method.tune(
        {"cls": features(6, 0)}, LABELS.target("closed", "val"), lambda weights: -(float(weights[0] - 0.7) ** 2)
    )
    first, every = np.array(tried[0]), np.array(tried)
    assert first.tolist() == [0.25, 0.125, 0.5, 0.5] and (every[:, 3] == 0.5).all()
    moved = 2 * np.log2(every / first)
    np.testing.assert_allclose(moved, moved.round(), atol=1e-9)
    assert {4, -4, 2, -2, 1, -1} <= set(moved[:, 1].round().astype(int))


def test_a_search_without_end_ends():
    """The larger the better: a weight stays below 64, the last one, which sets the scale, as it is."""
    method, columns = begun(**FREE), LABELS.target("closed", "val")
    method.tune({"cls": features(6, 0)}, columns, lambda scores: float(-scores.sum()))
    assert method.weights.tolist() == pytest.approx([32 * 2**0.5, 0.25])
    asked = []
    alone = begun(**ALONE)
    alone.tune({"cls": features(6, 0)}, columns, lambda scores: asked.append(scores) or 0.0)
    assert not asked and alone.weights.tolist() == [0.25]


def test_what_is_trained_is_what_losses_reach():
    method = begun(width=5)
    (group,) = method.groups()
    assert {id(part) for part in group["params"]} == {id(part) for part in method.parameters()} != set()
    assert begun(width=5, losses=()).groups() == []
    assert method.summary()["codebook_rows"] == len(LABELS.pairs["train"])
    assert len(method.shared().compositions) == len(LABELS.pairs["train"]) and begun(**ALONE).shared() == ()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"inference": ("ct",), "losses": ("ct",)}, "no term g"),
        ({"inference": ("ct", "g")}, r"losses \['s', 'o'\] train what inference"),
        ({"weights": (1.0,)}, "1 for 3 terms"),
        ({"weights": (1.0, -1.0, 1.0)}, "not negative"),
        ({"ridge": 0.0}, "ridge"),
        ({"shrinkage": 0.0}, "shrinkage"),
        ({"interactions": -1.0}, "interactions"),
    ],
)
def test_contradicting_options_are_refused(row, said):
    assert ClosedFormOptions(weights=(1.0, 0.0, 1.0)).weights == (1.0, 0.0, 1.0)
    with pytest.raises(OptionError, match=said):
        ClosedFormOptions(**row)


ROWS = {
    "g": ALONE,
    "zero-shot": {**FREE, "inference": ("ct", "gso", "g")},
    "three paths": {"width": 5},
    "a sum": {"width": 5, "fusion": "sum"},
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("world", ["closed", "open"])
def test_evidence_and_tensors_give_the_score(row, world):
    """Its parts sum to it; so do those of the exported tensors, in torch and in numpy."""
    method, columns, z = begun(**row), LABELS.target(world, "test"), features(5, 8)
    expected, evidence = scores_of(method, columns, z).double(), method.evidence(columns)
    found = dict(evidence({"cls": z}))
    assert len(found) == len(method.options.inference)
    torch.testing.assert_close(sum(found.values()).double(), expected, rtol=1e-6, atol=1e-6)
    tensors = method.portable(columns)
    assert dict(portable.terms(tensors, z)).keys() == found.keys()
    for name, part in portable.terms(tensors, z):
        torch.testing.assert_close(part.double(), found[name].double(), rtol=1e-4, atol=1e-4)
    numbers = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.testing.assert_allclose(numpy_example.scores(numbers, z.numpy()), expected, rtol=1e-4, atol=1e-4)
    shares = method.probabilities(expected)
    torch.testing.assert_close(shares.sum(1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(portable.probabilities(tensors, expected), shares)


def test_rows_of_further_words_are_the_models():
    """Composed from the exported effects and interactions; what is not known adds nothing."""
    words = torch.randn(len(LABELS.states), 6).double(), torch.randn(len(LABELS.objects), 6).double()
    shape = len(LABELS.states), len(LABELS.objects)
    fitted = ClosedForm.fit(Statistics.of(unit(TRAIN.z), TRAIN.compositions, *shape), Settings(interactions=0.1), words)
    unseen = torch.as_tensor(np.setdiff1d(np.arange(LABELS.size), LABELS.pairs["train"]))
    tensors = portable.portable_closed_form(fitted, unseen[:1], None)
    states, objects = unseen // shape[1], unseen % shape[1]
    rows = portable.composed(tensors, states, objects)
    torch.testing.assert_close(rows, fitted.rows_of(unseen) - fitted.additive.mean)
    none = torch.full_like(states, -1)
    torch.testing.assert_close(portable.composed(tensors, none, objects), fitted.additive.object[objects])
    assert not portable.composed(tensors, none, none).any()
