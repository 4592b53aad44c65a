"""KG-SP against loops."""

from __future__ import annotations

from duplex.methods.kg_sp import KgSp
from tests.methods.field import N, batch, build, close, cross_entropy, mlp, scores, softmax, unit


def test_losses_and_scores_by_loops():
    method, images = build(KgSp, width=5), batch(4)
    states = [mlp(method.states, unit(z)) for z in images.cls]
    objects = [mlp(method.objects, unit(z)) for z in images.cls]
    losses = method.losses(images, ())
    close(losses["state"].item(), cross_entropy(states, images.compositions // N))
    close(losses["object"].item(), cross_entropy(objects, images.compositions % N))
    candidates = [7, 2, 11]
    expected = [
        [softmax(s)[c // N] * softmax(o)[c % N] for c in candidates] for s, o in zip(states, objects, strict=True)
    ]
    close(scores(method, candidates, images), expected)
