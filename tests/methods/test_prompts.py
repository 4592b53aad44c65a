import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from duplex.features.tokens import Examples
from duplex.methods.duplex import DuplexOptions
from duplex.methods.prompt_method import PromptOptions
from duplex.methods.prompts import encoded_once
from duplex.options import OptionError
from duplex.training.scoring import Validation
from tests.methods import twin
from tests.methods.field import CLIP, SOFT, M, N
from tests.methods.loops import close, softmax
from tests.methods.world import features, scores_of, small_labels, small_method, step_of

LABELS = small_labels()
SEEN = torch.as_tensor(LABELS.pairs["train"])


def test_losses_equal_those_of_duplex_except_the_visual_one():
    prompts, duplex = small_method(PromptOptions(width=5)), small_method(DuplexOptions(width=5, graph=False))
    prompts.paths.load_state_dict(duplex.paths.state_dict())
    z = features(5, 0)
    ours, theirs = (step_of(method.eval(), z, SEEN[:5]).losses for method in (prompts, duplex))
    assert list(ours) == ["state", "object", "semantic"]
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0)


def test_fixed_prompts_are_encoded_once(monkeypatch):
    method = small_method(PromptOptions(**{**CLIP, "adapter": "feature", "losses": ("semantic",)}))
    tower, calls = method.paths.prompts.tower, []
    encode = tower.encode
    monkeypatch.setattr(tower, "encode", lambda *args, **more: calls.append(1) or encode(*args, **more))
    first = [tensor.clone() for tensor in method.shared()]
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(method.shared(), first, strict=True))
    assert len(calls) == 1
    learned = small_method(PromptOptions(**{**SOFT, "adapter": "feature"}))
    learned.shared()
    learned.shared()
    assert len(calls) == 3, "learned prompts are encoded at every step"


def test_lists_of_prompts_are_encoded_once_while_parameters_stay(monkeypatch):
    method = small_method(PromptOptions(width=5))
    tower, calls = method.paths.prompts.tower, []
    encode = tower.encode_blocks
    monkeypatch.setattr(tower, "encode_blocks", lambda *args, **more: calls.append(1) or encode(*args, **more))
    closed, every, z = LABELS.candidates("closed", "test"), np.arange(LABELS.size), features(4, 1)
    apart = {len(columns): scores_of(method, columns, z) for columns in (closed, every)}
    assert len(calls) == 2
    for parts, needed in ((False, 2), (True, 1)):
        calls.clear()
        with encoded_once(method, parts=parts):
            for columns in (every, closed, every, closed):
                torch.testing.assert_close(scores_of(method, columns, z), apart[len(columns)], rtol=0, atol=1e-6)
            torch.testing.assert_close(scores_of(method, closed[:0], z), apart[len(closed)][:, :0])
        assert len(calls) == needed + (0 if parts else 1), parts
    calls.clear()
    with torch.no_grad():
        method.paths.prompts.learned_rows.mul_(torch.linspace(-1, 1, 16))
    assert not torch.equal(scores_of(method, closed, z), apart[len(closed)]) and len(calls) == 1


def test_validation_in_all_worlds_encodes_prompts_once(monkeypatch):
    method = small_method(PromptOptions(width=5))
    tower, calls = method.paths.prompts.tower, []
    encode = tower.encode_blocks
    monkeypatch.setattr(tower, "encode_blocks", lambda *args, **more: calls.append(1) or encode(*args, **more))
    own = np.resize(LABELS.pairs["val"], 8)
    examples = Examples(np.arange(8), {"cls": features(8, 0)}, torch.as_tensor(own))
    both = Validation(examples, LABELS, world="open")(method).metrics
    assert len(calls) == 1
    assert both["auc"] == pytest.approx(Validation(examples, LABELS)(method).metrics["auc"], abs=1e-6)


def test_zero_shot_scores_are_softmaxes_over_prompts():
    method = small_method(PromptOptions(**CLIP))
    columns = LABELS.candidates("closed", "test")
    z = features(4, 1)
    expected = twin.posteriors(twin.unit(z), method.paths.semantic(columns), method.paths.scale)
    torch.testing.assert_close(scores_of(method, columns, z).double(), expected, rtol=1e-6, atol=1e-7)
    assert method.groups() == []


@pytest.mark.parametrize("negatives", ["seen", "target"])
def test_the_semantic_loss_is_over_seen_pairs_or_all_candidates(negatives):
    method = small_method(PromptOptions(width=5, adapter="none", losses=("semantic",), semantic_negatives=negatives))
    columns = LABELS.pairs["train"] if negatives == "seen" else LABELS.candidates("closed", "train")
    z, own = features(3, 2), SEEN[[1, 4, 6]]
    t = method.paths.semantic(columns)
    places = torch.as_tensor(np.searchsorted(columns, own))
    expected = cross_entropy(method.paths.scale * twin.unit(z) @ t.T, places)
    torch.testing.assert_close(step_of(method, z, own).losses["semantic"], expected)


def test_inspectable_features_are_those_of_the_scores():
    method, z = small_method(PromptOptions(width=5)).eval(), features(4, 3)
    shown = method.inspectable()
    assert shown.present_fields == ("features", "semantic", "factors")
    with torch.no_grad():
        zc = method.paths.adapt(z)
        assert torch.equal(shown.features({"cls": z}), zc)
        assert all(torch.equal(a, b) for a, b in zip(shown.factors({"cls": z}), method.paths.factors(zc), strict=True))
    columns = np.array([3, 0])
    assert torch.equal(shown.semantic(columns), method.paths.encode(columns, ("semantic",)).compositions)
    assert not any(part.requires_grad for part in (shown.features({"cls": z}), *shown.factors({"cls": z})))
    assert small_method(PromptOptions(**CLIP)).inspectable().present_fields == ("features", "semantic")


@pytest.mark.parametrize(
    ("row", "word"),
    [({"paths": "composition", "losses": ("state",), "inference": ("semantic",)}, "state and object need paths: three"),
     ({"paths": "composition", "losses": ("semantic",)}, "the score term factors needs paths: three"),
     ({"adapter": "none", "context": "fixed", "vocabulary": "fixed", "losses": ("semantic",)}, "no parameter to"),
     ({"inference": ()}, "at least one")],
)  # fmt: skip
def test_contradicting_options_are_refused(row, word):
    with pytest.raises(OptionError, match=word):
        PromptOptions(**row)


def test_word_dropout_acts_on_names_alone_and_only_while_training_encodes_them():
    prompts = small_method(PromptOptions(width=5)).paths.prompts.train()
    plain, count = prompts.lexicon().detach(), len(LABELS.states) + len(LABELS.objects)
    prompts.word_dropout = 0.3
    torch.manual_seed(3)
    mask = torch.nn.functional.dropout(torch.ones_like(plain[-count:]), 0.3)
    assert set(mask.unique().tolist()) == {0.0, 1 / 0.7}
    torch.manual_seed(3)
    dropped = prompts.lexicon().detach()
    assert torch.equal(dropped[-count:], plain[-count:] * mask)
    assert torch.equal(dropped[:-count], plain[:-count])
    with torch.no_grad():
        assert torch.equal(prompts.lexicon(), plain)
    assert torch.equal(prompts.eval().lexicon(), plain)


def largest_by_loops(rows, compositions, group):
    """Each image's posterior of the groups: the softmax of the largest logit among each group's compositions."""
    size = {"state": M, "object": N}[group]
    found = []
    for row in rows.tolist():
        best = [-math.inf] * size
        for logit, c in zip(row, compositions, strict=True):
            place = c // N if group == "state" else c % N
            best[place] = max(best[place], logit)
        found.append(softmax(best))
    return found


@pytest.mark.parametrize("three", [False, True])
def test_maxima_over_compositions_by_loops(three):
    options = {} if three else SOFT
    method = small_method(PromptOptions(**options, maxima=True)).eval()
    plain = small_method(PromptOptions(**options)).eval()
    z, own = features(5, 0), SEEN[[0, 2, 3, 6, 6]]
    adapted = method.paths.adapt(z)
    logits = method.paths.logits(adapted, method.paths.semantic(SEEN.numpy()))
    losses, without = step_of(method, z, own).losses, step_of(plain, z, own).losses
    assert list(losses) == [*without, "state_maximum", "object_maximum"]
    for group, places in (("state", own // N), ("object", own % N)):
        rows = largest_by_loops(logits, SEEN.tolist(), group)
        mean = -sum(math.log(row[k]) for row, k in zip(rows, places.tolist(), strict=True)) / len(rows)
        close(losses[f"{group}_maximum"].item(), mean)
    columns = LABELS.candidates("closed", "test")
    logits = method.paths.logits(adapted, method.paths.semantic(columns))
    states, objects = (largest_by_loops(logits, columns.tolist(), group) for group in ("state", "object"))
    added = [[(s[c // N] + o[c % N]) / 2 for c in columns] for s, o in zip(states, objects, strict=True)]
    expected = scores_of(plain, columns, z) + torch.tensor(added)
    torch.testing.assert_close(scores_of(method, columns, z), expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("more", [{"losses": ("state",)}, {"inference": ("factors",)}])
def test_maxima_need_the_semantic_term(more):
    with pytest.raises(OptionError, match="maxima needs"):
        PromptOptions(maxima=True, **more)
