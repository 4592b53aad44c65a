"""CDS-CZSL by loops; without specificity it is the three paths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from duplex.methods.cds import Cds, diversity
from duplex.methods.prompts import PromptMethod
from tests.methods.field import LABELS, SEEN, M, N, batch, build, close, mlp, scores, softmax

ROW: dict[str, Any] = {"width": 5, "specificity": 0.8, "context_width": 6}


def specificity(m):
    return 1 - math.log(1 + sum(c // N == m for c in SEEN)) / math.log(1 + N)


def test_losses_and_scores_by_loops():
    method, images = build(Cds, **ROW), batch(4)
    t = method.shared()
    close(diversity(LABELS), [specificity(m) for m in range(M)])

    def told(c):
        return float(mlp(method.context, torch.cat([t.states[c // N], t.objects[c % N]]).detach())[0])

    terms = [
        math.log(1 + math.exp(told(worse) - told(better)))
        for better in SEEN
        for worse in SEEN
        if better % N == worse % N and specificity(better // N) > specificity(worse // N)
    ]
    assert terms
    losses = method.losses(images, t)
    close(losses["spec"].item(), sum(terms) / len(terms))
    asked = [10, 3, 0]
    z = method.paths.features(images.z)
    encoded = method.paths.prompts.encode(torch.tensor(asked).numpy())
    f = method.paths.factored(z, encoded)
    expected = []
    for i in range(4):
        whole = softmax(method.paths.logits(z, encoded.compositions)[i])
        parts = [math.exp(f.log_s[i, c // N].item()) * math.exp(f.log_o[i, c % N].item()) for c in asked]
        weights = [1 + 0.8 / (1 + math.exp(-told(c))) for c in asked]
        expected.append([a + b * w for a, b, w in zip(whole, parts, weights, strict=True)])
    close(scores(method, asked, images), expected)


def test_the_order_reaches_the_learner_alone():
    method, images = build(Cds, **ROW), batch(4)
    method.losses(images, method.shared())["spec"].backward()
    reached = {name.split(".")[0] for name, p in method.named_parameters() if p.grad is not None}
    assert reached == {"context"}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_order_is_a_mean_over_what_is_ordered(count):
    method, images = build(Cds, **ROW), batch(4)
    better, worse = method.better[3 : 3 + count], method.worse[3 : 3 + count]
    method.better, method.worse = better, worse
    told = method.told(method.shared(), method.columns).tolist()
    terms = [math.log1p(math.exp(told[b] - told[a])) for a, b in zip(better.tolist(), worse.tolist(), strict=True)]
    close(method.losses(images, method.shared())["spec"].item(), sum(terms) / (count or 1))


def test_without_specificity_it_is_three_paths():
    method, plain, images = build(Cds, width=5, specificity=0.0), build(PromptMethod, width=5), batch(4)
    plain.load_state_dict(method.state_dict())
    ours, theirs = (m.losses(images, m.shared()) for m in (method, plain))
    assert {k: v.item() for k, v in ours.items()} == {k: v.item() for k, v in theirs.items()}
    torch.testing.assert_close(scores(method, range(12), images).float(), scores(plain, range(12), images))
