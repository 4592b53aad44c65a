"""VP-CMJL against loops."""

from __future__ import annotations

import math

import torch

from duplex.layers.prompt_paths import word_vectors
from duplex.methods.vp_cmjl import VpCmjl
from tests.methods.field import (
    SEEN,
    M,
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
    unit,
)
from tests.methods.test_dfsp import block_by_hand
from tests.methods.world import small_labels, small_tower


def read_by_hand(block, x, y):
    """A block's output for one query, and its attention as a mean over heads."""
    part, query, rows = block.attend, normed(block.norm_x, x), [normed(block.norm_y, row) for row in y]
    q, keys, width = linear(part.query, query), [linear(part.key, row) for row in rows], len(x) // part.heads
    weights = [0.0] * len(rows)
    for h in range(part.heads):
        cut = slice(h * width, (h + 1) * width)
        for k, weight in enumerate(softmax([dot(q[cut], key[cut]) / math.sqrt(width) for key in keys])):
            weights[k] += weight / part.heads
    return block_by_hand(block, x, y), weights


def parts(method, images, columns):
    """Logits by loops: {name: (text rows, proxy rows)} of compositions, states and objects."""
    z = method.paths.adapt(images.cls)
    z_s, z_o = method.paths.factors(z)
    t, scale = method.paths.prompts.encode(torch.as_tensor(columns).numpy()), method.paths.scale
    states, objects = (list(rows.detach()) for rows in (method.states, method.objects))

    def proxy(c):
        A, B = method.from_state.detach(), method.from_object.detach()
        s, o = states[c // N], objects[c % N]
        return unit(torch.tensor([dot(a, s) + dot(b, o) for a, b in zip(A, B, strict=True)], dtype=torch.float64))

    def rows(features, prototypes):
        prototypes = list(prototypes)
        return [[scale * dot(f.detach(), p) for p in prototypes] for f in features]

    def read(block, prototypes):
        found = []
        for f in z.detach():
            x, weights = read_by_hand(block, f, prototypes)
            found.append([scale * (dot(unit(x), p) + w) for p, w in zip(prototypes, weights, strict=True)])
        return found

    return {
        "composition": (rows(z, t.compositions), rows(z, [proxy(c) for c in columns])),
        "state": (read(method.read_s, t.states), rows(z_s, map(unit, states))),
        "object": (read(method.read_o, t.objects), rows(z_o, map(unit, objects))),
    }


def test_losses_and_scores_by_loops():
    method, images = build(VpCmjl, width=5, blend=0.2, heads=2), batch(4)
    found, own = parts(method, images, SEEN), images.compositions.tolist()
    target = {
        "composition": [SEEN.index(c) for c in own],
        "state": [c // N for c in own],
        "object": [c % N for c in own],
    }
    losses = method.losses(images, method.shared())
    for name, (text, visual) in found.items():
        close(losses[{"composition": "semantic"}.get(name, name)].item(), cross_entropy(text, target[name]))
        close(losses[f"{name}_proxy"].item(), cross_entropy(visual, target[name]))
    pairs = [
        zip(softmax(text), softmax(visual), strict=True) for text, visual in zip(*found["composition"], strict=True)
    ]
    close(losses["joint"].item(), sum(p * math.log(p / q) for row in pairs for p, q in row) / 4)
    candidates = [3, 11, 6]
    found = parts(method, images, candidates)
    expected = []
    for i in range(4):
        blended = {
            name: [0.8 * a + 0.2 * b for a, b in zip(text[i], visual[i], strict=True)]
            for name, (text, visual) in found.items()
        }
        p = {name: softmax(row) for name, row in blended.items()}
        expected.append(
            [p["composition"][k] + p["state"][c // N] * p["object"][c % N] for k, c in enumerate(candidates)]
        )
    close(scores(method, candidates, images), expected)


def test_proxies_start_at_text_features():
    method = build(VpCmjl, width=5, shaken=False)
    states, objects = word_vectors(small_labels(), small_tower())
    assert method.states.shape == (M, 8)
    torch.testing.assert_close(method.states.float(), states.float())
    torch.testing.assert_close(method.objects.float(), objects.float())
