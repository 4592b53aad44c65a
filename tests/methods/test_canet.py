import torch

from duplex.methods import canet
from duplex.methods.canet import Canet
from tests.methods.field import SEEN, M, N, batch, build, check_losses, scores, targets
from tests.methods.loops import close, cross_entropy, dot, linear, mlp, normed, unit


def cosines(method, z):
    z, words = unit(z), method.words
    objects = [row.detach() for row in words.objects]
    to_objects = [dot(unit(mlp(method.see_o, z)), unit(o)) for o in objects]
    best = max(range(N), key=to_objects.__getitem__)
    learner, to_states = method.learner, []
    beta = mlp(method.join, torch.cat([objects[best], z])).clamp(min=0)
    first, second = linear(learner.scale_first, beta), linear(learner.scale_second, beta)
    for m in range(M):
        hidden = normed(learner.between[0], first * linear(learner.first, words.states[m])).clamp(min=0)
        to_states.append(dot(unit(mlp(method.see_s, z)), unit(second * linear(learner.second, hidden))))
    return to_states, to_objects


def pair(method, z, c):
    g = unit(mlp(method.compose, torch.cat([method.words.states[c // N], method.words.objects[c % N]]).detach()))
    return dot(unit(mlp(method.see_c, unit(z))), g)


def test_losses_and_scores_by_loops(monkeypatch):
    monkeypatch.setattr(canet, "CHUNK", 2)
    method, images = build(Canet, width=5, scale=4.0, share=0.3), batch(4)
    found = [cosines(method, z) for z in images.cls]
    place, m, n = targets(images)
    check_losses(
        method,
        images,
        state=cross_entropy([[4 * d for d in s] for s, _ in found], m) / 2,
        object=cross_entropy([[4 * d for d in o] for _, o in found], n) / 2,
        composition=cross_entropy([[4 * pair(method, z, c) for c in SEEN] for z in images.cls], place),
    )
    candidates = [1, 10, 6]
    expected = [
        [0.7 * (1 + pair(method, z, c)) / 2 + 0.3 * (1 + s[c // N]) / 2 * (1 + o[c % N]) / 2 for c in candidates]
        for z, (s, o) in zip(images.cls, found, strict=True)
    ]
    close(scores(method, candidates, images), expected)
