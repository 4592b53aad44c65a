import math
from typing import Any

import numpy as np
import pytest
import torch

from duplex.methods.cds import Cds, specificity_pairs, state_specificity
from tests.methods.field import LABELS, SEEN, M, N, batch, build, check_losses, scores
from tests.methods.loops import close, mlp, softmax
from tests.methods.world import random_labels

ROW: dict[str, Any] = {"width": 5, "specificity": 0.8, "context_width": 6}


def specificity(m):
    return 1 - math.log(1 + sum(c // N == m for c in SEEN)) / math.log(1 + N)


def test_losses_and_scores_by_loops():
    method, images = build(Cds, **ROW), batch(4)
    t = method.shared()
    assert [layer.out_features for layer in method.ranker if hasattr(layer, "out_features")] == [6, 1]
    close(state_specificity(LABELS), [specificity(m) for m in range(M)])

    def logit(c):
        return float(mlp(method.ranker, torch.cat([t.states[c // N], t.objects[c % N]]).detach())[0])

    terms = [
        math.log(1 + math.exp(logit(worse) - logit(better)))
        for better in SEEN
        for worse in SEEN
        if better % N == worse % N and specificity(better // N) > specificity(worse // N)
    ]
    assert terms
    check_losses(method, images, specificity=sum(terms) / len(terms))
    candidates = [10, 3, 0]
    z = method.paths.adapt(images.cls)
    encoded = method.paths.prompts.encode(torch.tensor(candidates).numpy())
    f = method.paths.factor_posteriors(z, encoded)
    expected = []
    for i in range(4):
        whole = softmax(method.paths.logits(z, encoded.compositions)[i])
        parts = [math.exp(f.log_s[i, c // N].item()) * math.exp(f.log_o[i, c % N].item()) for c in candidates]
        weights = [1 + 0.8 / (1 + math.exp(-logit(c))) for c in candidates]
        expected.append([a + b * w for a, b, w in zip(whole, parts, weights, strict=True)])
    close(scores(method, candidates, images), expected)


def test_the_specificity_loss_trains_only_the_ranker():
    method, images = build(Cds, **ROW), batch(4)
    method.losses(images, method.shared())["specificity"].backward()
    assert {name.split(".")[0] for name, p in method.named_parameters() if p.grad is not None} == {"ranker"}


@pytest.mark.parametrize("seed", range(5))
def test_pairs_of_one_object_whose_states_differ_in_specificity(seed):
    labels = random_labels(5, 4, np.random.default_rng(seed))
    d, seen = state_specificity(labels).tolist(), labels.pairs["train"].tolist()
    places = [
        (i, j) for i, a in enumerate(seen) for j, b in enumerate(seen) if a % 4 == b % 4 and d[a // 4] > d[b // 4]
    ]
    assert list(zip(*(part.tolist() for part in specificity_pairs(labels)), strict=True)) == places


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_specificity_loss_is_a_mean_over_pairs(count):
    method, images = build(Cds, **ROW), batch(4)
    more, less = method.more_specific[:count], method.less_specific[:count]
    method.more_specific, method.less_specific = more, less
    logits = method.specificity_logits(method.shared(), method.train_candidates).tolist()
    terms = [math.log1p(math.exp(logits[b] - logits[a])) for a, b in zip(more.tolist(), less.tolist(), strict=True)]
    close(method.losses(images, method.shared())["specificity"].item(), sum(terms) / (count or 1))
