"""ADE by loops over images, partners and tokens; equal partners agree."""

from __future__ import annotations

import math
from typing import Any

import torch

from duplex.methods.ade import Ade
from tests.methods.field import SEEN, M, N, batch, build, close, cross_entropy, dot, linear, scores, softmax, unit

ROW: dict[str, Any] = {"width": 5, "scale": 6.0, "regulariser": 0.4}


def attended(part, z, tokens):
    q = linear(part.query, z)
    weights = softmax([dot(linear(part.key, y), q) / math.sqrt(5) for y in tokens])
    parts = [w * linear(part.value, y) for w, y in zip(weights, tokens, strict=True)]
    return unit(torch.stack(parts).sum(0)), weights


def crossed_by_hand(part, z, tokens, own, words):
    rows, labels, apart = [], [], []
    for i in range(len(z)):
        partners = [(i + k) % len(z) for k in range(1, len(z)) if own[(i + k) % len(z)] == own[i]]
        if partners:
            v, there = attended(part, z[i], tokens[partners[0]])
            _, back = attended(part, z[partners[0]], tokens[i])
            rows.append([6.0 * dot(v, w) for w in words])
            labels.append(own[i])
            apart.append(sum(abs(a - b) for a, b in zip(sorted(there), sorted(back), strict=True)) / len(there))
    return cross_entropy(rows, labels), sum(apart) / len(apart)


def test_losses_and_scores_by_loops():
    method, images = build(Ade, **ROW), batch(6)
    z, tokens, own = [unit(row) for row in images.z], images.inputs["patch"], images.compositions.tolist()
    states = [unit(linear(method.embed_s, method.words.states[m])) for m in range(M)]
    objects = [unit(linear(method.embed_o, method.words.objects[n])) for n in range(N)]

    def pair(c):
        first = linear(method.composer.state, method.words.states[c // N])
        return unit(first + linear(method.composer.object, method.words.objects[c % N]))

    v_s = [attended(method.attend_s, *row)[0] for row in zip(z, tokens, strict=True)]
    v_o = [attended(method.attend_o, *row)[0] for row in zip(z, tokens, strict=True)]
    v_c = [unit(linear(method.join, torch.cat(row))) for row in zip(v_s, v_o, strict=True)]
    s, o = ([[6.0 * dot(v, w) for w in words] for v in vs] for vs, words in ((v_s, states), (v_o, objects)))
    losses = method.losses(images, method.shared())
    m, n = [c // N for c in own], [c % N for c in own]
    close(losses["c"].item(), cross_entropy([[6.0 * dot(v, pair(c)) for c in SEEN] for v in v_c], map(SEEN.index, own)))
    close(losses["s"].item(), cross_entropy(s, m))
    close(losses["o"].item(), cross_entropy(o, n))
    crossed_s, apart_s = crossed_by_hand(method.attend_s, z, tokens, m, states)
    crossed_o, apart_o = crossed_by_hand(method.attend_o, z, tokens, n, objects)
    close(losses["crossed"].item(), crossed_s + crossed_o)
    close(losses["reg"].item(), 0.4 * (apart_s + apart_o))
    asked = [2, 10]
    expected = [[6.0 * dot(v_c[i], pair(c)) + s[i][c // N] + o[i][c % N] for c in asked] for i in range(6)]
    close(scores(method, asked, images), expected)


def test_partners_that_look_alike_agree():
    """Two equal images: what one reads off the other is what it reads off itself, and their attentions are equal."""
    method, images = build(Ade, **ROW), batch(1, compositions=[SEEN[0]])
    twice = type(images)(
        {k: v.repeat(2, *[1] * (v.ndim - 1)) for k, v in images.inputs.items()}, images.compositions.repeat(2)
    )
    losses = method.losses(twice, method.shared())
    assert losses["reg"].abs() < 1e-12
    close(losses["crossed"].item(), (losses["s"] + losses["o"]).item())


def test_the_order_of_tokens_does_not_matter():
    method, images = build(Ade, **ROW), batch(3)
    turned = type(images)({**images.inputs, "patch": images.inputs["patch"].flip(1)}, images.compositions)
    close(scores(method, range(12), turned), scores(method, range(12), images))
