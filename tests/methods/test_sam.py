import math
from typing import Any

import pytest
import torch

from duplex.methods.sam import Sam
from tests.methods.field import SEEN, N, batch, build, check_losses, scores, targets
from tests.methods.loops import close, cross_block, cross_entropy, dot, linear, softmax, sums_of_posteriors, unit


def features(method, images, i):
    """An image's tokens, and what the query reads of them."""
    rows = [unit(images.cls[i]), *(unit(linear(method.project, y)) for y in images.inputs["patch"][i])]
    tokens = [unit(y + 0.1 * linear(method.adapter.up, linear(method.adapter.down, y).relu())) for y in rows]
    u = method.query.detach()
    for block in method.blocks:
        u, _ = cross_block(block, u, tokens)
    return tokens, unit(u)


def logits_by_hand(method, images, t):
    """For each of three kinds of prompts `t`: logits by the nearest token, and by the query; and all u."""
    found: list[tuple[list[Any], list[Any]]] = [([], []) for _ in t]
    queries = []
    for i in range(len(images)):
        tokens, u = features(method, images, i)
        queries.append(u)
        for (aligned, read), rows in zip(found, t, strict=True):
            aligned.append([method.scale * max(dot(v, row) for v in tokens) for row in rows.detach()])
            read.append([method.scale * dot(u, row) for row in rows.detach()])
    return found, queries


def test_losses_by_loops():
    method, images = build(Sam, heads=2, distil=0.3), batch(3)
    expected = {"distil": 0.0}
    found, _ = logits_by_hand(method, images, method.shared())
    for name, (aligned, read), own in zip(("semantic", "state", "object"), found, targets(images), strict=True):
        expected |= {name: cross_entropy(aligned, own), f"{name}_query": 0.7 * cross_entropy(read, own)}
        for q, p in zip(map(softmax, read), map(softmax, aligned), strict=True):
            expected["distil"] += 0.1 * sum(a * math.log(a / b) for a, b in zip(q, p, strict=True))
    check_losses(method, images, **expected)


def memory_by_hand(method, images, size):
    """{composition: at most `size` features with the lowest entropies}, one image after the other."""
    bank: dict[int, list[Any]] = {}
    found, queries = logits_by_hand(method, images, method.prompts.encode(torch.tensor(SEEN).numpy()))
    for u, p in zip(queries, map(softmax, found[0][1]), strict=True):
        kept = bank.setdefault(SEEN[p.index(max(p))], [])
        kept.append((-sum(x * math.log(x) for x in p), u))
        kept.sort(key=lambda entry: entry[0])
        del kept[size:]
    return {c: [u for _, u in kept] for c, kept in bank.items()}


@pytest.mark.parametrize("size", [2, 50])
def test_scores_and_memory_by_loops(size):
    method, images = build(Sam, heads=2, stored=size, aligned=0.3, remembered=0.7), batch(3)
    candidates, train = [0, 2, 3, 5, 11], batch(20, 9)
    method.on_features_changed(train)
    bank = memory_by_hand(method, train, size)
    t = method.prompts.encode(torch.tensor(candidates).numpy())
    found, queries = logits_by_hand(method, images, t)
    aligned, read = (sums_of_posteriors(*(part[k] for part in found), candidates, N) for k in (0, 1))
    for i, u in enumerate(queries):
        recalled = []
        for prompt, k in zip(t.compositions, candidates, strict=True):
            rows = [*bank.get(k, []), *[prompt] * (size - len(bank.get(k, [])))]
            weights = softmax([dot(u, row) / 0.1 for row in rows])
            read_row = sum(weight * row for weight, row in zip(weights, rows, strict=True))
            recalled.append(method.scale * dot(u, read_row))
        p = softmax(recalled)
        expected = [0.3 * a + 0.7 * (b + 0.7 * m) for a, b, m in zip(aligned[i], read[i], p, strict=True)]
        close(scores(method, candidates, images)[i], expected)
    assert any(k in bank for k in candidates), "the memory has no part"
