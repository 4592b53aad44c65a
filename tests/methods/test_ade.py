import math
from typing import Any

import torch

from duplex.methods.ade import Ade
from tests.methods.field import SEEN, N, batch, build, check_losses, scores, targets
from tests.methods.loops import close, composed, cross_entropy, dot, linear, products, softmax, unit

ROW: dict[str, Any] = {"width": 5, "scale": 6.0, "regulariser": 0.4, "product": 0.7}


def attended(part, z, tokens):
    q = linear(part.query, z)
    weights = softmax([dot(linear(part.key, y), q) / math.sqrt(5) for y in tokens])
    return unit(torch.stack([w * linear(part.value, y) for w, y in zip(weights, tokens, strict=True)]).sum(0)), weights


def partner_by_hand(i, own, other):
    after = [(i + k) % len(own) for k in range(1, len(own)) if own[(i + k) % len(own)] == own[i]]
    return ([j for j in after if other[j] != other[i]] + after + [i])[0]


def distance_by_hand(part, z, tokens, partner):
    found = []
    for i, j in enumerate(partner):
        there, back = attended(part, z[i], tokens[j])[1], attended(part, z[j], tokens[i])[1]
        found.append(sum(abs(a - b) for a, b in zip(sorted(there), sorted(back), strict=True)) / len(there))
    return sum(found) / len(found)


def test_losses_and_scores_by_loops():
    method, images = build(Ade, **ROW), batch(6)
    z, tokens = [unit(row) for row in images.cls], images.inputs["patch"]
    states, objects = (
        [unit(linear(embed, word)) for word in words]
        for embed, words in ((method.embed_s, method.words.states), (method.embed_o, method.words.objects))
    )
    v_c, v_s, v_o = (
        [attended(part, *row)[0] for row in zip(z, tokens, strict=True)]
        for part in (method.attend_c, method.attend_s, method.attend_o)
    )
    place, m, n = targets(images)
    y_s, y_o = ([partner_by_hand(i, *labels) for i in range(6)] for labels in ((m, n), (n, m)))
    assert y_s != list(range(6)) != y_o

    def across(part, words, labels, partner):
        there = [attended(part, z[i], tokens[j])[0] for i, j in enumerate(partner)]
        back = [attended(part, z[j], tokens[i])[0] for i, j in enumerate(partner)]
        return sum(cross_entropy(products(way, words, 6.0), labels) for way in (there, back))

    near = distance_by_hand(method.attend_s, z, tokens, y_s) + distance_by_hand(method.attend_o, z, tokens, y_o)
    far = distance_by_hand(method.attend_s, z, tokens, y_o) + distance_by_hand(method.attend_o, z, tokens, y_s)
    check_losses(
        method,
        images,
        composition=cross_entropy(products(v_c, [composed(method, c) for c in SEEN], 6.0), place),
        state=across(method.attend_s, states, m, y_s),
        object=across(method.attend_o, objects, n, y_o),
        regulariser=0.4 * (near - far),
    )
    candidates = [2, 10]
    expected = [
        [dot(c, composed(method, k)) + 0.7 * dot(s, states[k // N]) * dot(o, objects[k % N]) for k in candidates]
        for c, s, o in zip(v_c, v_s, v_o, strict=True)
    ]
    close(scores(method, candidates, images), expected)
