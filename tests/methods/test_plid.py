import math
from typing import Any

import torch

from duplex.methods.plid import Plid
from duplex.methods.prompts import Prompts
from duplex.options import TrainingOptions
from duplex.training.loop import optimiser_step
from tests.methods.field import LABELS, SEEN, N, batch, build, check_losses, primitive_means, scores, targets
from tests.methods.loops import close, cross_entropy, dot, linear, products, unit
from tests.methods.world import DIM, small_tower

ROW: dict[str, Any] = {"width": 5, "templates": ("a photo of", "this is", "one more"), "mix": 0.2, "primitives": 0.3}


def mean(rows):
    return sum(rows) / len(rows)


def described_by_hand(columns):
    candidates = torch.tensor(columns).numpy()
    texts = [
        Prompts(LABELS, small_tower(), paths="composition", template=t).encode(candidates).compositions
        for t in ROW["templates"]
    ]
    return [[rows[k] for rows in texts] for k in range(len(columns))]


def enriched_by_hand(method, columns):
    t = method.prompts.encode(torch.tensor(columns).numpy()).compositions
    e, found = method.enrich, []
    for k, described in enumerate(described_by_hand(columns)):
        weights = [math.exp(dot(linear(e.key, d), linear(e.query, t[k])) / math.sqrt(DIM)) for d in described]
        parts = [w / sum(weights) * linear(e.value, d) for w, d in zip(weights, described, strict=True)]
        found.append(t[k] + linear(e.out, torch.stack(parts).sum(0)))
    return found


def bounded_by_hand(scale, x, row, means, texts, y):
    """A row of logits with the margins of each class against y, whose samples are paired."""
    samples = [[unit(t + d) for d in described] for t, described in zip(means, texts, strict=True)]
    found = []
    for k, logit in enumerate(row):
        apart = [a - b for a, b in zip(samples[k], samples[y], strict=True)]
        variance = sum((d - mean(apart)) ** 2 for d in apart) / (len(apart) - 1)
        found.append(float(logit) + scale**2 / 2 * dot(x**2, variance))
    return found


def test_losses_and_scores_by_loops():
    method, images = build(Plid, **ROW), batch(4)
    t, texts = enriched_by_hand(method, SEEN), described_by_hand(SEEN)
    means, descriptions = (t, *primitive_means(t)), (texts, *primitive_means(map(torch.stack, texts)))
    scale = method.scale
    x = [unit(row) for row in images.cls]
    z = (x, *(part.detach() for part in method.factors(torch.stack(x))))
    c, s, o = (products(fs, map(unit, rows), scale) for fs, rows in zip(z, means, strict=True))
    mixed = [[0.8 * r[k] + 0.2 * (s[i][p // N] + o[i][p % N]) for k, p in enumerate(SEEN)] for i, r in enumerate(c)]
    bounds = []
    for fs, rows, classes, described, place in zip(z, (mixed, s, o), means, descriptions, targets(images), strict=True):
        paths = zip(fs, rows, place, strict=True)
        bounded = [bounded_by_hand(scale, f, row, classes, described, y) for f, row, y in paths]
        bounds.append(cross_entropy(bounded, place))
    check_losses(method, images, composition=bounds[0], state=0.3 * bounds[1], object=0.3 * bounds[2])
    candidates = [11, 0, 5]
    t = [unit(row) for row in enriched_by_hand(method, candidates)]
    logits = [
        [0.8 * scale * dot(f, t[k]) + 0.2 * (s[i][p // N] + o[i][p % N]) for k, p in enumerate(candidates)]
        for i, f in enumerate(x)
    ]
    close(scores(method, candidates, images), torch.tensor(logits, dtype=torch.float64).softmax(-1))


def test_the_weight_of_primitives_is_drawn_with_its_mean():
    method, like = build(Plid, **ROW).train(), torch.zeros(1, dtype=torch.float64)
    torch.manual_seed(5)
    drawn = torch.stack([method.draw_mix(like) for _ in range(4000)])
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean() - 0.2) < 0.01
    images, shared = batch(4), method.shared()
    first, second = (method.losses(images, shared)["composition"] for _ in range(2))
    assert first != second, "training draws it"


def test_the_batches_of_a_step_share_their_texts():
    results = []
    for size in (4, 2):
        method, settings = (
            build(Plid, **ROW),
            TrainingOptions(learning_rate=0.1, batch_size=size, epochs=1, accumulate=2),
        )
        optimiser_step(method, batch(4), torch.arange(4), settings, torch.optim.SGD(method.groups(), lr=0.1))
        results.append(method.state_dict())
    for name, value in results[0].items():
        close(results[1][name], value)
