"""Troika against loops over images, prompts, heads and tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from duplex.errors import UsageError
from duplex.layers import attention
from duplex.methods.cds import Cds
from duplex.methods.logiczsl import LogicZsl
from duplex.methods.prompts import PromptMethod
from duplex.methods.troika import Troika, TroikaOptions
from duplex.methods.vp_cmjl import VpCmjl
from tests.methods.field import (
    SEEN,
    N,
    batch,
    build,
    close,
    cross_entropy,
    dot,
    linear,
    normed,
    scores,
    softmax,
    task,
    unit,
)

ROW: dict[str, Any] = {"width": 5, "layers": 2, "heads": 2, "inner": 2, "start": 0.4}


def attend_by_hand(part, x, tokens):
    """One query over the tokens of one image."""
    q, width = linear(part.query, x), part.query.out_features // part.heads
    keys, values = [linear(part.key, y) for y in tokens], [linear(part.value, y) for y in tokens]
    parts = []
    for h in range(part.heads):
        cut = slice(h * width, (h + 1) * width)
        weights = softmax([dot(q[cut], k[cut]) / math.sqrt(width) for k in keys])
        parts.append(torch.stack([w * v[cut] for w, v in zip(weights, values, strict=True)]).sum(0))
    return linear(part.out, torch.cat(parts))


def pulled_by_hand(traction, t, tokens):
    h, tokens = t, [normed(traction.norm, y) for y in tokens]
    for layer in traction.layers:
        norm, first, gelu, second = layer.forward_part
        g = h + attend_by_hand(layer.attend, h, tokens)
        h = g + linear(second, gelu(linear(first, normed(norm, g))))
    return unit(t + traction.strength.detach() * h)


def logits_by_hand(method, images, t):
    z = method.paths.adapt(images.cls).detach()
    z_s, z_o = (part.detach() for part in method.paths.factors(z))
    found = []
    for features, prototypes in ((z, t.compositions), (z_s, t.states), (z_o, t.objects)):
        rows = [
            [method.paths.scale * dot(f, pulled_by_hand(method.traction, p.detach(), tokens)) for p in prototypes]
            for f, tokens in zip(features, images.inputs["patch"], strict=True)
        ]
        found.append(rows)
    return found


def test_losses_and_scores_by_loops():
    method, images = build(Troika, **ROW), batch(3)
    t, own = method.shared(), images.compositions.tolist()
    c, s, o = logits_by_hand(method, images, t)
    losses = method.losses(images, t)
    close(losses["semantic"].item(), cross_entropy(c, map(SEEN.index, own)))
    close(losses["state"].item(), cross_entropy(s, [k // N for k in own]))
    close(losses["object"].item(), cross_entropy(o, [k % N for k in own]))
    candidates = [7, 11, 0]
    t = method.paths.encode(torch.tensor(candidates).numpy(), ("semantic", "factors"))
    c, s, o = logits_by_hand(method, images, t)
    expected = [
        [p + q[k // N] * r[k % N] for p, k in zip(softmax(a), candidates, strict=True)]
        for a, q, r in zip(c, map(softmax, s), map(softmax, o), strict=True)
    ]
    close(scores(method, candidates, images), expected)


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        (Troika, {"traction": False}),
        (VpCmjl, {"proxies": False}),
        (Cds, {"specificity": 0.0}),
        (LogicZsl, {"rules_weight": 0.0}),
    ],
)
def test_without_its_extension_a_method_is_the_three_paths(kind, without):
    method, plain, images = build(kind, width=5, **without), build(PromptMethod, width=5), batch(4)
    plain.load_state_dict(method.state_dict())
    ours, theirs = (model.losses(images, model.shared()) for model in (method, plain))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        close(value.item(), theirs[name].item())
    torch.testing.assert_close(scores(method, range(12), images).float(), scores(plain, range(12), images))
    assert "patch" not in kind.needs(kind.Options(**without))


def test_zero_strength_leaves_prompts_unchanged():
    method, images = build(Troika, **ROW), batch(4)
    torch.nn.init.zeros_(method.traction.strength)
    z, t = method.paths.adapt(images.cls), method.shared()
    for pulled, plain in zip(
        method.path_logits(z, t, images.inputs["patch"]), method.path_logits(z, t, None), strict=True
    ):
        close(pulled, plain)


def test_untrained_traction_depends_on_the_tokens():
    method, images = build(Troika, shaken=False, **ROW), batch(4)
    z, t, tokens = method.paths.adapt(images.cls), method.shared(), images.inputs["patch"]
    for ours, others in zip(method.path_logits(z, t, tokens), method.path_logits(z, t, tokens.flip(0)), strict=True):
        assert (ours - others).abs().max() > 1e-4


def test_scores_do_not_depend_on_the_chunk_size(monkeypatch):
    method, images = build(Troika, **ROW), batch(5)
    whole = scores(method, range(12), images)
    monkeypatch.setattr(attention, "CHUNK", 1)
    close(scores(method, range(12), images), whole)


def test_heads_must_divide_the_feature_width():
    with pytest.raises(UsageError, match="heads is 3"):
        Troika(task(), TroikaOptions(heads=3))
