import math
from typing import Any

import torch

from duplex.methods.scen import Scen
from tests.methods.field import SEEN, batch, build, check_losses, scores, targets
from tests.methods.loops import close, composed, cross_entropy, dot, linear, mlp, products, unit

ROW: dict[str, Any] = {"width": 5, "temperature": 0.5, "scale": 6.0, "contrast": 0.7}


def contrast(h, same, other, temperature):
    terms = []
    for i in range(len(h)):
        after = [(i + k) % len(h) for k in range(1, len(h))]
        positives = [j for j in after if same[j] == same[i]]
        rivals = [j for j in after if other[j] == other[i] and same[j] != same[i]]
        if positives and rivals:
            own = math.exp(dot(h[i], h[positives[0]]) / temperature)
            terms.append(-math.log(own / (own + sum(math.exp(dot(h[i], h[j]) / temperature) for j in rivals))))
    return sum(terms) / max(len(terms), 1)


def test_losses_and_scores_by_loops():
    method, images = build(Scen, **ROW), batch(8)
    place, m, n = targets(images)
    h_s = [unit(mlp(method.encode_s, unit(z))) for z in images.cls]
    h_o = [unit(mlp(method.encode_o, unit(z))) for z in images.cls]
    fused = [unit(linear(method.fuse, torch.cat(pair))) for pair in zip(h_s, h_o, strict=True)]
    contrast_s, contrast_o = contrast(h_s, m, n, 0.5), contrast(h_o, n, m, 0.5)
    assert contrast_s > 0 or contrast_o > 0
    check_losses(
        method,
        images,
        composition=cross_entropy(products(fused, [composed(method, c) for c in SEEN], 6), place),
        state=0.4 * cross_entropy([linear(method.classify_s, h) for h in h_s], m),
        object=0.6 * cross_entropy([linear(method.classify_o, h) for h in h_o], n),
        state_contrast=0.7 * contrast_s,
        object_contrast=0.7 * contrast_o,
    )
    close(scores(method, [4, 9], images), products(fused, [composed(method, c) for c in (4, 9)], 6))


def test_contrast_is_zero_without_a_positive_or_a_negative():
    method = build(Scen, **ROW)
    h = torch.eye(3, 5, dtype=torch.float64)
    for same, other in (([0, 1, 2], [0, 0, 0]), ([0, 0, 0], [0, 1, 2]), ([0, 0, 1], [0, 1, 2])):
        assert method.contrast(h, torch.tensor(same), torch.tensor(other)) == 0
