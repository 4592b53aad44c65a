"""CANet by loops; without the condition a state looks the same in every image."""

from __future__ import annotations

import pytest
import torch

from duplex.methods.canet import Canet
from tests.methods.field import SEEN, M, N, batch, build, close, cross_entropy, dot, linear, mlp, scores, softmax, unit


def cosines(method, z):
    z = unit(z)
    objects = [unit(linear(method.embed_o, row)) for row in method.words.objects]
    to_objects = [dot(unit(mlp(method.see_o, z)), o) for o in objects]
    best = max(range(N), key=to_objects.__getitem__)
    to_states = []
    for m in range(M):
        hidden = linear(method.first, method.words.states[m])
        if method.hyper is not None:
            hidden = (1 + mlp(method.hyper, torch.cat([objects[best], z]))) * hidden
        state = unit(linear(method.second, hidden.clamp(min=0)))
        to_states.append(dot(unit(mlp(method.see_s, z)), state))
    scale = method.options.scale
    return [scale * v for v in to_states], [scale * v for v in to_objects]


@pytest.mark.parametrize("conditional", [True, False])
def test_losses_and_scores_by_loops(conditional):
    method, images = build(Canet, width=5, scale=4.0, conditional=conditional), batch(4)
    found = [cosines(method, z) for z in images.z]
    own, losses = images.compositions.tolist(), method.losses(images, ())
    close(losses["s"].item(), cross_entropy([s for s, _ in found], [c // N for c in own]))
    close(losses["o"].item(), cross_entropy([o for _, o in found], [c % N for c in own]))
    pairs = [[s[c // N] + o[c % N] for c in SEEN] for s, o in found]
    close(losses["c"].item(), cross_entropy(pairs, map(SEEN.index, own)))
    asked = [1, 10, 6]
    close(scores(method, asked, images), [[softmax(s)[c // N] * softmax(o)[c % N] for c in asked] for s, o in found])


def test_states_depend_on_the_image_only_where_conditional():
    """Two images with equal state features: their states' cosines agree without the condition, and differ with it."""
    for conditional in (True, False):
        method = build(Canet, width=5, conditional=conditional)
        for layer in method.see_s:
            if hasattr(layer, "weight"):
                torch.nn.init.zeros_(layer.weight)
        to_states, _ = method.cosines(batch(2).z)
        assert torch.allclose(to_states[0], to_states[1]) is not conditional
