from typing import Any

import pytest
import torch

from duplex.methods import families
from duplex.methods.base import Batch
from duplex.methods.cds import Cds
from duplex.methods.logiczsl import LogicZsl
from duplex.methods.prompt_method import PromptMethod
from duplex.methods.troika import Troika
from tests.methods.field import N, batch, build, check_losses, scores, targets
from tests.methods.loops import attend, close, cross_entropy, dot, feed_forward, normed, sums_of_posteriors, unit

ROW: dict[str, Any] = {"width": 5, "layers": 2, "heads": 2, "inner": 2, "start": 0.4}


def pulled_by_hand(traction, t, tokens):
    h, tokens = t, [normed(traction.norm, y) for y in tokens]
    for layer in traction.layers:
        h = feed_forward(layer.forward_part, h + attend(layer.attend, h, tokens)[0])
    return unit(t + traction.strength.detach() * h)


def logits_by_hand(method, images, t):
    z = method.paths.adapt(images.cls)
    return [
        [
            [method.paths.scale * dot(f, pulled_by_hand(method.traction, p.detach(), tokens)) for p in prototypes]
            for f, tokens in zip(features.detach(), images.inputs["patch"], strict=True)
        ]
        for features, prototypes in zip((z, *method.paths.factors(z)), t, strict=True)
    ]


def test_losses_and_scores_by_loops():
    method, images = build(Troika, **ROW), batch(3)
    paths = zip(logits_by_hand(method, images, method.shared()), targets(images), strict=True)
    semantic, state, object = (cross_entropy(*path) for path in paths)
    check_losses(method, images, semantic=semantic, state=state, object=object)
    candidates = [7, 11, 0]
    t = method.paths.encode(torch.tensor(candidates).numpy(), ("semantic", "factors"))
    close(scores(method, candidates, images), sums_of_posteriors(*logits_by_hand(method, images, t), candidates, N))


@pytest.mark.parametrize(
    ("kind", "without"),
    [(Cds, {"specificity": 0.0}), (LogicZsl, {"rules_weight": 0.0})],
)
def test_without_its_extension_a_method_is_the_three_paths(kind, without):
    method, plain = build(kind, width=5, **without), build(PromptMethod, width=5)
    images = Batch({"cls": batch(4).cls}, batch(4).compositions)  # without patch tokens
    plain.load_state_dict(method.state_dict())
    ours, theirs = (model.losses(images, model.shared()) for model in (method, plain))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        close(value.item(), theirs[name].item())
    torch.testing.assert_close(scores(method, range(12), images).float(), scores(plain, range(12), images))
    assert "patch" not in kind.needs(kind.Options(**without))


def test_scores_do_not_depend_on_the_chunk_size(monkeypatch):
    method, images = build(Troika, **ROW), batch(5)
    whole = scores(method, range(12), images)
    monkeypatch.setattr(families, "CHUNK", 1)
    close(scores(method, range(12), images), whole)
