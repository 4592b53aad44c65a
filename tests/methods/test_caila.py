from typing import Any

import pytest
import torch

from duplex.errors import UsageError
from duplex.methods.base import Batch
from duplex.methods.caila import Caila, CailaOptions
from duplex.options import OptionError
from tests.methods.field import SEEN, N, batch, build, check_losses, scores, targets
from tests.methods.loops import close, cross_entropy, linear, products, softmax, unit
from tests.methods.world import features

ROW: dict[str, Any] = {"width": 4, "scale": 0.5}


def adapted(adapter, z):
    return z + adapter.scale * linear(adapter.up, linear(adapter.down, z).clamp(min=0))


def sides(part, z):
    three = [adapted(a, z) for a in (part.whole, part.state, part.object)]
    return unit(sum(three)), unit(three[1]), unit(three[2])


def test_losses_and_scores_by_loops():
    method, images = build(Caila, **ROW), batch(6)
    found = [sides(method.images, unit(z)) for z in images.cls]

    def texts(columns):
        t = method.prompts.encode(torch.as_tensor(columns).numpy())
        states = [adapted(method.texts.state, r) for r in t.states]
        objects = [adapted(method.texts.object, r) for r in t.objects]
        whole = [adapted(method.texts.whole, r) for r in t.compositions]
        whole = [(r + states[c // N] + objects[c % N]) / 3 for r, c in zip(whole, columns, strict=True)]
        return [[unit(r) for r in rows] for rows in (whole, states, objects)]

    t_c, t_s, t_o = texts(SEEN)
    features = list(zip(*found, strict=True))
    own, made = images.compositions.tolist(), []
    for i in range(6):
        j = (i + 1) % 6
        label = own[i] // N * N + own[j] % N
        if label in SEEN:
            made.append((unit(found[i][1] + found[j][2]), SEEN.index(label)))
    assert len(made) > 0
    place, m, n = targets(images)
    check_losses(
        method,
        images,
        composition=cross_entropy(products(features[0], t_c, method.scale), place),
        state=cross_entropy(products(features[1], t_s, method.scale), m),
        object=cross_entropy(products(features[2], t_o, method.scale), n),
        shift=cross_entropy(products([f for f, _ in made], t_c, method.scale), [k for _, k in made]),
    )
    candidates = [11, 0, 4]
    logits = products(features[0], texts(candidates)[0], method.scale)
    close(scores(method, candidates, images), [softmax(row) for row in logits])


def test_before_training_images_keep_their_features():
    method, images = build(Caila, shaken=False, **ROW), batch(4)
    z = torch.nn.functional.normalize(images.cls, dim=-1)
    for kept in method.images.images(z):
        torch.testing.assert_close(kept, z)


def test_without_a_seen_artificial_image_the_loss_is_zero():
    method = build(Caila, **ROW)
    unseen = next(c for c in range(12) if c not in SEEN)
    z = torch.nn.functional.normalize(torch.randn(1, 8, dtype=torch.float64), dim=-1)
    assert method.shift_loss(z, z, torch.tensor([unseen]), method.shared().compositions).item() == 0.0


def test_with_adapters_in_the_blocks_features_are_taken_as_they_are_with_a_temperature_each():
    plain = batch(6)
    named = {name: features(6, seed) for name, seed in (("cls_state", 11), ("cls_object", 12))}
    images = Batch({**plain.inputs, **named}, plain.compositions)
    method = build(Caila, adapter="blocks", state_end="cup")
    start = build(Caila, adapter="blocks", shaken=False).log_scales.exp()
    assert start.tolist() == pytest.approx([method.scale, 20 * method.scale, 20 * method.scale], rel=1e-6)
    scales = method.log_scales.exp().tolist()
    z = [[unit(row) for row in images.inputs[name]] for name in ("cls", "cls_state", "cls_object")]
    t = method.prompts.encode(torch.as_tensor(SEEN).numpy())
    whole = [unit(row + t.states[c // N] + t.objects[c % N]) for row, c in zip(t.compositions, SEEN, strict=True)]
    place, m, n = targets(images)
    check_losses(
        method,
        images,
        composition=cross_entropy(products(z[0], whole, scales[0]), place),
        state=cross_entropy(products(z[1], list(t.states), scales[1]), m),
        object=cross_entropy(products(z[2], list(t.objects), scales[2]), n),
    )
    close(scores(method, SEEN, images), [softmax(row) for row in products(z[0], whole, scales[0])])
    without = build(Caila).prompts.encode(torch.as_tensor(SEEN).numpy())
    close(without.objects, t.objects)
    assert not torch.allclose(without.states, t.states, atol=1e-3)
    with pytest.raises(UsageError, match=r"`adapter: blocks` needs fine-tuning; set `finetune: \{adapter"):
        method.losses(plain, method.shared())
    with pytest.raises(OptionError, match="adapter: blocks has no scale; leave scale out"):
        CailaOptions(adapter="blocks", scale=1.0)
