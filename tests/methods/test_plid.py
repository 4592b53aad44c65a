"""PLID by loops; its bound against samples; with no spread and no margin it is a plain softmax."""

from __future__ import annotations

import math
from typing import Any

import torch

from duplex.methods.plid import Plid
from duplex.parts.prompts import Prompts
from tests.methods.field import LABELS, SEEN, M, N, batch, build, close, cross_entropy, dot, linear, scores, unit
from tests.methods.world import DIM, small_tower

ROW: dict[str, Any] = {"width": 5, "templates": ("a photo of", "this is", "one more")}


def classes_by_hand(method, columns):
    t = method.prompts.encode(torch.tensor(columns).numpy()).compositions
    texts = [
        Prompts(LABELS, small_tower(), paths="c", template=template).encode(torch.tensor(columns).numpy()).compositions
        for template in ROW["templates"]
    ]
    e, means, variances = method.enrich, [], []
    for k in range(len(columns)):
        described = [rows[k] for rows in texts]
        weights = [math.exp(dot(linear(e.key, d), linear(e.query, t[k])) / math.sqrt(DIM)) for d in described]
        parts = [w / sum(weights) * linear(e.value, d) for w, d in zip(weights, described, strict=True)]
        mixed = torch.stack(parts).sum(0)
        means.append(unit(t[k] + linear(e.out, mixed)))
        centre = sum(described) / 3
        variances.append(sum((d - centre) ** 2 for d in described) / 2)
    return means, variances


def test_losses_and_scores_by_loops():
    method, images = build(Plid, **ROW), batch(4)
    means, variances = classes_by_hand(method, SEEN)
    states = [unit(sum(t for t, c in zip(means, SEEN, strict=True) if c // N == m)) for m in range(M)]
    objects = [unit(sum(t for t, c in zip(means, SEEN, strict=True) if c % N == n)) for n in range(N)]
    own, scale = images.compositions.tolist(), method.scale
    place = [SEEN.index(c) for c in own]
    z = [unit(row) for row in images.z]
    z_s, z_o = (part.detach() for part in method.factors(torch.stack(z)))
    bounded = [
        [
            scale * dot(x, t) + (0.0 if k == y else scale**2 / 2 * dot(x**2, variances[k] + variances[y]))
            for k, t in enumerate(means)
        ]
        for x, y in zip(z, place, strict=True)
    ]
    s = [[scale * dot(x, t) for t in states] for x in z_s]
    o = [[scale * dot(x, t) for t in objects] for x in z_o]
    mixed = [
        [0.5 * b[k] + 0.5 * (s[i][c // N] + o[i][c % N]) for k, c in enumerate(SEEN)] for i, b in enumerate(bounded)
    ]
    losses = method.losses(images, method.shared())
    close(losses["c"].item(), cross_entropy(bounded, place))
    close(losses["mix"].item(), cross_entropy(mixed, place))
    close(losses["s"].item(), cross_entropy(s, [c // N for c in own]))
    close(losses["o"].item(), cross_entropy(o, [c % N for c in own]))
    asked = [11, 2, 5]
    t, _ = classes_by_hand(method, asked)
    logits = [
        [0.5 * scale * dot(x, t[k]) + 0.5 * (s[i][c // N] + o[i][c % N]) for k, c in enumerate(asked)]
        for i, x in enumerate(z)
    ]
    close(scores(method, asked, images), torch.tensor(logits, dtype=torch.float64).softmax(-1))


def test_the_bound_is_above_the_loss_of_sampled_classes():
    """Jensen: the closed form is at least the mean cross-entropy over class vectors drawn at random."""
    method = build(Plid, **ROW)
    random = torch.Generator().manual_seed(4)
    x = unit(torch.randn(DIM, generator=random, dtype=torch.float64))
    means = torch.nn.functional.normalize(torch.randn(5, DIM, generator=random, dtype=torch.float64), dim=-1)
    variances = 0.01 * torch.rand(5, DIM, generator=random, dtype=torch.float64)
    y = torch.tensor([2])
    bound = torch.nn.functional.cross_entropy(
        method.scale * (x @ means.T)[None] + method.margins(x[None], variances, y), y
    )
    drawn = means + variances.sqrt() * torch.randn(20000, 5, DIM, generator=random, dtype=torch.float64)
    sampled = torch.nn.functional.cross_entropy(method.scale * drawn @ x, y.expand(20000))
    assert bound >= sampled


def test_margins_grow_with_spread_and_spare_the_own_class():
    method = build(Plid, **ROW)
    z, y = torch.nn.functional.normalize(torch.randn(2, DIM, dtype=torch.float64), dim=-1), torch.tensor([0, 3])
    flat = method.margins(z, torch.zeros(4, DIM, dtype=torch.float64), y)
    close(flat, torch.zeros(2, 4))
    wide = method.margins(z, torch.ones(4, DIM, dtype=torch.float64), y)
    assert wide[0, 0] == wide[1, 3] == 0
    assert (wide[0, 1:] > 0).all()
