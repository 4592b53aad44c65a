"""Options that methods with prompts share: form of the score, weights of losses, disentanglers with batch norm."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from duplex.methods.layers import BatchNormDisentangler, CompositionIndex, Disentangler
from duplex.methods.layers import unit as unit_rows
from duplex.methods.prompts import Prompts
from duplex.methods.registry import find_method
from tests.methods.field import SOFT, N, batch, build, scores
from tests.methods.loops import close, softmax

CANDIDATES = [7, 11, 0]
HEADS: dict[str, Any] = {"heads": 2}
ROWS: dict[str, Any] = {"gipcol": {"width": 6}, "dfsp": HEADS, "prompts": SOFT, "plid": {}, "caila": {}, "lde": {}}
PATHS = {"troika": {"inner": 2, "layers": 1, **HEADS}, "vp_cmjl": HEADS, "cluspro": {}, "logiczsl": {}}


def made(kind: str, **options: Any) -> Any:
    return build(find_method(kind), **{**ROWS, **PATHS}.get(kind, {}), **options)


@pytest.mark.parametrize("kind", ROWS)
def test_probabilities_are_softmaxes_of_the_logits(kind):
    by_p, by_logit = made(kind), made(kind, score="logit")
    images = batch(3)
    logits = scores(by_logit, CANDIDATES, images)
    expected = torch.tensor([softmax(row) for row in logits])
    torch.testing.assert_close(scores(by_p, CANDIDATES, images).float(), expected, rtol=1e-5, atol=1e-6)
    close(by_logit.probabilities(logits), logits.softmax(-1))


@pytest.mark.parametrize("kind", [*(kind for kind in ROWS if kind != "prompts"), *PATHS, "kg_sp", "cge_visual"])
def test_scores_that_are_posteriors_are_divided_by_their_sum(kind):
    method, images = made(kind), batch(3)
    found = scores(method, CANDIDATES, images)
    expected = [[value / sum(row) for value in row] for row in found.tolist()]
    close(method.probabilities(found), expected)
    found[:, 1] = -torch.inf
    p = method.probabilities(found)
    assert not p[:, 1].any() and torch.allclose(p.sum(1), torch.ones(3, dtype=p.dtype))


@pytest.mark.parametrize("kind", [*(kind for kind in ROWS if kind != "lde"), *PATHS])
def test_checkpointing_reaches_the_prompts(kind, monkeypatch):
    method, passed = made(kind), []
    forward = Prompts.forward

    def recorded(self, columns, checkpointing=False):
        passed.append(checkpointing)
        return forward(self, columns, checkpointing)

    monkeypatch.setattr(Prompts, "forward", recorded)
    method.checkpointing = True
    method.shared()
    assert passed == [True]


@pytest.mark.parametrize("kind", PATHS)
def test_scores_of_three_paths_by_loops(kind):
    images = batch(3)
    method = made(kind)
    index = CompositionIndex(np.sort(CANDIDATES), N)
    t = method.prepare(index)
    pulled = method.pulled_logits(images.cls, t, images.inputs["patch"]) if kind == "troika" else None
    logits = pulled or method.image_logits(images.cls, t, index)
    for score, joined in product(("probability", "logit"), ("product", "sum")):
        expected = []
        for c, s, o in zip(*(path.tolist() for path in logits), strict=True):
            first = softmax(c) if score == "probability" else c
            p_s, p_o = softmax(s), softmax(o)
            pairs = [(p_s[k // N], p_o[k % N]) for k in sorted(CANDIDATES)]
            seconds = [a * b if joined == "product" else a + b for a, b in pairs]
            expected.append([a + b for a, b in zip(first, seconds, strict=True)])
        found = scores(made(kind, score=score, joined=joined), index.compositions_np, images)
        close(found, expected)


def test_the_weight_of_the_texts_logits():
    images = batch(3)
    halves = scores(made("vp_cmjl", blend=0.5, score="logit"), CANDIDATES, images)
    close(halves, scores(made("vp_cmjl", blend=0.5, text=0.5, score="logit"), CANDIDATES, images))
    assert (scores(made("vp_cmjl", blend=0.5, score="logit", text=1.0), CANDIDATES, images) != halves).all()


@pytest.mark.parametrize("kind", [*PATHS, "cds"])
def test_weights_of_the_losses_of_states_and_objects(kind):
    images = batch(4)
    whole, tenth = made(kind), made(kind, primitives=0.1)
    first, second = (method.losses(images, method.shared()) for method in (whole, tenth))
    for name, value in first.items():
        factor = 0.1 if name in ("state", "object", "state_proxy", "object_proxy") else 1.0
        close(second[name].item(), factor * value.item())


@pytest.mark.parametrize("kind", [*PATHS, "cds"])
def test_disentanglers_with_batch_norm_are_an_option(kind):
    forms = [type(made(kind, disentangler=form).paths.factors.object) for form in ("plain", "batch_norm")]
    assert forms == [Disentangler, BatchNormDisentangler]


def test_batch_norm_disentanglers_by_their_formula():
    torch.manual_seed(0)
    network: Any = BatchNormDisentangler(8).double()
    linear, norm, _, dropout = network.layers
    dropout.p = 0.0
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    z = batch(5).cls
    hidden = z @ linear.weight.T + linear.bias

    def factors(mean, variance):
        return unit_rows(((hidden - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias).clamp(min=0))

    mean, variance = hidden.sum(0) / 5, ((hidden - hidden.sum(0) / 5) ** 2).sum(0) / 5
    close(network.train()(z).detach(), factors(mean, variance).detach())
    expected = factors(0.1 * mean, 0.9 + 0.1 * variance * 5 / 4).detach()  # by running statistics
    close(network.eval()(z).detach(), expected)
    close(network.train()(z[:1]).detach(), expected[:1])
