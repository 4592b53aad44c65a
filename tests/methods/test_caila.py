"""CAILA by loops; adapters that add nothing leave CLIP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from duplex.methods.caila import Caila
from duplex.methods.prompts import PromptMethod
from tests.methods.field import SEEN, N, batch, build, close, cross_entropy, dot, linear, scores, softmax, unit

ROW: dict[str, Any] = {"width": 4, "scale": 0.5}


def adapted(adapter, z):
    return z + adapter.scale * linear(adapter.up, linear(adapter.down, z).clamp(min=0))


def sides(part, z_c, z_s, z_o, mixture):
    three = [adapted(a, z_c) for a in (part.state, part.object, part.whole)]
    whole = sum(three) / 3 if mixture else three[2]
    return unit(whole), unit(adapted(part.state, z_s)), unit(adapted(part.object, z_o))


@pytest.mark.parametrize("mixture", [True, False])
def test_losses_and_scores_by_loops(mixture):
    method, images = build(Caila, mixture=mixture, **ROW), batch(6)
    found = [sides(method.images, unit(z), unit(z), unit(z), mixture) for z in images.z]

    def texts(columns):
        t = method.prompts.encode(torch.as_tensor(columns).numpy())
        whole = [sides(method.texts, row, row, row, mixture)[0] for row in t.compositions]
        return (
            whole,
            [unit(adapted(method.texts.state, r)) for r in t.states],
            [unit(adapted(method.texts.object, r)) for r in t.objects],
        )

    def logits(features, prototypes):
        return [[method.scale * dot(f, p) for p in prototypes] for f in features]

    t_c, t_s, t_o = texts(SEEN)
    own, losses = images.compositions.tolist(), method.losses(images, method.shared())
    close(losses["c"].item(), cross_entropy(logits([f[0] for f in found], t_c), map(SEEN.index, own)))
    close(losses["s"].item(), cross_entropy(logits([f[1] for f in found], t_s), [c // N for c in own]))
    close(losses["o"].item(), cross_entropy(logits([f[2] for f in found], t_o), [c % N for c in own]))
    made = []
    for i in range(6):
        j = (i + 1) % 6
        label = own[i] // N * N + own[j] % N
        if label in SEEN:
            made.append((unit(found[i][1] + found[j][2]), SEEN.index(label)))
    assert len(made) > 0
    close(losses["shift"].item(), cross_entropy(logits([m for m, _ in made], t_c), [k for _, k in made]))
    asked = [11, 0, 4]
    t_c, t_s, t_o = texts(asked)
    expected = []
    for f in found:
        p_c, p_s, p_o = (softmax(logits([f[k]], t)[0]) for k, t in enumerate((t_c, t_s, t_o)))
        expected.append([p_c[k] + p_s[c // N] * p_o[c % N] for k, c in enumerate(asked)])
    close(scores(method, asked, images), expected)


def test_before_training_compositions_are_scored_as_clip_does():
    """Up-projections start at zero, so nothing is added; the primitives' product is what CLIP's one path lacks."""
    method, images = build(Caila, shaken=False, **ROW), batch(4)
    clip: dict[str, Any] = {"context": "fixed", "vocabulary": "fixed", "paths": "c", "adapter": "none"}
    plain = build(PromptMethod, shaken=False, losses=(), inference=("ct",), **clip)
    _, z_s, z_o = method.sides(images.z)
    t = method.prompts.encode(torch.arange(12).numpy())
    p_s, p_o = ((method.scale * z @ rows.T).softmax(-1) for z, rows in ((z_s, t.states), (z_o, t.objects)))
    pairs = (p_s[:, :, None] * p_o[:, None]).reshape(4, 12)
    whole = scores(method, range(12), images) - pairs
    torch.testing.assert_close(whole.float(), scores(plain, range(12), images), rtol=1e-5, atol=1e-6)


def test_shifted_images_of_unseen_compositions_do_not_count():
    method = build(Caila, **ROW)
    z = torch.nn.functional.normalize(torch.randn(2, 8, dtype=torch.float64), dim=-1)
    t = method.shared().compositions
    assert 7 in SEEN and 3 not in SEEN  # the state of 6 with the object of 4, and the other way round
    both = method.shifted(z, z, torch.tensor([6, 4]), t)
    close(both.item(), cross_entropy([[method.scale * dot(unit(z[0] + z[1]), p.detach()) for p in t]], [SEEN.index(7)]))
