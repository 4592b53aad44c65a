import math

import torch

from duplex.methods.prompts import encode_words
from duplex.methods.vp_cmjl import VpCmjl
from tests.methods.field import SEEN, M, N, batch, build, check_losses, scores, targets
from tests.methods.loops import close, cross_block, cross_entropy, dot, products, softmax, sums_of_posteriors, unit
from tests.methods.world import small_labels, small_tower


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

    def read(block, prototypes):
        found = []
        for f in z.detach():
            x, weights = cross_block(block, f, prototypes)
            found.append([scale * (dot(unit(x), p) + w) for p, w in zip(prototypes, weights, strict=True)])
        return found

    return {
        "composition": (products(z, t.compositions, scale), products(z, [proxy(c) for c in columns], scale)),
        "state": (read(method.read_s, t.states), products(z_s, map(unit, states), scale)),
        "object": (read(method.read_o, t.objects), products(z_o, map(unit, objects), scale)),
    }


def test_losses_and_scores_by_loops():
    method, images = build(VpCmjl, width=5, blend=0.2, heads=2), batch(4)
    found, expected = parts(method, images, SEEN), {}
    for (name, (text, visual)), target in zip(found.items(), targets(images), strict=True):
        expected[{"composition": "semantic"}.get(name, name)] = cross_entropy(text, target)
        expected[f"{name}_proxy"] = cross_entropy(visual, target)
    pairs = [
        zip(softmax(text), softmax(visual), strict=True) for text, visual in zip(*found["composition"], strict=True)
    ]
    expected["joint"] = sum(p * math.log(p / q) for row in pairs for p, q in row) / 4
    check_losses(method, images, **expected)
    candidates = [3, 11, 6]
    both = (torch.tensor(rows, dtype=torch.float64) for rows in parts(method, images, candidates).values())
    blended = (0.8 * text + 0.2 * visual for text, visual in both)
    close(scores(method, candidates, images), sums_of_posteriors(*blended, candidates, N))


def test_proxies_start_at_text_features():
    method = build(VpCmjl, width=5, shaken=False)
    states, objects = encode_words(small_labels(), small_tower())
    assert method.states.shape == (M, 8)
    torch.testing.assert_close(method.states.float(), states.float())
    torch.testing.assert_close(method.objects.float(), objects.float())
