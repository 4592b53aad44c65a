"""Co-CGE's weighted graph by a dense matrix; with ties of one it is CGE on the unit sphere."""

from __future__ import annotations

import math

import pytest
import torch

from duplex.feasibility import feasibility
from duplex.methods.cge import Cge
from duplex.methods.co_cge import CoCge
from tests.methods.field import LABELS, SEEN, M, N, batch, build, close, cross_entropy, dot, mlp, scores, unit
from tests.methods.test_cge import ROW, dense


@pytest.mark.parametrize("world", ["closed", "open"])
def test_losses_and_scores_by_a_dense_matrix(world):
    method, images = build(CoCge, world, scale=9.0, margin=0.5, **ROW), batch(4)
    found = feasibility(method.words.states.numpy(), method.words.objects.numpy(), LABELS)
    rho = torch.as_tensor(found, dtype=torch.float32).tolist()  # as it is kept
    weights = None if world == "closed" else [1.0 if math.isinf(r) else max(0.0, r) for r in rho]
    learned = SEEN if world == "closed" else list(range(M * N))
    h = dense(method, 2, LABELS.target(world, "train").tolist(), range(M * N), weights)
    f = [unit(mlp(method.head, unit(z))) for z in images.z]
    margins = [0.0 if c in SEEN else 0.5 * rho[c] for c in learned]
    rows = [[9.0 * (dot(x, unit(h[c])) - margin) for c, margin in zip(learned, margins, strict=True)] for x in f]
    own = [learned.index(c) for c in images.compositions.tolist()]
    close(method.losses(images, method.shared())["c"].item(), cross_entropy(rows, own))
    asked = [5, 0, 11]
    close(scores(method, asked, images), [[9.0 * dot(x, unit(h[c])) for c in asked] for x in f])


def test_with_ties_of_one_it_is_cge_on_the_sphere():
    plain, cosine, images = build(Cge, **ROW), build(CoCge, scale=3.0, **ROW), batch(4)
    cosine.load_state_dict(plain.state_dict())
    rows = plain.pairs(cosine.columns)
    expected = 3.0 * torch.nn.functional.cosine_similarity(plain.image(images.z)[:, None], rows[None], dim=-1)
    close(scores(cosine, SEEN, images), expected)
