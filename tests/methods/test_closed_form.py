"""The closed form as a method: score terms, refitting, weights chosen on validation images."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from duplex.methods import portable
from duplex.methods.base import Batch, PrimitiveVectors
from duplex.methods.closed_form import ClosedFormMethod, ClosedFormOptions
from duplex.methods.gaussian import ClassStatistics, ClosedForm, FitSettings, LinearDiscriminant
from duplex.methods.layers import unit
from duplex.methods.linear import STRENGTHS, Linear, LinearOptions
from duplex.methods.prompt_method import PromptMethod, PromptOptions
from duplex.methods.registry import make_method
from duplex.options import OptionError
from duplex.recognition import numpy_example
from tests.methods.field import CLIP
from tests.methods.world import DIM, batch_of, features, scores_of, small_context, small_labels, step_of

LABELS = small_labels()
ALONE: dict[str, Any] = {"losses": (), "inference": ("gaussian",), "adapter": "none"}
HEADS: dict[str, Any] = {"losses": ("state", "object"), "inference": ("linear", "gaussian_factors", "gaussian")}
REGRESSIONS: dict[str, Any] = {"losses": (), "inference": ("linear", "gaussian_factors", "gaussian"), "l2": 1e-2}
FREE = {**CLIP, "inference": ("semantic", "gaussian")}
TRAIN = batch_of(features(60, 5), np.resize(LABELS.pairs["train"], 60))
FEW = Batch({"cls": TRAIN.cls[:5]}, TRAIN.compositions[:5])
CHANGED = Batch({"cls": TRAIN.cls * 1.5 + 0.5}, TRAIN.compositions)


def begun(seed: int = 0, **row) -> ClosedFormMethod:
    torch.manual_seed(seed)
    return restarted(TRAIN, **row)


def restarted(images: Batch | None = None, **row) -> ClosedFormMethod:
    method = ClosedFormMethod(small_context(), ClosedFormOptions(**row)).double()
    if images is not None:
        method.start(images)
    return method


def model(settings: FitSettings = FitSettings(), few: Batch = TRAIN) -> ClosedForm:
    shape = len(LABELS.states), len(LABELS.objects)
    return ClosedForm.fit(ClassStatistics.of(unit(few.cls), few.compositions, *shape), settings)


def test_losses_are_those_of_prompts_and_scores_combine_the_terms_with_their_weights():
    method = begun(weights=(0.5, 0.25, 0.125), width=5, adapter_dropout=0.0)
    twin = PromptMethod(small_context(), PromptOptions(width=5, adapter_dropout=0.0)).double()
    twin.paths.load_state_dict(method.paths.state_dict())
    compositions = torch.as_tensor(LABELS.pairs["train"][:4])
    ours, theirs = (step_of(one, features(4, 3), compositions).losses for one in (method, twin))
    assert ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())
    columns, z = LABELS.candidates("closed", "test"), features(5, 2)
    g = model().scorer(torch.as_tensor(columns))(unit(z)).softmax(-1)
    parts = []
    for term in ("semantic", "factors"):
        twin.options = dataclasses.replace(twin.options, inference=(term,))
        parts.append(scores_of(twin, columns, z).double())
    parts.append(g)
    expected = sum(w * p.log() for w, p in zip((0.5, 0.25, 0.125), parts, strict=True))
    torch.testing.assert_close(scores_of(method, columns, z).double(), expected, rtol=1e-4, atol=1e-4)


def test_gaussian_factors_are_posteriors_of_states_and_objects():
    shape = len(LABELS.states), len(LABELS.objects)
    known = ClassStatistics.of(unit(TRAIN.cls), TRAIN.compositions, *shape)
    columns, z = LABELS.candidates("open", "test"), unit(features(4, 6))
    log_s, log_o = LinearDiscriminant.fit(known.by_state())(z), LinearDiscriminant.fit(known.by_object())(z)
    expected = log_s[:, LABELS.state_of(columns)] + log_o[:, LABELS.object_of(columns)]
    row = {**ALONE, "inference": ("gaussian", "gaussian_factors")}
    with_them, without = (scores_of(begun(**row, weights=(1.0, w)), columns, z).double() for w in (0.5, 0.0))
    torch.testing.assert_close(with_them - without, 0.5 * expected, rtol=1e-3, atol=1e-3)
    assert ClosedFormMethod.needs(ClosedFormOptions(**row)) == {"cls"}


def test_a_loaded_checkpoint_scores_the_same():
    method = begun(**ALONE)
    state = method.state_dict()
    assert state["counts"].sum() == len(TRAIN) and state["sums"].shape == (len(LABELS.pairs["train"]), DIM)
    again = restarted(**ALONE)
    again.load_state_dict(state)
    columns, z = LABELS.candidates("open", "test"), features(6, 4)
    assert torch.equal(scores_of(method, columns, z), scores_of(again, columns, z))
    method.start(CHANGED)
    assert not torch.equal(scores_of(method, columns, z), scores_of(again, columns, z)), "a new start is a new fit"
    again.load_state_dict(method.state_dict())
    assert torch.equal(scores_of(method, columns, z), scores_of(again, columns, z)), "so is a state that is loaded"
    assert again.fitted() is again.fitted()


def test_the_gaussian_term_alone_needs_no_text_tower():
    context = dataclasses.replace(small_context(), text=None, words=None)
    method = make_method("closed_form", ClosedFormOptions(**ALONE), context)
    assert method.needs(method.options) == {"cls"} and method.groups() == [] and method.shared() == ()
    method.start(TRAIN)
    assert torch.isfinite(scores_of(method, LABELS.candidates("open", "test"), features(3, 0))).all()


def test_semantic_prototypes_are_comparable_with_text_space_features():
    """Their cosines give `p(c^t|x)`; visual prototypes are comparable with whitened features."""
    method, z = begun(weights=(0.5, 0.25, 0.125), width=5).eval(), features(4, 1)
    columns = LABELS.candidates("closed", "test")
    method.start(batch_of(TRAIN.cls * torch.linspace(0.1, 1, DIM), TRAIN.compositions.numpy()))
    shown = method.inspectable()
    logits = method.paths.scale * shown.text_space_features({"cls": z}) @ shown.semantic(columns).T
    parts = dict(method.score_terms(columns)({"cls": z}))
    torch.testing.assert_close(parts["semantic"].double(), 0.5 * logits.log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(
        shown.text_space_features({"cls": z}).float(), shown.features({"cls": z.float()}), atol=0.1
    )
    alone = begun(**ALONE).inspectable()
    assert alone.text_space_features is None and alone.semantic is None


def test_interactions_alone_need_words():
    assert "words" not in ClosedFormMethod.needs(ClosedFormOptions())
    assert "words" in ClosedFormMethod.needs(ClosedFormOptions(interactions=None))
    words = PrimitiveVectors(features(len(LABELS.states), 7), features(len(LABELS.objects), 8))
    method = ClosedFormMethod(small_context(words=words), ClosedFormOptions(**ALONE, interactions=1.0)).double()
    method.start(TRAIN)
    columns, z = LABELS.candidates("open", "test"), features(4, 1)
    assert not torch.allclose(scores_of(method, columns, z), scores_of(begun(**ALONE), columns, z))


@pytest.mark.parametrize("images", [0, 1])
def test_a_pair_without_readable_images_is_composed(images):
    own = int(LABELS.pairs["train"][2])
    kept = (TRAIN.compositions != own) | ((TRAIN.compositions == own).cumsum(0) <= images)
    few = Batch({"cls": TRAIN.cls[kept]}, TRAIN.compositions[kept])
    method = restarted(few, **ALONE, weights=(1.0,))
    assert method.counts[2] == images and method.fitted().seen.tolist().count(own) == images
    columns, z = LABELS.candidates("closed", "test"), features(3, 0)
    expected = model(few=few).scorer(torch.as_tensor(columns))(unit(z)).log_softmax(-1)
    torch.testing.assert_close(scores_of(method, columns, z).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("images", "again"), [(FEW, "start"), (CHANGED, "start"), (CHANGED, "on_features_changed")])
def test_a_second_fit_equals_a_first(images, again):
    method = begun(**ALONE)
    getattr(method, again)(images)
    fresh = restarted(images, **ALONE)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in method.state_dict().items())


@pytest.mark.parametrize("row", [{"width": 5, "adapter_dropout": 0.0}, HEADS])
def test_no_loss_reads_the_statistics(row):
    """So they may wait for the next validation."""
    assert not ClosedFormMethod.trains_on_buffers
    z, compositions = features(4, 3), torch.as_tensor(LABELS.pairs["train"][:4])
    method = begun(**row)
    before = step_of(method, z, compositions).losses
    method.on_features_changed(CHANGED)
    after = step_of(method, z, compositions).losses
    assert before and all(torch.equal(loss, after[name]) for name, loss in before.items())


@pytest.mark.parametrize("best", [2.0, 8.0, 0.02, 0.7])
def test_weights_maximise_the_validation_auc(best):
    z, columns = features(6, 0), LABELS.candidates("closed", "val")
    method = begun(**FREE)
    log_terms = method._log_terms(columns)

    def auc(scores: torch.Tensor) -> float:
        """Highest at one weight of `semantic`, which is found by least squares."""
        terms = torch.stack([term.flatten() for term in log_terms({"cls": z})], 1).double()
        weight = torch.linalg.lstsq(terms, scores.flatten().double()[:, None]).solution[0, 0]
        return -abs(float(weight.log()) - float(np.log(best)))

    method.choose_options({"cls": z}, columns, auc)
    assert method.weights.tolist() == pytest.approx([best, 0.25], rel=0.2)
    named = begun(**FREE, weights=(0.75, 0.5))
    named.choose_options({"cls": z}, columns, auc)
    assert named.weights.tolist() == [0.75, 0.5]


def test_weights_stay_below_64():
    """With a measure that grows with the weights; the last weight sets the scale and stays."""
    method, columns = begun(**FREE), LABELS.candidates("closed", "val")
    method.choose_options({"cls": features(6, 0)}, columns, lambda scores: float(-scores.sum()))
    assert method.weights.tolist() == pytest.approx([32 * 2**0.5, 0.25])
    calls = []
    alone = begun(**ALONE)
    alone.choose_options({"cls": features(6, 0)}, columns, lambda scores: calls.append(scores) or 0.0)
    assert not calls and alone.weights.tolist() == [0.25]


def test_regressions_multiply_the_closed_form_and_validation_chooses_both_options():
    columns, z = LABELS.candidates("closed", "val"), features(6, 0)
    method = begun(**{**REGRESSIONS, "l2": None, "inference": ("linear", "gaussian")})
    tried = []

    def auc(scores: torch.Tensor) -> float:
        tried.append(scores)
        return float(len(tried) == 2)  # with the second strength; no weight gains

    method.choose_options({"cls": z}, columns, auc)
    assert method.chosen_options() == {"weights": (0.5, 0.25), "l2": STRENGTHS[1]}
    plain = Linear(small_context(), LinearOptions(l2=STRENGTHS[1])).double()
    plain.start(TRAIN)
    alone = begun(**ALONE, weights=(0.25,))
    expected = 0.5 * scores_of(plain, columns, z) + scores_of(alone, columns, z)
    torch.testing.assert_close(scores_of(method, columns, z), expected, rtol=1e-3, atol=1e-2)
    assert not method.groups()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"inference": ("semantic",), "losses": ("semantic",)}, "no term gaussian"),
        ({"inference": ("semantic", "gaussian")}, r"losses \['state', 'object'\] train no term of inference"),
        ({"losses": ("state", "composition")}, r"losses \['composition'\] train no term"),
        ({**ALONE, "losses": ("semantic",)}, r"losses \['semantic'\]"),
        ({**HEADS, "losses": ("composition",)}, "the term linear needs state and object in losses"),
        ({"inference": ("linear", "semantic", "gaussian")}, "the term linear needs .* no semantic or factors"),
        ({**HEADS, "l2": 0.1}, "l2 needs the term linear and no losses"),
        ({"weights": (1.0,)}, "weights has 1 numbers; expected 3"),
        ({"weights": (1.0, -1.0, 1.0)}, "weights: input should be greater than or equal to 0"),
    ],
)
def test_contradicting_options_are_refused(row, message):
    assert ClosedFormOptions(weights=(1.0, 0.0, 1.0)).weights == (1.0, 0.0, 1.0)
    with pytest.raises(OptionError, match=message):
        ClosedFormOptions(**row)


ROWS = {
    "gaussian": ALONE, "zero-shot": {**FREE, "inference": ("semantic", "gaussian_factors", "gaussian")},
    "three paths": {"width": 5}, "heads": HEADS, "regressions": REGRESSIONS,
    "prompts and regressions": {**FREE, "inference": ("semantic", "linear", "gaussian")},
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("world", ["closed", "open"])
def test_terms_and_exported_tensors_sum_to_the_score(row, world):
    method, columns, z = begun(**row), LABELS.candidates(world, "test"), features(5, 8)
    if method.heads is not None:
        for weight in method.heads.parameters():
            torch.nn.init.normal_(weight, std=0.1)
    expected, evidence = scores_of(method, columns, z).double(), method.score_terms(columns)
    found = dict(evidence({"cls": z}))
    assert len(found) == len(method.options.inference)
    torch.testing.assert_close(sum(found.values()).double(), expected, rtol=1e-6, atol=1e-6)
    tensors = method.portable(columns)
    assert dict(portable.score_terms(tensors, z)).keys() == found.keys()
    for name, part in portable.score_terms(tensors, z):
        torch.testing.assert_close(part.double(), found[name].double(), rtol=1e-4, atol=1e-4)
    numbers = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.testing.assert_allclose(numpy_example.scores(numbers, z.numpy()), expected, rtol=1e-4, atol=1e-4)
    shares = method.probabilities(expected)
    torch.testing.assert_close(shares.sum(1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(portable.probabilities(tensors, expected), shares)
