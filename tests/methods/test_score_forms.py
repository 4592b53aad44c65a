"""Options that methods with prompts share: form of the score, weights of losses, disentanglers with batch norm."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from duplex.methods.caila import Caila
from duplex.methods.cds import Cds
from duplex.methods.cluspro import ClusPro
from duplex.methods.dfsp import Dfsp
from duplex.methods.gipcol import Gipcol
from duplex.methods.layers import CompositionIndex, Factors, NormDisentangler
from duplex.methods.lde import Lde
from duplex.methods.logiczsl import LogicZsl
from duplex.methods.plid import Plid
from duplex.methods.prompt_method import PromptMethod
from duplex.methods.troika import Troika
from duplex.methods.vp_cmjl import VpCmjl
from tests.methods.field import SOFT, N, batch, build, scores
from tests.methods.loops import close, linear, softmax, unit

CANDIDATES = [7, 11, 0]
HEADS = {"heads": 2}
ROWS = [
    (Gipcol, {"width": 6}),
    (Dfsp, HEADS),
    (Plid, {}),
    (Caila, {}),
    (Lde, {}),
    (PromptMethod, SOFT),
]
PATHS = [(Troika, {"inner": 2, "layers": 1, **HEADS}), (VpCmjl, HEADS), (ClusPro, {}), (LogicZsl, {})]


@pytest.mark.parametrize(("kind", "row"), ROWS)
def test_probabilities_are_softmaxes_of_the_logits(kind, row):
    by_p, by_logit = build(kind, **row), build(kind, score="logit", **row)
    images = batch(3)
    logits = scores(by_logit, CANDIDATES, images)
    expected = torch.tensor([softmax(row) for row in logits])
    torch.testing.assert_close(scores(by_p, CANDIDATES, images).float(), expected, rtol=1e-5, atol=1e-6)
    close(by_logit.probabilities(logits), logits.softmax(-1))


@pytest.mark.parametrize(("kind", "row"), PATHS)
def test_scores_of_three_paths_by_loops(kind, row):
    images = batch(3)
    method = build(kind, **row)
    index = CompositionIndex(np.sort(CANDIDATES), N)
    t, z = method.prepare(index), method.paths.adapt(images.cls)
    pulled = method.pulled_logits(z, t, images.inputs["patch"]) if kind is Troika else None
    logits = pulled or method.path_logits(z, t, index)
    for score, joined in product(("probability", "logit"), ("product", "sum")):
        expected = []
        for c, s, o in zip(*(path.tolist() for path in logits), strict=True):
            first = softmax(c) if score == "probability" else c
            p_s, p_o = softmax(s), softmax(o)
            pairs = [(p_s[k // N], p_o[k % N]) for k in sorted(CANDIDATES)]
            seconds = [a * b if joined == "product" else a + b for a, b in pairs]
            expected.append([a + b for a, b in zip(first, seconds, strict=True)])
        found = scores(build(kind, score=score, joined=joined, **row), index.compositions_np, images)
        close(found, expected)


def test_the_specificity_of_cds_raises_the_joined_primitives_alone():
    images = batch(3)
    row, whole = {"joined": "sum", "score": "logit"}, build(Cds, joined="sum", score="logit")
    plain, raised = build(Cds, specificity=0.0, **row), build(Cds, specificity=0.25, **row)
    for method in (plain, raised):
        method.load_state_dict(whole.state_dict(), strict=False)
    c = whole.paths.logits(whole.paths.adapt(images.cls), whole.prepare(CompositionIndex(np.array(CANDIDATES), N))[0])
    parts = [scores(method, CANDIDATES, images) - c for method in (plain, raised, whole)]  # of weights 0, 1/4, 1/2
    close((parts[1] - parts[0]).detach(), (parts[2] - parts[1]).detach())
    assert (parts[1] > parts[0]).all()


def test_the_weight_of_the_texts_logits():
    images = batch(3)
    halves = scores(build(VpCmjl, blend=0.5, score="logit", **HEADS), CANDIDATES, images)
    close(halves, scores(build(VpCmjl, blend=0.5, text=0.5, score="logit", **HEADS), CANDIDATES, images))
    ones = scores(build(VpCmjl, blend=1.0, text=1.0, score="logit", **HEADS), CANDIDATES, images)
    assert (ones - halves).abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "row"), [*PATHS, (Cds, {})])
def test_weights_of_the_losses_of_states_and_objects(kind, row):
    images = batch(4)
    whole, tenth = build(kind, **row), build(kind, primitives=0.1, **row)
    first, second = (method.losses(images, method.shared()) for method in (whole, tenth))
    assert first.keys() == second.keys()
    for name, value in first.items():
        factor = 0.1 if name in ("state", "object", "state_proxy", "object_proxy") else 1.0
        close(second[name].item(), factor * value.item())


def by_loops(network, z, mean, variance):
    """One image's factor, given the statistics that norm it; without dropout."""
    weight, bias = network[1].weight.detach(), network[1].bias.detach()
    hidden = (linear(network[0], z) - mean) / (variance + network[1].eps).sqrt() * weight + bias
    return unit(torch.tensor([max(value, 0.0) for value in hidden.tolist()], dtype=torch.float64))


def test_batch_norm_disentanglers_by_loops():
    torch.manual_seed(0)
    network = NormDisentangler(8).double()
    network[3].p = 0.0
    torch.nn.init.normal_(network[1].weight), torch.nn.init.normal_(network[1].bias)
    z = batch(5).cls
    hidden = torch.stack([linear(network[0], row) for row in z])
    mean = hidden.sum(0) / 5
    variance = ((hidden - mean) ** 2).sum(0) / 5
    close(network.train()(z).detach(), torch.stack([by_loops(network, row, mean, variance) for row in z]))
    running = 0.1 * mean, 0.9 + 0.1 * variance * 5 / 4
    expected = torch.stack([by_loops(network, row, *running) for row in z])
    close(network.eval()(z).detach(), expected)
    close(network.train()(z[:1]).detach(), expected[:1])
    close(network[1].running_mean, running[0])


def test_batch_norm_disentanglers_belong_to_three_paths_on_request():
    method = build(ClusPro, disentangler="batch_norm", shaken=False)
    assert isinstance(method.paths.factors.state, NormDisentangler)
    losses = method.train().losses(batch(4), method.shared())
    assert all(math.isfinite(value.item()) for value in losses.values())
    assert not any(isinstance(part, NormDisentangler) for part in Factors(8, 5, residual=False).modules())
